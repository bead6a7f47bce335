"""Other plugins at the same functions: before ours, over ours, instead of ours, and another copy of kvmend."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import wrapt

from kvmend import applier
from kvmend.outcome import Outcome, Result
from support.interpreter import SOURCES, run
from support.toyfix import make_fix, site
from support.toyfw import write_module, write_release

#: How plugins replace a method, by the way they keep the old one.
KEEPING = {
    "functools.wraps": """
        import functools
        from toyfw.engine import Engine
        def wrapped(old):
            @functools.wraps(old)
            def lookup(self, request):
                return old(self, request) + " +foreign"
            return lookup
        Engine.lookup = wrapped(Engine.lookup)
    """,
    "closure": """
        from toyfw.engine import Engine
        def wrapped(old):
            def replacement(self, request):
                return old(self, request) + " +foreign"
            return replacement
        Engine.lookup = wrapped(Engine.lookup)
    """,
    "module global": """
        from toyfw.engine import Engine
        _old_lookup = Engine.lookup
        def lookup(self, request):
            return _old_lookup(self, request) + " +foreign"
        Engine.lookup = lookup
    """,
    "default argument": """
        from toyfw.engine import Engine
        def lookup(self, request, _old=Engine.lookup):
            return _old(self, request) + " +foreign"
        Engine.lookup = lookup
    """,
    "method of an object": """
        from toyfw.engine import Engine
        class Patch:
            def __init__(self, old):
                self.old = old
            def run(self, engine, request):
                return self.old(engine, request) + " +foreign"
        _patch = Patch(Engine.lookup)
        Engine.lookup = lambda self, request: _patch.run(self, request)
    """,
    "attribute of the class": """
        from toyfw.engine import Engine
        Engine._old_lookup = Engine.lookup
        def lookup(self, request):
            return self._old_lookup(request) + " +foreign"
        Engine.lookup = lookup
    """,
    "wrapt": """
        import wrapt
        def wrapper(wrapped, instance, args, kwargs):
            return wrapped(*args, **kwargs) + " +foreign"
        wrapt.wrap_function_wrapper("toyfw.engine", "Engine.lookup", wrapper)
    """,
    "twice": """
        import functools, wrapt
        from toyfw.engine import Engine
        def wrapped(old):
            @functools.wraps(old)
            def lookup(self, request):
                return old(self, request)
            return lookup
        Engine.lookup = wrapped(Engine.lookup)
        def wrapper(wrapped, instance, args, kwargs):
            return wrapped(*args, **kwargs) + " +foreign"
        wrapt.wrap_function_wrapper("toyfw.engine", "Engine.lookup", wrapper)
    """,
}
#: Ways that nobody can see from outside: hands off is the only safe answer.
HIDDEN = {"method of an object", "attribute of the class"}
VISIBLE = sorted(set(KEEPING) - HIDDEN)

INSTEAD = """
    from toyfw.engine import Engine
    def lookup(self, request):
        return "foreign alone"
    Engine.lookup = lookup
"""


def foreign(root: Path, text: str) -> None:
    write_module(root, "foreign", text)
    importlib.invalidate_caches()
    importlib.import_module("foreign")


def removed() -> Result:
    result = applier.remove("toy-count")
    assert result is not None
    return result


@pytest.mark.parametrize("way", VISIBLE)
def test_over_a_foreign_wrapper_both_work_and_removing_ours_keeps_theirs(toyfw: Any, root: Path, way: str) -> None:
    foreign(root, KEEPING[way])
    theirs = vars(toyfw.Engine)["lookup"]
    result = applier.apply(make_fix())
    assert result.outcome is Outcome.APPLIED
    assert result.reason.startswith("the lookup counts; over ")
    assert "foreign" in result.reason
    assert toyfw.Engine().lookup("a") == "found a +foreign +kvmend"
    assert removed().outcome is Outcome.DISABLED
    assert vars(toyfw.Engine)["lookup"] is theirs
    assert toyfw.Engine().lookup("a") == "found a +foreign"


@pytest.mark.parametrize("way", VISIBLE)
def test_beneath_a_foreign_wrapper_ours_works_on_and_is_not_removed(toyfw: Any, root: Path, way: str) -> None:
    fix = make_fix(site("Engine.lookup"), site("tick"))
    applier.apply(fix)
    foreign(root, KEEPING[way])
    (result,) = applier.results()
    assert (result.outcome, "; beneath " in result.reason) == (Outcome.APPLIED, True)
    assert applier.apply(fix) == result
    assert toyfw.Engine().lookup("a") == "found a +kvmend +foreign"
    stays = removed()
    assert stays.outcome is Outcome.CONFLICT
    assert stays.reason.startswith("toyfw.engine:Engine.lookup is now ")
    assert stays.reason.endswith("; the fix stays as it is, remove that first")
    assert toyfw.Engine().lookup("a") == "found a +kvmend +foreign"
    assert hasattr(toyfw.tick, "__kvmend__")


def test_once_the_foreign_wrapper_is_gone_ours_can_be_removed(toyfw: Any, root: Path) -> None:
    before = vars(toyfw.Engine)["lookup"]
    applier.apply(make_fix())
    ours = vars(toyfw.Engine)["lookup"]
    foreign(root, KEEPING["closure"])
    assert removed().outcome is Outcome.CONFLICT
    toyfw.Engine.lookup = ours
    assert applier.results()[0].outcome is Outcome.APPLIED
    assert removed().outcome is Outcome.DISABLED
    assert vars(toyfw.Engine)["lookup"] is before


@pytest.mark.parametrize("text", [INSTEAD, *(KEEPING[way] for way in sorted(HIDDEN))])
def test_over_a_replacement_that_is_not_seen_to_call_the_original_nothing_is_touched(
    toyfw: Any, root: Path, text: str
) -> None:
    foreign(root, text)
    theirs, tick = vars(toyfw.Engine)["lookup"], toyfw.tick
    result = applier.apply(make_fix(site("tick"), site("Engine.lookup")))
    assert (result.outcome, result.sites) == (Outcome.CONFLICT, ())
    assert "toyfw.engine:Engine.lookup was replaced by foreign." in result.reason
    assert result.reason.endswith(", which does not call the original")
    assert (vars(toyfw.Engine)["lookup"], toyfw.tick) == (theirs, tick)


def test_a_replacement_of_ours_is_reported_as_a_conflict(toyfw: Any, root: Path) -> None:
    fix = make_fix(site("Engine.lookup"), site("tick"))
    applier.apply(fix)
    foreign(root, INSTEAD)
    (result,) = applier.results()
    assert result.outcome is Outcome.CONFLICT
    assert result.reason == (
        "toyfw.engine:Engine.lookup was replaced by foreign.lookup, which does not call kvmend's wrapper"
    )
    assert applier.apply(fix) == result
    assert removed().outcome is Outcome.CONFLICT
    assert toyfw.Engine().lookup("a") == "foreign alone"


def test_a_deleted_site_is_reported_as_a_conflict(toyfw: Any) -> None:
    applier.apply(make_fix())
    del toyfw.Engine.lookup
    assert applier.results()[0].outcome is Outcome.CONFLICT
    assert removed().outcome is Outcome.CONFLICT


def test_a_conflict_ends_when_the_other_plugin_goes_away_before_the_next_application(toyfw: Any, root: Path) -> None:
    before = vars(toyfw.Engine)["lookup"]
    foreign(root, INSTEAD)
    assert applier.apply(make_fix()).outcome is Outcome.CONFLICT
    toyfw.Engine.lookup = before
    assert applier.apply(make_fix()).outcome is Outcome.APPLIED


def test_static_and_class_methods_that_somebody_wrapped_are_wrapped_and_restored(toyfw: Any) -> None:
    def over(raw: Any) -> Any:
        old = raw.__func__

        @functools.wraps(old)
        def wrapper(*args: Any) -> Any:
            return old(*args)

        return type(raw)(wrapper)

    for name in ("size", "build"):
        setattr(toyfw.Engine, name, over(vars(toyfw.Engine)[name]))
    theirs = [vars(toyfw.Engine)[name] for name in ("size", "build")]
    assert applier.apply(make_fix(site("Engine.size"), site("Engine.build"))).outcome is Outcome.APPLIED
    assert (toyfw.Engine.size("abc"), type(toyfw.Engine.build())) == (3, toyfw.Engine)
    removed()
    assert [vars(toyfw.Engine)[name] for name in ("size", "build")] == theirs


def test_an_original_that_its_own_module_decorates_is_no_foreigner(root: Path) -> None:
    decorated = (
        "import functools\n\n\ndef noting(old):\n    @functools.wraps(old)\n    def inner(*args):\n"
        "        return old(*args)\n    return inner\n\n\n"
        "class Worker:\n    @noting\n    def step(self):\n        return 'step'\n"
    )
    write_release(root, changes={"worker": decorated})
    worker = importlib.import_module("toyfw.worker")
    assert applier.apply(make_fix(site("Worker.step", "toyfw.worker"))).outcome is Outcome.APPLIED
    assert worker.Worker().step() == "step +kvmend"


def test_a_wrapt_wrapper_over_ours_is_seen_through(toyfw: Any) -> None:
    applier.apply(make_fix())
    wrapt.wrap_function_wrapper(
        "toyfw.engine", "Engine.lookup", lambda wrapped, instance, args, kwargs: wrapped(*args, **kwargs)
    )
    assert applier.results()[0].outcome is Outcome.APPLIED


def test_a_second_copy_of_kvmend_finds_the_first_and_keeps_off(root: Path) -> None:
    write_release(root)
    found = run(
        """
        import sys
        from kvmend import applier
        from support.toyfix import make_fix
        import toyfw.engine
        first = applier.apply(make_fix())
        for name in [name for name in sys.modules if name.partition(".")[0] in ("kvmend", "support")]:
            del sys.modules[name]
        from kvmend import applier as other
        from support.toyfix import make_fix
        assert other is not applier
        second = other.apply(make_fix())
        answer([first.outcome, second.outcome, second.reason, toyfw.engine.Engine().lookup("a")])
        """,
        path=(root, *SOURCES),
    ).value
    reason = "toyfw.engine:Engine.lookup already carries toy-count from another copy of kvmend"
    assert found == ["applied", "conflict", reason, "found a +kvmend"]


# Where the fix can do without -----------------------------------------------------------------------------------------


def both_sites() -> Any:
    return make_fix(site("Engine.lookup", optional=True), site("Engine.admit"))


def test_an_optional_site_that_was_replaced_before_is_left_alone_and_the_others_are_wrapped(
    toyfw: Any, root: Path
) -> None:
    foreign(root, INSTEAD)
    theirs = toyfw.Engine.lookup
    result = applier.apply(both_sites())
    assert (result.outcome, result.sites) == (Outcome.APPLIED, ("toyfw.engine:Engine.admit",))
    assert toyfw.Engine.lookup is theirs
    assert applier.remove("toy-count").outcome is Outcome.DISABLED  # type: ignore[union-attr]
    assert toyfw.Engine.lookup is theirs


def test_an_optional_site_that_nobody_replaced_is_wrapped_like_any_other(toyfw: Any, root: Path) -> None:
    foreign(root, KEEPING["closure"])
    result = applier.apply(both_sites())
    assert result.sites == ("toyfw.engine:Engine.lookup", "toyfw.engine:Engine.admit")
    assert toyfw.Engine().lookup("a") == "found a +foreign +kvmend"


def test_an_optional_site_that_is_replaced_afterwards_is_told_and_is_no_conflict(toyfw: Any, root: Path) -> None:
    assert applier.apply(both_sites()).outcome is Outcome.APPLIED
    foreign(root, INSTEAD)
    (result,) = applier.results()
    assert result.outcome is Outcome.APPLIED
    assert result.reason.endswith("foreign.lookup stands in its place at toyfw.engine:Engine.lookup")


@pytest.mark.parametrize("own", [False, True])
def test_a_class_that_was_put_in_the_place_of_an_optional_sites_before_is_left_alone(toyfw: Any, own: bool) -> None:
    """As hardware plugins do with vLLM's scheduler; a subclass may inherit the site's method."""
    theirs = type("Theirs", (toyfw.Engine,), {"lookup": lambda self, request: "theirs"} if own else {})
    with mock.patch.object(toyfw, "Engine", theirs):
        result = applier.apply(make_fix(site("Engine.lookup", optional=True), site("tick")))
        assert (result.outcome, result.sites) == (Outcome.APPLIED, ("toyfw.engine:tick",))


def test_a_class_that_is_put_in_the_place_of_an_optional_sites_afterwards_is_told_and_is_no_conflict(
    toyfw: Any,
) -> None:
    assert applier.apply(make_fix(site("Engine.lookup", optional=True))).outcome is Outcome.APPLIED
    theirs = type("Theirs", (toyfw.Engine,), {"__module__": "theirs"})
    with mock.patch.object(toyfw, "Engine", theirs):
        (result,) = applier.results()
        assert result.outcome is Outcome.APPLIED
        assert result.reason.endswith("theirs.Theirs stands in place of the class at toyfw.engine:Engine.lookup")
    assert removed().outcome is Outcome.DISABLED
