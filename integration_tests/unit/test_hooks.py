"""Fixes that are loaded before, while and after the framework is imported."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from support.interpreter import run
from support.toyfw import CACHE, ENGINE, register_fix, write_module, write_release

TWO_MODULES = 'make_fix(site("Engine.lookup"), site("Engine.size"), site("Cache.get", CACHE))'
_STEPS = {
    "engine": "import toyfw.engine",
    "cache": "import toyfw.cache",
    "apply": "apply_all('toyfw')",
    "remove": "remove_all()",
}
_LOOK = """
import sys, toyfw.engine, toyfw.cache
from kvmend.applier import results
found = [toyfw.engine.Engine().lookup("a"), toyfw.cache.Cache().get("k")]
answer([found, [str(result.outcome) for result in results() if result.fix == "toy-count"]])
"""
_IMPORTS = "from kvmend.loading import apply_all, remove_all\n"
PLAIN = ["found a", "cached k"]
MENDED = ["found a +kvmend", "cached k +kvmend"]

_ONCE = list(itertools.permutations(_STEPS))
_AGAIN = [
    ("apply", "apply", "engine", "cache"),
    ("apply", "engine", "apply", "cache"),
    ("apply", "engine", "apply", "cache", "apply"),
    ("engine", "cache", "apply", "apply"),
    ("apply", "remove", "apply", "engine", "cache"),
    ("apply", "engine", "remove", "apply", "cache"),
    ("apply", "engine", "cache", "remove", "apply"),
    ("apply", "engine", "cache", "remove", "remove", "apply", "apply"),
    ("engine", "apply", "remove", "cache", "apply", "remove"),
    ("remove", "apply", "remove", "apply", "engine", "remove", "cache", "apply"),
]


@pytest.mark.parametrize("order", [*_ONCE, *_AGAIN], ids="-".join)
def test_in_every_order_of_import_apply_and_remove_the_last_word_counts_and_nothing_is_wrapped_twice(
    tmp_path: Path, order: tuple[str, ...]
) -> None:
    in_order(tmp_path, order, TWO_MODULES)


@pytest.mark.parametrize("order", [*_ONCE[::4], *_AGAIN], ids="-".join)
def test_the_same_holds_of_a_fix_that_is_judged_late(tmp_path: Path, order: tuple[str, ...]) -> None:
    in_order(tmp_path, order, f"{TWO_MODULES[:-1]}, judge_late=True)")


def in_order(tmp_path: Path, order: tuple[str, ...], fix: str) -> None:
    write_release(tmp_path)
    register_fix(tmp_path, fix)
    found, outcomes = run(_IMPORTS + "\n".join(_STEPS[step] for step in order) + _LOOK, path=[tmp_path]).value
    last = [step for step in order if step in ("apply", "remove")][-1]
    assert (found, outcomes) == ((MENDED, ["applied"]) if last == "apply" else (PLAIN, []))


def test_a_fix_with_sites_in_two_modules_touches_none_before_both_are_there(tmp_path: Path) -> None:
    write_release(tmp_path)
    register_fix(tmp_path, TWO_MODULES)
    code = """
        import sys
        before = toyfw.engine.Engine().lookup("a") if apply_all("toyfw") and __import__("toyfw.engine") else ""
        import toyfw.cache
        answer([before, toyfw.engine.Engine().lookup("a"), toyfw.cache.Cache().get("k")])
    """
    code = _IMPORTS + "import toyfw\n" + "\n".join(line.strip() for line in code.splitlines())
    assert run(code, path=[tmp_path]).value == ["found a", *MENDED]


def test_loading_imports_no_framework(tmp_path: Path) -> None:
    write_release(tmp_path)
    register_fix(tmp_path)
    code = (
        _IMPORTS
        + "import sys\napply_all()\nanswer([n for n in sys.modules if n.startswith(('toyfw', 'vllm', 'torch'))])"
    )
    assert run(code, path=[tmp_path]).value == []


def test_a_fix_that_is_judged_late_reads_no_source_before_its_module_is_imported(tmp_path: Path) -> None:
    """Catches start-up time spent in every process on a module that only one kind of machine imports."""
    write_release(tmp_path)
    register_fix(tmp_path, "make_fix(judge_late=True)")
    code = _IMPORTS + (
        "import toyfw\n"
        "from kvmend import trees\n"
        "read = []\n"
        "plain = trees.FolderTree.read\n"
        "trees.FolderTree.read = lambda self, name: read.append(name) or plain(self, name)\n"
        "armed = [str(result.outcome) for result in apply_all('toyfw')]\n"
        "before = [name for name in read if name.startswith('toyfw/')]\n"
        "import toyfw.engine\n"
        "answer([armed, before, 'toyfw/engine.py' in read, toyfw.engine.Engine().lookup('a')])"
    )
    assert run(code, path=[tmp_path]).value == [["armed"], [], True, MENDED[0]]


def test_a_fix_that_is_judged_late_ends_as_its_source_deserves_when_the_module_is_imported(tmp_path: Path) -> None:
    write_release(tmp_path, "2.0")
    register_fix(tmp_path, "make_fix(judge_late=True)")
    code = _IMPORTS + (
        "from kvmend.applier import results\n"
        "apply_all('toyfw')\nimport toyfw.engine\nanswer([str(result.outcome) for result in results()])"
    )
    assert run(code, path=[tmp_path]).value == ["already_fixed"]


def test_two_fixes_that_wait_for_one_module_are_both_applied(tmp_path: Path) -> None:
    """Catches a finder that keeps another one of ours from seeing the import."""
    write_release(tmp_path)
    register_fix(tmp_path)
    register_fix(
        tmp_path,
        'make_fix(site("Engine.size"), id="toy-size", switch="KVMEND_TOY_SIZE")',
        name="toy-size",
        dist="others",
    )
    code = _IMPORTS + (
        "from kvmend.applier import results\n"
        "apply_all('toyfw')\nimport toyfw.engine\nanswer([str(result.outcome) for result in results()])"
    )
    assert run(code, path=[tmp_path]).value == ["applied", "applied"]


def test_an_import_that_fails_and_is_tried_again_is_seen(tmp_path: Path) -> None:
    write_release(tmp_path, changes={"engine": f"import os\nif 'FINE' not in os.environ: raise ImportError\n{ENGINE}"})
    register_fix(tmp_path)
    code = _IMPORTS + (
        "import os\napply_all('toyfw')\n"
        "try: import toyfw.engine\nexcept ImportError: os.environ['FINE'] = '1'\n"
        "import toyfw.engine\nanswer(toyfw.engine.Engine().lookup('a'))"
    )
    assert run(code, path=[tmp_path]).value == MENDED[0]


@pytest.mark.parametrize("first", ["theirs", "ours"])
def test_a_post_import_hook_of_somebody_else_for_the_same_module_runs_once_and_so_does_ours(
    tmp_path: Path, first: str
) -> None:
    write_release(tmp_path)
    register_fix(tmp_path)
    theirs = (
        "import wrapt\nseen = []\nwrapt.register_post_import_hook(lambda m: seen.append(m.__name__), 'toyfw.engine')\n"
    )
    parts = [theirs, "apply_all('toyfw')\n"]
    code = _IMPORTS + "".join(parts if first == "theirs" else reversed(parts))
    code += "import toyfw.engine\nanswer([seen, toyfw.engine.Engine().lookup('a')])"
    assert run(code, path=[tmp_path]).value == [["toyfw.engine"], MENDED[0]]


# Half imported ------------------------------------------------------------------------------------------------------

_PLUGINS = "from kvmend.loading import apply_all\napply_all('toyfw')\n"
_END = "\nimport next_import\n"


def half_imported(root: Path, changes: dict[str, str], code: str = "import toyfw", fix: str = TWO_MODULES) -> Any:
    write_release(root, changes=changes)
    register_fix(root, fix)
    write_module(root, "next_import", "")
    return run(code + _END + _LOOK, path=[root]).value


@pytest.mark.parametrize(
    "init",
    [
        f"{_PLUGINS}from toyfw import engine, cache\n",
        f"from toyfw import engine\n{_PLUGINS}from toyfw import cache\n",
        f"from toyfw import engine, cache\n{_PLUGINS}",
        _PLUGINS,
    ],
)
def test_a_package_that_loads_plugins_in_the_middle_of_its_own_import_is_mended(tmp_path: Path, init: str) -> None:
    assert half_imported(tmp_path, {"__init__": init}) == [MENDED, ["applied"]]


@pytest.mark.parametrize("before", [True, False])
def test_a_module_that_loads_plugins_before_or_after_its_classes_is_mended(tmp_path: Path, before: bool) -> None:
    text = _PLUGINS + ENGINE if before else ENGINE + _PLUGINS
    assert half_imported(tmp_path, {"engine": text}, "import toyfw.cache, toyfw.engine") == [MENDED, ["applied"]]
    assert half_imported(tmp_path, {"engine": text}, "import toyfw.engine, toyfw.cache") == [MENDED, ["applied"]]


def test_a_module_that_loads_plugins_between_its_classes_is_mended(tmp_path: Path) -> None:
    head, tail = ENGINE.split("class Engine")
    text = f"{head}{_PLUGINS}\n\nclass Engine{tail}"
    assert half_imported(tmp_path, {"engine": text}, "import toyfw.cache, toyfw.engine") == [MENDED, ["applied"]]


def test_a_half_imported_fix_does_not_hide_the_next_import_from_the_hooks_of_another(tmp_path: Path) -> None:
    write_release(tmp_path, changes={"engine": _PLUGINS + ENGINE})
    register_fix(tmp_path)
    other = 'make_fix(site("Cache.get", CACHE), id="toy-other", switch="KVMEND_TOY_OTHER")'
    register_fix(tmp_path, other, name="toy-other", dist="toy-others")
    code = """
        import toyfw.engine
        import toyfw.cache
        from kvmend.applier import results
        answer([toyfw.engine.Engine().lookup("a"), toyfw.cache.Cache().get("k"), [str(r.outcome) for r in results()]])
    """
    assert run(code, path=[tmp_path]).value == [*MENDED, ["applied", "applied"]]


def test_a_factory_that_imports_something_while_it_wraps_does_not_wrap_twice(tmp_path: Path) -> None:
    write_release(tmp_path, changes={"engine": _PLUGINS + ENGINE})
    write_module(
        tmp_path,
        "importing",
        """
        from support.toyfix import tag
        def wrap(original, context):
            import importlib, chunk_of_nothing
            return tag(original, context)
        """,
    )
    write_module(tmp_path, "chunk_of_nothing", "")
    fix = 'make_fix(site("Engine.lookup", wrap=__import__("importing").wrap), site("Cache.get", CACHE))'
    assert half_imported(tmp_path, {"engine": _PLUGINS + ENGINE}, "import toyfw.cache, toyfw.engine", fix) == [
        MENDED,
        ["applied"],
    ]


def test_a_module_whose_import_fails_is_mended_when_it_succeeds(tmp_path: Path) -> None:
    failing = "import builtins\nif not hasattr(builtins, 'second_try'):\n    raise ImportError('not now')\n" + CACHE
    code = """
        import builtins
        from kvmend.loading import apply_all
        apply_all("toyfw")
        import toyfw.engine
        try:
            import toyfw.cache
        except ImportError:
            builtins.second_try = True
    """
    code = "\n".join(line.removeprefix("        ") for line in code.splitlines())
    assert half_imported(tmp_path, {"cache": failing}, code) == [MENDED, ["applied"]]


def test_a_module_that_turns_out_not_to_have_the_site_fails_the_fix_at_its_import(tmp_path: Path) -> None:
    found, outcomes = half_imported(
        tmp_path, {"cache": CACHE + "\ndel Cache.get\nCache.get = lambda self, key: 'own'\n"}, _PLUGINS
    )
    assert (found, outcomes) == (["found a", "own"], ["conflict"])


def test_importing_in_one_thread_and_applying_in_another_wraps_once_whoever_comes_first(tmp_path: Path) -> None:
    write_release(tmp_path)
    register_fix(tmp_path, TWO_MODULES)
    write_module(tmp_path, "next_import", "")
    code = """
        import importlib, sys, threading
        from kvmend.journal import JOURNAL
        from kvmend.loading import apply_all
        seen = set()
        for _ in range(50):
            JOURNAL.entries.clear()
            for name in [name for name in sys.modules if name.startswith("toyfw")]:
                del sys.modules[name]
            barrier = threading.Barrier(3)
            def work(what, argument):
                barrier.wait()
                what(argument)
            threads = [
                threading.Thread(target=work, args=(importlib.import_module, "toyfw.engine")),
                threading.Thread(target=work, args=(importlib.import_module, "toyfw.cache")),
                threading.Thread(target=work, args=(apply_all, "toyfw")),
            ]
            [thread.start() for thread in threads]
            [thread.join(20) for thread in threads]
            assert not any(thread.is_alive() for thread in threads), "deadlock"
            import toyfw.engine, toyfw.cache, next_import
            sys.modules.pop("next_import")
            seen.add((toyfw.engine.Engine().lookup("a"), toyfw.cache.Cache().get("k")))
        answer(sorted(seen))
    """
    assert run(code, path=[tmp_path]).value == [MENDED]
