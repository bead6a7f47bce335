"""Applying: every site or none, read back, once however often asked, and off again without a trace."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvmend import applier
from kvmend.fix import Context, Fix
from kvmend.journal import JOURNAL
from kvmend.outcome import Outcome
from support.toyfix import CACHE, boom, make_fix, not_callable, site, tag, write_table
from support.toyfw import ENGINE, write_release

EVERY_KIND = ("Engine.lookup", "Engine.admit", "Engine.size", "Engine.build", "tick")


def engine() -> Any:
    import toyfw.engine  # type: ignore[import-not-found]

    return toyfw.engine


def raw(qualname: str) -> Any:
    holder, _, name = qualname.rpartition(".")
    return vars(engine().Engine if holder else engine())[name]


def every_raw() -> list[int]:
    return [id(raw(qualname)) for qualname in EVERY_KIND]


def test_an_applied_fix_is_in_place_and_counts_its_calls(toyfw: Any, root: Path) -> None:
    fix = make_fix(fingerprints=write_table(root, make_fix()))
    result = applier.apply(fix)
    assert (result.outcome, result.reason) == (Outcome.APPLIED, "source is that of 1.0; the lookup counts")
    assert (result.sites, result.known_as, result.version) == (("toyfw.engine:Engine.lookup",), ("1.0",), "1.0")
    assert toyfw.Engine().lookup("a") == "found a +kvmend"
    assert JOURNAL.entries[fix.id].counters.as_dict() == {"calls": 1}


def test_functions_methods_static_and_class_methods_are_wrapped_as_what_they_are(toyfw: Any) -> None:
    kinds = [type(raw(qualname)) for qualname in EVERY_KIND]
    assert applier.apply(make_fix(*map(site, EVERY_KIND))).outcome is Outcome.APPLIED
    assert [type(raw(qualname)) for qualname in EVERY_KIND] == kinds
    built = toyfw.Engine.build()
    assert (
        type(built),
        built.size("abc"),
        toyfw.Engine.size("abc"),
        built.admit("abc"),
        toyfw.tick(built),
    ) == (
        toyfw.Engine,
        3,
        3,
        True,
        0,
    )
    assert JOURNAL.entries["toy-count"].counters.as_dict() == {"calls": 5}


def test_removing_puts_the_very_same_objects_back(toyfw: Any) -> None:
    before = every_raw()
    applier.apply(make_fix(*map(site, EVERY_KIND)))
    assert not set(before) & set(every_raw())
    result = applier.remove("toy-count")
    assert result is not None
    assert (result.outcome, result.reason, result.sites) == (Outcome.DISABLED, "removed at run time", ())
    assert every_raw() == before
    assert applier.remove("toy-count") is None


def test_a_fix_can_be_applied_again_after_it_was_removed(toyfw: Any) -> None:
    for _ in range(3):
        assert applier.apply(make_fix()).outcome is Outcome.APPLIED
        assert toyfw.Engine().lookup("a") == "found a +kvmend"
        applier.remove("toy-count")
        assert toyfw.Engine().lookup("a") == "found a"


def test_applying_twice_is_applying_once(toyfw: Any) -> None:
    first = applier.apply(make_fix())
    in_place = raw("Engine.lookup")
    assert applier.apply(make_fix()) == first
    assert raw("Engine.lookup") is in_place
    assert toyfw.Engine().lookup("a") == "found a +kvmend"


def test_fixes_of_one_site_stack_and_come_off_last_first(toyfw: Any) -> None:
    before = raw("Engine.lookup")
    first, second = make_fix(), make_fix(id="toy-other", switch="KVMEND_TOY_OTHER")
    assert [applier.apply(fix).outcome for fix in (first, second)] == [Outcome.APPLIED] * 2
    assert toyfw.Engine().lookup("a") == "found a +kvmend +kvmend"
    stays = applier.remove(first.id)
    assert stays is not None
    assert stays.outcome is Outcome.CONFLICT
    assert toyfw.Engine().lookup("a") == "found a +kvmend +kvmend"
    assert [applier.remove(fix.id).outcome for fix in (second, first)] == [Outcome.DISABLED] * 2  # type: ignore[union-attr]
    assert raw("Engine.lookup") is before


def hostile(original: Callable[..., Any], context: Context) -> Any:
    """A factory that gives the original itself."""
    return original


def builtin(original: Callable[..., Any], context: Context) -> Any:
    """A factory that gives a function which takes no mark."""
    return len


@pytest.mark.parametrize(
    ("wrap", "reason"),
    [
        (boom, "RuntimeError: the factory does not like this; every site was put back"),
        (not_callable, "KvmendError: the wrapper for toyfw.engine:Engine.admit is 42, not a callable of its own"),
        (hostile, "not a callable of its own; every site was put back"),
        (builtin, "every site was put back"),
    ],
)
def test_a_factory_that_fails_on_the_second_site_takes_the_first_back(toyfw: Any, wrap: Any, reason: str) -> None:
    before = every_raw()
    result = applier.apply(make_fix(site("Engine.lookup"), site("Engine.admit", wrap=wrap), site("tick")))
    assert (result.outcome, result.sites) == (Outcome.FAILED, ())
    assert reason in result.reason
    assert every_raw() == before
    assert not hasattr(raw("Engine.admit"), "__kvmend__")
    assert applier.apply(make_fix(site("Engine.lookup"), site("Engine.admit"))).outcome is Outcome.APPLIED


def test_a_factory_that_is_interrupted_leaves_nothing_behind(toyfw: Any) -> None:
    def interrupted(original: Callable[..., Any], context: Context) -> Any:
        raise KeyboardInterrupt

    before = every_raw()
    with pytest.raises(KeyboardInterrupt):
        applier.apply(make_fix(site("Engine.lookup"), site("Engine.admit", wrap=interrupted)))
    assert every_raw() == before


_META = """

class Meta(type):
    def __setattr__(cls, name, value):
        {body}


class Guarded(metaclass=Meta):
    def step(self):
        return "step"
"""


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ('raise TypeError("immutable")', "TypeError: immutable; every site was put back"),
        ("pass", "toyfw.engine:Guarded.step did not take the wrapper; every site was put back"),
        (
            "type.__setattr__(cls, name, lambda self: value(self))",
            "did not take the wrapper; toyfw.engine:Guarded.step could not",
        ),
    ],
)
def test_a_class_that_does_not_take_the_wrapper_takes_the_other_sites_back(root: Path, body: str, reason: str) -> None:
    write_release(root, changes={"engine": ENGINE + _META.format(body=body)})
    lookup = raw("Engine.lookup")
    result = applier.apply(make_fix(site("Engine.lookup"), site("Guarded.step"), site("tick")))
    assert result.outcome is Outcome.FAILED
    assert reason in result.reason
    assert raw("Engine.lookup") is lookup
    assert engine().Guarded().step() == "step"


def test_a_class_that_will_not_be_put_back_is_a_conflict_and_said(root: Path) -> None:
    once = 'assert hasattr(value, "__kvmend__"), "once"; type.__setattr__(cls, name, value)'
    write_release(root, changes={"engine": ENGINE + _META.format(body=once)})
    fix = make_fix(site("Engine.lookup"), site("Guarded.step"))
    assert engine()
    assert applier.apply(fix).outcome is Outcome.APPLIED
    result = applier.remove(fix.id)
    assert result is not None
    assert (result.outcome, result.reason) == (
        Outcome.CONFLICT, "toyfw.engine:Guarded.step would not be put back; the fix is off everywhere else",
    )  # fmt: skip


def test_a_holder_that_is_no_class_is_a_failure_that_touches_nothing(root: Path) -> None:
    write_release(root, changes={"engine": ENGINE + "\n\nclass Slotted:\n    def f(self): ...\n\n\nSlotted = 3\n"})
    before = raw("Engine.lookup")
    result = applier.apply(make_fix(site("Engine.lookup"), site("Slotted.f")))
    assert result.outcome is Outcome.FAILED
    assert raw("Engine.lookup") is before


def test_a_site_that_the_module_deletes_again_is_a_failure_that_touches_nothing(root: Path) -> None:
    write_release(root, changes={"engine": ENGINE + "\n\ndel tick\n"})
    before = raw("Engine.lookup")
    result = applier.apply(make_fix(site("Engine.lookup"), site("tick")))
    assert result.outcome is Outcome.FAILED
    assert "toyfw.engine:tick is in the installed source but not in the imported module" in result.reason
    assert raw("Engine.lookup") is before


def test_a_module_loaded_from_elsewhere_than_the_source_judged_is_a_conflict(
    toyfw: Any, root: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = write_release(tmp_path_factory.mktemp("other"))
    toyfw.__file__ = str(other / "engine.py")
    result = applier.apply(make_fix())
    assert result.outcome is Outcome.CONFLICT
    assert (
        result.reason
        == f"toyfw.engine was imported from {other}/engine.py, the source judged is {root}/toyfw/engine.py"
    )


@pytest.mark.parametrize(
    ("release", "environ", "expected"),
    [
        ("1.0", {"KVMEND": "0"}, Outcome.DISABLED),
        ("1.0", {"KVMEND_TOY_COUNT": "0"}, Outcome.DISABLED),
        ("1.0", {"KVMEND_TOY_COUNT": "odd"}, Outcome.FAILED),
        ("2.0", {}, Outcome.ALREADY_FIXED),
        ("3.0", {}, Outcome.NOT_AFFECTED),
    ],
)
def test_whatever_is_not_to_be_mended_is_not_touched(
    root: Path, monkeypatch: pytest.MonkeyPatch, release: str, environ: dict[str, str], expected: Outcome
) -> None:
    write_release(root, release)
    before = every_raw()
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert applier.apply(make_fix()).outcome is expected
    assert every_raw() == before
    assert [result.outcome for result in applier.results()] == [expected]


def test_a_switch_that_is_turned_on_later_is_seen_at_the_next_application(
    toyfw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVMEND", "0")
    assert applier.apply(make_fix()).outcome is Outcome.DISABLED
    monkeypatch.setenv("KVMEND", "1")
    assert applier.apply(make_fix()).outcome is Outcome.APPLIED


def test_the_wrappers_of_one_application_share_a_context(toyfw: Any) -> None:
    contexts: list[Context] = []

    def noting(original: Callable[..., Any], context: Context) -> Callable[..., Any]:
        contexts.append(context)
        context.shared[original.__name__] = True
        return tag(original, context)

    applier.apply(make_fix(site("Engine.lookup", wrap=noting), site("tick", wrap=noting)))
    assert contexts[0] is contexts[1]
    assert contexts[0].shared == {"lookup": True, "tick": True}
    assert (contexts[0].mode, contexts[0].facts, contexts[0].log.name) == ("1", {"line": 10}, "toyfw.kvmend")


def _together(count: int, work: Callable[[], Any]) -> list[Any]:
    barrier, found = threading.Barrier(count), []

    def one() -> None:
        barrier.wait()
        found.append(work())

    threads = [threading.Thread(target=one) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("count", [2, 5])
def test_applying_from_several_threads_at_once_is_applying_once(toyfw: Any, count: int) -> None:
    fix: Fix = make_fix(site("Engine.lookup"), site("tick"))
    for _ in range(50):
        before = every_raw()
        outcomes = _together(count, lambda: applier.apply(fix).outcome)
        assert outcomes == [Outcome.APPLIED] * count
        assert toyfw.Engine().lookup("a") == "found a +kvmend"
        removals = [result for result in _together(count, lambda: applier.remove(fix.id)) if result is not None]
        assert [result.outcome for result in removals] == [Outcome.DISABLED]
        assert every_raw() == before


def test_two_modules_are_wrapped_together(toyfw: Any) -> None:
    fix = make_fix(site("Engine.lookup"), site("Cache.get", CACHE), site("flush", CACHE))
    assert applier.apply(fix).outcome is Outcome.ARMED
    assert toyfw.Engine().lookup("a") == "found a"
    cache = importlib.import_module("toyfw.cache")
    assert applier.apply(fix).outcome is Outcome.APPLIED
    assert (toyfw.Engine().lookup("a"), cache.flush(1)) == ("found a +kvmend", "flushed +kvmend")
