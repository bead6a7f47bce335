"""Fingerprints: blind to how a body is written, sensitive to what it does, the same on every CPython."""

from __future__ import annotations

import ast
import glob
import io
import os
import re
import shutil
import subprocess
import sys
import tokenize
import warnings

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from snippets import PINNED, SNIPPETS

from kvmend.errors import FingerprintError
from kvmend.fingerprint import Generation, Table, dump_table, fingerprint, load_table, parse_table
from support.interpreter import SOURCES, run

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_OTHER_TOKEN = {
    "+": "-", "-": "+", "*": "/", "/": "*", "%": "@", "==": "!=", "!=": "==", "<": "<=", "<=": "<", ">": ">=",
    ">>": "<<", "&": "|", "|": "&", "^": "&", "+=": "-=", "@=": "*=", "and": "or", "or": "and", "is": "in",
    "in": "is", "if": "while", "not": "", "None": "True", "global": "nonlocal", "continue": "break",
    "break": "continue", "return": "yield", "async": "", "await": "", "**": "*", "~": "-", ":=": "==", "...": "pass",
    "from": "", "=": "==", "@": "", "pass": "...", "del": "",
}  # fmt: skip


def of(text: str) -> str:
    return fingerprint(ast.parse(text).body[0])


def shape(text: str) -> str:
    """What Python itself says of a body, docstrings and the letter u of u'' taken out."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant):
            node.kind = None
        if (
            isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
            and ast.get_docstring(node) is not None
        ):
            del node.body[0]
    return ast.dump(tree)


@pytest.mark.parametrize("name", SNIPPETS)
def test_a_snippet_has_the_pinned_fingerprint_on_this_interpreter(name: str) -> None:
    assert of(SNIPPETS[name]) == PINNED[name]


def interpreters() -> list[str]:
    """Every CPython 3.10 to 3.13 that can be found; this one at least."""
    found = [sys.executable]
    for version in ("3.10", "3.11", "3.12", "3.13"):
        found += glob.glob(os.path.expanduser(f"~/.pyenv/versions/{version}.*/bin/python"))
        found += filter(None, [shutil.which(f"python{version}")])
    # A version manager puts names on the path that start nothing.
    return [each for each in sorted(set(found)) if not subprocess.run([each, "-c", ""], capture_output=True).returncode]


def test_every_interpreter_found_here_gives_the_pinned_fingerprints() -> None:
    code = """
        import ast, sys
        from kvmend.fingerprint import fingerprint
        from snippets import SNIPPETS
        answer([sys.version, {name: fingerprint(ast.parse(text).body[0]) for name, text in SNIPPETS.items()}])
    """
    for python in interpreters():
        version, found = run(code, path=(*SOURCES, os.path.dirname(__file__)), python=python).value
        assert found == PINNED, version


@pytest.mark.parametrize("name", SNIPPETS)
def test_changing_any_letter_or_digit_changes_the_fingerprint(name: str) -> None:
    text, same, tried = SNIPPETS[name], [], 0
    original, fixed = of(text), shape(text)
    for place, character in enumerate(text):
        if not character.isalnum() or not character.isascii():
            continue
        other = str((int(character) + 1) % 10) if character.isdigit() else "q" if character != "q" else "z"
        mutant = text[:place] + other + text[place + 1 :]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                changed = shape(mutant) != fixed
            except SyntaxError:
                continue
            tried += 1
            if changed and of(mutant) == original:
                same.append((place, mutant))
    assert not same
    assert tried >= 3


@pytest.mark.parametrize("name", SNIPPETS)
def test_changing_any_operator_or_keyword_changes_the_fingerprint(name: str) -> None:
    text = SNIPPETS[name]
    original, fixed, lines = of(text), shape(text), text.splitlines(keepends=True)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.string not in _OTHER_TOKEN or token.type not in (tokenize.OP, tokenize.NAME):
            continue
        row, (start, end) = token.start[0] - 1, (token.start[1], token.end[1])
        line = lines[row][:start] + _OTHER_TOKEN[token.string] + lines[row][end:]
        mutant = "".join([*lines[:row], line, *lines[row + 1 :]])
        try:
            changed = shape(mutant) != fixed
        except SyntaxError:
            continue
        assert not changed or of(mutant) != original, mutant


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("f(1)", "f(1.0)"),
        ("f(True)", "f(1)"),
        ("f('a')", "f(b'a')"),
        ("f(None)", "f('None')"),
        ("f(...)", "f('...')"),
        ("f(a, b)", "f(b, a)"),
        ("f(*a)", "f(a)"),
        ("f(a=b)", "f(a, b)"),
        ("f'{x}'", "f'{x!s}'"),
        ("f'{x}'", "f'{x:}'"),
        ("f'{x}y'", "f'{x:y}'"),
        ("f'{{x}}'", "f'{x}'"),
        ("f'x'", "'x'"),
        ("f'{x}' f'{y}'", "f'{x} {y}'"),
        ("(a, b)", "[a, b]"),
        ("(a,)", "a"),
        ("a if b else c", "c if b else a"),
        ("lambda: 0", "lambda a: 0"),
        ("[x for x in y]", "(x for x in y)"),
        ("a and b and c", "(a and b) and c"),
        ("a < b < c", "(a < b) < c"),
        ("a[1:2]", "a[1:2:3]"),
        ("def f(a, *, b): x", "def f(a, b): x"),
        ("def f(a, /, b): x", "def f(a, b): x"),
        ("def f(a, b=1): x", "def f(a=1, b=1): x"),
        ("def f(*, a=1, b): x", "def f(*, a, b=1): x"),
        ("@d\ndef f(): x", "def f(): x"),
        ("@d\n@e\ndef f(): x", "@e\n@d\ndef f(): x"),
        ("async def f(): x", "def f(): x"),
        ("def f() -> int: x", "def f(): x"),
        ("def f(): return", "def f(): return None"),
        ("def f(): return 'x'", "def f(): 'x'"),
        ("def f():\n  x\n  'second'", "def f():\n  x\n  'third'"),
        ("def f():\n  b'bytes'", "def f():\n  b'other'"),
        ("def f():\n  f'{x}'", "def f():\n  f'{y}'"),
        ("if a:\n  b\nelse:\n  c", "if a:\n  b\nc"),
        ("x: int", "x: int = 1"),
        ("(x): int = 1", "x: int = 1"),
        ("from . import a", "from .. import a"),
        ("from a import b", "from .a import b"),
        ("{**a}", "{None: a}"),
        ("class A(B): x", "class A(metaclass=B): x"),
        ("try: a\nexcept: b", "try: a\nexcept E: b"),
    ],
)
def test_bodies_that_do_different_things_have_different_fingerprints(one: str, other: str) -> None:
    assert of(one) != of(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("def f():\n    'doc'\n    return 1", "def f():\n    return 1"),
        ("def f():\n    '''Doc\n    of lines.'''\n\n    return 1", "def f():\n    'Other.'\n    return 1"),
        (
            "class A:\n  'd'\n  def g(self):\n    'e'\n    def h():\n      'f'\n      x",
            "class A:\n  def g(self):\n    def h():\n      x",
        ),
        (
            "def f(a, b): return (a + b)",
            "def f(\n    a,\n    b,\n):\n    # says why\n    return a + \\\n        b  # and how",
        ),
        ("def f(): return 'it'", 'def f(): return "it"'),
        ("def f(): return 'a' 'b'", "def f(): return ('ab')"),
        ("def f(): return f'a{x}' 'b' f'c'", "def f(): return f'a{x}bc'"),
        ("def f(): return 0x10, 1_000", "def f(): return 16, 1000"),
        ("def f(): return u'x'", "def f(): return 'x'"),
        ("def f(): return r'\\d'", "def f(): return '\\\\d'"),
        ("def f(): x; y", "def f():\n\tx\n\ty"),
        ("def f(): x", "def f():\r\n\r\n    x\r\n"),
    ],
)
def test_layout_comments_docstrings_and_spelling_do_not_count(one: str, other: str) -> None:
    assert of(one) == of(other)


@seed(20260101)
@settings(max_examples=150, deadline=None, database=None)
@given(st.data())
def test_no_sprinkling_of_comments_and_blank_lines_changes_a_fingerprint(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([each for each in SNIPPETS if "'''" not in SNIPPETS[each]]))
    width = data.draw(st.sampled_from(["  ", "\t", "        "]))
    lines = []
    for line in SNIPPETS[name].splitlines():
        lines += data.draw(st.lists(st.sampled_from(["", "   ", "# a remark", "      # 'quoted' (", "\f"]), max_size=2))
        body = line.lstrip(" ")
        tail = data.draw(st.sampled_from(["", "  ", "  # why"]))
        lines.append(width * ((len(line) - len(body)) // 4) + body + tail)
    assert of("\n".join(lines)) == PINNED[name]


def test_a_fingerprint_is_sixteen_hex_digits() -> None:
    assert all(re.fullmatch("[0-9a-f]{16}", value) for value in PINNED.values())
    assert len(set(PINNED.values())) == len(PINNED)


# Tables -------------------------------------------------------------------------------------------------------------

_TABLE = Table(
    fix="toy-count",
    generations=(
        Generation(state="affected", features=frozenset({"b", "a"}), releases=("1.0", "1.1"),
                   bodies={"m:f": "1" * 16, "m:g": None}),
        Generation(state="fixed", features=frozenset(), releases=("2.0",), bodies={"m:f": "2" * 16, "m:g": "3" * 16}),
    ),
)  # fmt: skip


def test_a_table_survives_being_written_and_read() -> None:
    assert parse_table(dump_table(_TABLE), "here") == _TABLE
    assert dump_table(parse_table(dump_table(_TABLE), "here")) == dump_table(_TABLE)


def test_a_table_matches_whole_sources_only_and_knows_single_bodies() -> None:
    assert _TABLE.match({"m:f": "1" * 16, "m:g": None}) is _TABLE.generations[0]
    assert _TABLE.match({"m:f": "1" * 16, "m:g": "3" * 16}) is None
    assert _TABLE.match({"m:f": "1" * 16}) is None
    assert _TABLE.releases_of("m:f", "1" * 16) == ("1.0", "1.1")
    assert _TABLE.releases_of("m:f", "9" * 16) == ()


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "null", "{}", '{"schema": 2, "fix": "x", "generations": []}', '{"schema": 1, "generations": []}',
        '{"schema": 1, "fix": "x", "generations": {"a": 1}}',
        '{"schema": 1, "fix": "x", "generations": [{"state": "odd"}]}',
        '{"schema": 1, "fix": "x", "generations": [{"state": "fixed", "features": 0, "releases": [1], "bodies": {}}]}',
        '{"schema": 1, "fix": "x", "generations": [{"state": "fixed", "features": [], "releases": [], "bodies": {}}]}',
        '{"schema": 1, "fix": "x", "generations": [{"state": "fixed", "features": "", "releases": [1], "bodies": 0}]}',
    ],
)  # fmt: skip
def test_a_malformed_table_is_an_error_that_names_the_file(text: str) -> None:
    with pytest.raises(FingerprintError, match=r"^tables:x\.json"):
        parse_table(text, "tables:x.json")


@pytest.mark.parametrize(
    "where", ["no_such_package_at_all:x.json", "kvmend:no.json", "kvmend", "kvmend.fix:x.json", ":x.json"]
)
def test_a_missing_table_is_an_error_that_names_it(where: str) -> None:
    with pytest.raises(FingerprintError, match=re.escape(where)):
        load_table(where)
