"""Classes of others that bypass a wrapper: found when the framework makes an object of them, and said everywhere."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from kvmend import applier, freshener, report
from kvmend.errors import StrictError
from kvmend.fix import Context
from kvmend.journal import JOURNAL
from kvmend.outcome import Outcome
from support.reporting import REPORT_SCHEMA, reports, until
from support.toyfix import make_fix, site, tag
from support.toyfw import write_module, write_release

SITE = "toyfw.engine:Engine.lookup"


@pytest.fixture
def toy(root: Path) -> Any:
    write_release(root)
    import toyfw.engine  # type: ignore[import-not-found]

    return toyfw.engine


@pytest.fixture
def context(toy: Any) -> Context:
    """That of a fix in place at `Engine.lookup` and `Engine.admit`."""
    given: list[Context] = []

    def noting(original: Callable[..., Any], context: Context) -> Callable[..., Any]:
        given.append(context)
        return tag(original, context)

    assert applier.apply(make_fix(site("Engine.lookup", wrap=noting), site("Engine.admit"))).outcome is Outcome.APPLIED
    return given[0]


def shadows(context: Context, made: Any) -> list[str]:
    """What the report says after an object of a class was made."""
    context.check_shadows(made)
    found: list[str] = report.snapshot()["fixes"][0]["shadowed_by"]
    return found


#: Subclasses that bypass nothing, however they get to the wrapped method.
LEADING = {
    "nothing of its own": "class Fast(Engine): pass",
    "another method": """
        class Fast(Engine):
            def look_up(self, request): return self.lookup(request)
    """,
    "super": """
        class Fast(Engine):
            def lookup(self, request): return super().lookup(request.strip())
    """,
    "super, the old way": """
        class Fast(Engine):
            def lookup(self, request): return super(Fast, self).lookup(request)
    """,
    "the class by name": """
        class Fast(Engine):
            def lookup(self, request): return Engine.lookup(self, request)
    """,
    "the class by another name": """
        Base = Engine
        class Fast(Engine):
            def lookup(self, request): return Base.lookup(self, request)
    """,
    "the class by its module": """
        import toyfw.engine
        class Fast(Engine):
            def lookup(self, request): return toyfw.engine.Engine.lookup(self, request)
    """,
    "a helper": """
        class Fast(Engine):
            def lookup(self, request): return self.slow(request)
            def slow(self, request): return super().lookup(request)
    """,
    "a generator in it": """
        class Fast(Engine):
            def lookup(self, request): return next(Engine.lookup(self, each) for each in [request])
    """,
    "two subclasses": """
        class Middle(Engine):
            def lookup(self, request): return super().lookup(request)
        class Fast(Middle):
            def lookup(self, request): return super().lookup(request)
    """,
    "a mixin": """
        class Mixin:
            def lookup(self, request): return super().lookup(request)
        class Fast(Mixin, Engine): pass
    """,
    "a decorator": """
        import functools
        def traced(function):
            @functools.wraps(function)
            def run(*args): return function(*args)
            return run
        class Fast(Engine):
            @traced
            def lookup(self, request): return super().lookup(request)
    """,
}

#: Subclasses in which the wrapper is never reached, and by whose method.
BYPASSING = {
    "a lookup of its own": (
        """
        class Fast(Engine):
            def lookup(self, request): return "fast"
        """,
        "Fast.lookup",
    ),
    "super of another method": (
        """
        class Fast(Engine):
            def lookup(self, request): return super().admit(request)
        """,
        "Fast.lookup",
    ),
    "a class beyond the wrapped one": (
        """
        class Middle(Engine):
            def lookup(self, request): return "middle"
        class Fast(Middle):
            def lookup(self, request): return super().lookup(request)
        """,
        "Fast.lookup",
    ),
    "a mixin": (
        """
        class Mixin:
            def lookup(self, request): return "mixin"
        class Fast(Mixin, Engine): pass
        """,
        "Mixin.lookup",
    ),
}


def foreign(root: Path, source: str) -> Any:
    """`Fast` of another plugin."""
    import importlib
    import textwrap

    write_module(root, "foreign", "from toyfw.engine import Engine\n" + textwrap.dedent(source))
    return importlib.import_module("foreign").Fast


@pytest.mark.parametrize("way", LEADING)
def test_a_subclass_that_gets_to_the_wrapper_is_no_shadow(context: Context, root: Path, way: str) -> None:
    fast = foreign(root, LEADING[way])
    assert fast().lookup("a") == "found a +kvmend"
    assert shadows(context, fast) == []


@pytest.mark.parametrize("way", BYPASSING)
def test_a_subclass_that_never_gets_to_the_wrapper_is_reported_by_name(context: Context, root: Path, way: str) -> None:
    source, who = BYPASSING[way]
    assert shadows(context, foreign(root, source)) == [f"foreign.{who}"]


def test_the_framework_s_own_class_is_no_shadow_and_a_class_beside_it_neither(context: Context, toy: Any) -> None:
    assert shadows(context, toy.Engine) == []
    assert shadows(context, type("Elsewhere", (), {"lookup": lambda self, request: "?"})) == []


def test_another_plugin_s_function_in_the_class_is_a_shadow_only_if_it_does_not_call_ours(
    context: Context, toy: Any
) -> None:
    ours = toy.Engine.lookup

    @functools.wraps(ours)
    def wrapper(self: Any, request: Any) -> Any:
        return ours(self, request)

    toy.Engine.lookup = wrapper
    assert shadows(context, toy.Engine) == []

    def theirs(self: Any, request: Any) -> str:
        return "theirs"

    theirs.__qualname__ = "theirs"
    toy.Engine.lookup = theirs
    assert shadows(context, toy.Engine) == [f"{__name__}.theirs"]
    assert applier.results()[0].outcome is Outcome.CONFLICT


def test_a_shadow_is_a_warning_once_and_in_the_result_and_in_the_report(
    context: Context, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fast = foreign(root, BYPASSING["a lookup of its own"][0])
    with caplog.at_level(logging.DEBUG):
        for _ in range(3):
            context.check_shadows(fast)
    said = [(each.levelname, each.getMessage()) for each in caplog.records]
    text = f"kvmend: toy-count shadowed_by foreign.Fast.lookup, which does not call {SITE}: the fix does nothing there"
    assert said == [("WARNING", text)]
    (result,) = applier.results()
    assert (result.outcome, result.shadowed_by) == (Outcome.APPLIED, ("foreign.Fast.lookup",))
    assert result.reason == "the lookup counts; shadowed_by foreign.Fast.lookup"
    jsonschema.validate(report.snapshot(), REPORT_SCHEMA)


def test_under_strict_a_shadow_stops_the_engine_from_being_made_however_often_it_is_tried(
    context: Context, toy: Any, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches an engine that serves without its fix although it was told to rather not start."""
    fast = foreign(root, BYPASSING["a lookup of its own"][0])
    monkeypatch.setenv("KVMEND_STRICT", "1")
    text = "toy-count shadowed_by foreign.Fast.lookup, which does not call toyfw.engine:Engine.lookup"
    for _ in range(2):
        with pytest.raises(StrictError, match=f"^KVMEND_STRICT=1: {text}: the fix does nothing there$"):
            context.check_shadows(fast)
    context.check_shadows(toy.Engine)
    assert applier.results()[0].shadowed_by == ("foreign.Fast.lookup",)


@pytest.mark.parametrize("value", ["0", "perhaps"])
def test_without_strict_or_with_a_value_that_is_none_a_shadow_stops_nothing(
    context: Context, root: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("KVMEND_STRICT", value)
    assert shadows(context, foreign(root, BYPASSING["a mixin"][0])) == ["foreign.Mixin.lookup"]


def test_a_log_handler_that_raises_neither_stops_the_engine_nor_hides_the_shadow(
    context: Context, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(logging.Logger, "handle", refuse)
    fast = foreign(root, BYPASSING["a mixin"][0])
    assert shadows(context, fast) == ["foreign.Mixin.lookup"]
    monkeypatch.setenv("KVMEND_STRICT", "1")
    with pytest.raises(StrictError):
        context.check_shadows(fast)


def test_two_shadows_are_two(context: Context, root: Path) -> None:
    both = """
        class Fast(Engine):
            def lookup(self, request): return "fast"
            def admit(self, request, limit=4): return True
    """
    assert shadows(context, foreign(root, both)) == ["foreign.Fast.lookup", "foreign.Fast.admit"]


def test_a_shadow_is_forgotten_when_the_fix_is_taken_off(context: Context, root: Path) -> None:
    shadows(context, foreign(root, BYPASSING["a mixin"][0]))
    applier.remove("toy-count")
    assert applier.apply(make_fix()).shadowed_by == ()


def test_a_class_that_cannot_be_looked_at_does_not_hurt(context: Context, toy: Any) -> None:
    class Odd(type):
        def __subclasscheck__(cls, other: type) -> bool:
            raise RuntimeError("not to be asked")

        @property
        def __mro__(cls) -> Any:
            raise RuntimeError("not to be asked")

    assert shadows(context, Odd("Fast", (toy.Engine,), {"lookup": None})) == []


def test_a_shadow_reaches_the_report_on_disk_without_any_counter_moving(
    context: Context, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVMEND_STATE_DIR", str(tmp_path / "reports"))
    monkeypatch.setattr(freshener, "INTERVAL", 0.05)
    monkeypatch.setattr(freshener, "SPACING", 0.05)

    def reported() -> list[Any]:
        return [each["fixes"][0]["shadowed_by"] for each in reports(tmp_path / "reports").values()]

    freshener.publish()
    try:
        assert until(lambda: reported() == [[]])
        context.check_shadows(foreign(root, BYPASSING["a mixin"][0]))
        assert until(lambda: reported() == [["foreign.Mixin.lookup"]])
    finally:
        freshener.finish()


# What a fix gave to be undone ---------------------------------------------------------------------------------------


def _undoing(*acts: Callable[[], None]) -> Callable[..., Any]:
    def wrap(original: Callable[..., Any], context: Context) -> Callable[..., Any]:
        context.on_removal.extend(acts)
        return tag(original, context)

    return wrap


def test_what_a_fix_gives_to_be_undone_is_undone_last_first_whatever_fails(toy: Any) -> None:
    done: list[str] = []

    def fails() -> None:
        raise RuntimeError("no")

    acts = (lambda: done.append("first"), fails, lambda: done.append("last"))
    applier.apply(make_fix(site("Engine.lookup", wrap=_undoing(*acts))))
    assert done == []
    result = applier.remove("toy-count")
    assert result is not None
    assert (result.outcome, done, JOURNAL.entries) == (Outcome.DISABLED, ["last", "first"], {})


def test_nothing_is_undone_where_a_fix_stays(toy: Any) -> None:
    done: list[str] = []
    applier.apply(make_fix(site("Engine.lookup", wrap=_undoing(lambda: done.append("undone")))))
    ours = toy.Engine.lookup
    toy.Engine.lookup = lambda self, request: ours(self, request)
    result = applier.remove("toy-count")
    assert result is not None
    assert (result.outcome, done) == (Outcome.CONFLICT, [])
