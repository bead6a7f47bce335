"""Finding a body: what the name means once the module has run, by lines where possible, by a parse otherwise."""

from __future__ import annotations

import ast
import random
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmend import source
from kvmend.fingerprint import fingerprint
from kvmend.fix import BodySource
from kvmend.source import find_body


def find(text: str, qualname: str) -> BodySource | None:
    return find_body(text, "m", qualname, "m.py")


def found(text: str, qualname: str) -> BodySource:
    body = find(text, qualname)
    assert body is not None
    return body


def bare(text: str) -> str:
    return fingerprint(ast.parse(text).body[0])


def test_a_body_knows_key_path_line_text_and_tree() -> None:
    body = found("import x\n\n\nclass A:\n    def f(self):\n        return 1\n\n    def g(self): ...\n", "A.f")
    assert (body.key, body.path, body.line) == ("m:A.f", "m.py", 5)
    assert body.text == "    def f(self):\n        return 1\n"
    assert isinstance(body.tree, ast.FunctionDef)
    assert body.fingerprint == bare("def f(self):\n    return 1")


@pytest.mark.parametrize("qualname", ["g", "A.g", "B.f", "f", "A.f.g", "A.B"])
def test_a_name_that_is_not_defined_there_is_none(qualname: str) -> None:
    assert find("class A:\n    def f(self):\n        h = g = f = B = 1\n", qualname) is None


@pytest.mark.parametrize(
    "text", ["def f(:\n  pass\n", "def f():\npass\n", "def f():\n  'x\n", "\0def f(): pass", "def f():\n  return )\n"]
)
def test_a_file_that_does_not_parse_has_no_bodies(text: str) -> None:
    assert find(text, "f") is None


def test_a_body_is_found_beside_lines_that_this_python_cannot_parse() -> None:
    assert find("def f():\n    return 1\n\nmatch ? new syntax\n", "f") is not None


def test_a_body_nested_too_deeply_to_walk_is_none_and_no_crash() -> None:
    assert find("def f():\n    return " + "+".join(["a"] * 20_000) + "\n", "f") is None


@pytest.mark.parametrize(
    ("text", "qualname", "same_as"),
    [
        # The last definition is what the name means.
        ("def f(): return 1\ndef f(): return 2\n", "f", "def f(): return 2"),
        ("class A:\n  def f(s): return 1\n  def f(s): return 2\n", "A.f", "def f(s): return 2"),
        ("class A:\n  def f(s): return 1\nclass A:\n  def f(s): return 2\n", "A.f", "def f(s): return 2"),
        ("def f(): return 1\nclass f: pass\n", "f", "class f: pass"),
        ("if x:\n  def f(): return 1\ndef f(): return 2\n", "f", "def f(): return 2"),
        # A name is that of its own scope.
        (
            "class A:\n  def f(s): return 1\ndef f(): return 2\nclass B:\n  def f(s): return 3\n",
            "f",
            "def f(): return 2",
        ),
        ("def g():\n  def f(): return 1\ndef f(): return 2\n", "f", "def f(): return 2"),
        ("def f(): return 2\ndef g():\n  def f(): return 1\n", "f", "def f(): return 2"),
        (
            "class A:\n  def f(s):\n    def f(): return 1\n    return 2\n",
            "A.f",
            "def f(s):\n  def f(): return 1\n  return 2",
        ),
        ("class A:\n  class B:\n    def f(s): return 1\n  def f(s): return 2\n", "A.B.f", "def f(s): return 1"),
        ("class A:\n  class B:\n    def f(s): return 1\n  def f(s): return 2\n", "A.f", "def f(s): return 2"),
        ("def ff(): return 1\ndef f(): return 2\ndef f_(): return 3\n", "f", "def f(): return 2"),
        # Decorators belong to the body, however they are written.
        ("@d\n@e(1)\ndef f(): return 1\n", "f", "@d\n@e(1)\ndef f(): return 1"),
        ("@d\n# remark\n\n@e\n# remark\ndef f(): return 1\n", "f", "@d\n@e\ndef f(): return 1"),
        ("@d(\n    1,\n)\ndef f(): return 1\n", "f", "@d(1)\ndef f(): return 1"),
        ("@d(1,\n   2)\ndef f(): return 1\n", "f", "@d(1, 2)\ndef f(): return 1"),
        ("@d(\nx=1,\n)\ndef f(): return 1\n", "f", "@d(x=1)\ndef f(): return 1"),
        ("@d(\nx=1)\ndef f(): return 1\n", "f", "@d(x=1)\ndef f(): return 1"),
        ("@d('''\ntext''')\ndef f(): return 1\n", "f", "@d('''\ntext''')\ndef f(): return 1"),
        ("@d \\\n(1)\ndef f(): return 1\n", "f", "@d(1)\ndef f(): return 1"),
        (
            "class A:\n    @d(\n        1\n    )\n    # remark\n    def f(s): return 1\n",
            "A.f",
            "@d(1)\ndef f(s): return 1",
        ),
        (
            "class A:\n    def g(\n        s,\n    ) -> int:\n        return 0\n\n    def f(s): return 1\n",
            "A.f",
            "def f(s): return 1",
        ),
        ("x = g(\n)\ndef f(): return 1\n", "f", "def f(): return 1"),
        ("x = (a\n@ b)\ndef f(): return 1\n", "f", "def f(): return 1"),
        # Headers and bodies of every layout.
        ("def f(\n    a,\n    b=(\n1),\n) -> int:\n    return a\n", "f", "def f(a, b=(1)) -> int: return a"),
        ("async  def  f(): return 1\n", "f", "async def f(): return 1"),
        (
            "class A(\n    B,\n):\n  def g(s):\n    def f(): return 1\n  def f(s): return 2\n",
            "A.f",
            "def f(s): return 2",
        ),
        ("class A(\n    B,\n):\n    def f(s): return 2\n", "A.f", "def f(s): return 2"),
        ("def f():\n    x = '''\nat column 0\n  def f(): no\n'''\n    return x\n", "f", "x"),
        ("def f():\n    x = 1 + \\\n2\n    return x\n", "f", "def f():\n    x = 1 + 2\n    return x"),
        ("def f():\n    x = (1,\n2,\n)\n    return x\n", "f", "def f():\n    x = (1, 2)\n    return x"),
        ("def f():\n    x = 'a\\\nb'\n    return x\n", "f", "def f():\n    x = 'ab'\n    return x"),
        ("def f():\n# at column 0\n    return 1\n# end\n", "f", "def f(): return 1"),
        ("class A:\n\tdef f(s):\n\t\treturn 1\n\n\tdef g(s):\n\t\treturn 2\n", "A.f", "def f(s): return 1"),
        ("class A:\r\n    def f(s):\r\n        return 1\r\n\r\n    x = 1\r\n", "A.f", "def f(s): return 1"),
        ("class A:\n    def f(s): return 1\n    x = 1\n", "A.f", "def f(s): return 1"),
        ("def f(): return 1", "f", "def f(): return 1"),
        ("if 1:\n    pass\ndef f():\n    return 1\nelse_ = 2\n", "f", "def f(): return 1"),
        # What stands in a string is no definition.
        ("'''\ndef f():\n    return 1\n'''\ndef f(): return 2\n", "f", "def f(): return 2"),
        ("def f(): return 2\nx = '''\ndef f():\n    return 1\n'''\n", "f", "def f(): return 2"),
        (
            "class A:\n  '''\n  def f(s): return 1\n  '''\n  x = \"'''\"\n  def f(s): return 2\n",
            "A.f",
            "def f(s): return 2",
        ),
        ('x = \'it\'\'s\'  # don\'t """\ndef f(): return 2\ny = """\n"""\n', "f", "def f(): return 2"),
    ],
)
def test_a_body_is_what_the_name_means(text: str, qualname: str, same_as: str) -> None:
    if same_as == "x":
        same_as = text
    assert found(text, qualname).fingerprint == bare(same_as)


@pytest.mark.parametrize(
    ("text", "qualname"),
    [
        ("'''\ndef f():\n    return 1\n'''\n", "f"),
        ("class A:\n    '''\n    def f(self):\n        return 1\n    '''\n", "A.f"),
        ("x = 'a\\\ndef f(): return 1\\\n'\n", "f"),
        ("# def f(): return 1\n", "f"),
    ],
)
def test_a_definition_in_a_string_or_a_comment_is_none(text: str, qualname: str) -> None:
    assert find(text, qualname) is None


@pytest.mark.parametrize(
    ("text", "qualname"),
    [
        ("if x:\n    def f(): return 1\nelse:\n    def f(): return 2\n", "f"),
        ("def f(): return 1\nif x:\n    def f(): return 2\n", "f"),
        ("try:\n    from a import f\nexcept ImportError:\n    def f(): return 1\n", "f"),
        ("class A:\n    def f(s): return 1\n    if x:\n        def f(s): return 2\n", "A.f"),
        ("class A:\n    def f(s): return 1\nif x:\n    class A: pass\n", "A.f"),
        ("def f(): return 1\nwith a:\n    for b in c:\n        while d:\n            def f(): return 2\n", "f"),
        ("def f(): return 1\nmatch a:\n    case 1:\n        def f(): return 2\n", "f"),
    ],
)
def test_a_definition_that_only_running_decides_is_not_known(text: str, qualname: str) -> None:
    assert find(text, qualname) is None


def test_lines_are_counted_as_python_counts_them() -> None:
    text = "x = 'a\x0cb'\n\x0c\ny = '\u2028\x85\x1c'\n\n\ndef f():\n    return '\u2028'\n\n\n"
    text += "@d(\n    1\n)\ndef g():\n    return 2\n"
    assert (found(text, "f").line, found(text, "f").text) == (6, "def f():\n    return '\u2028'\n")
    assert (found(text, "g").line, found(text, "g").text) == (13, "@d(\n    1\n)\ndef g():\n    return 2\n")


def test_a_framework_with_invalid_escapes_is_read_without_a_warning_or_an_error() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert find("def f():\n    return '\\d'\n", "f") is not None
        assert find("def g(): pass\ndef g():\n    return '\\d'\n", "g") is not None
    assert not caught
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find("def f():\n    return '\\d'\n", "f") is not None


def definitions(tree: ast.Module | source.Definition, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for node in tree.body:
        if isinstance(node, source._DEFINITIONS):
            yield (*above, node.name)
            yield from definitions(node, (*above, node.name))


def test_cutting_by_lines_and_parsing_the_file_agree_on_the_standard_library() -> None:
    library = Path(sysconfig.get_paths()["stdlib"])
    packages = ("asyncio", "email", "json", "logging", "importlib", "concurrent", "unittest", "http", "xml", ".")
    files = sorted(file for package in packages for file in (library / package).glob("*.py"))
    compared = fast = 0
    for file in random.Random(7).sample(files, 40):
        text = file.read_text(encoding="utf-8")
        tree, lines = ast.parse(text), text.split("\n")
        inside = source._inside_strings(text)
        for names in sorted(set(definitions(tree))):
            cut = source._by_indentation([f"{line}\n" for line in lines], inside, list(names))
            parsed = source._by_tree(tree, list(names))
            compared += 1
            if cut is not None:
                fast += 1
                assert parsed is not None, (file, names)
                assert (fingerprint(cut[0]), cut[1]) == (fingerprint(parsed), parsed.lineno), (file, names)
    assert compared > 300
    assert fast > 0.8 * compared  # the cut is there to be used
