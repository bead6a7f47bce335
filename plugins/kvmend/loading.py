"""Entry functions: what a framework's plugin loader calls in every process.

They import no framework, take milliseconds, and never raise unless KVMEND_STRICT=1 asks for it.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Sequence

from kvmend import applier, registry, settings, voice
from kvmend.counters import Counters
from kvmend.errors import SettingsError, StrictError
from kvmend.fix import Fix
from kvmend.journal import JOURNAL, Entry
from kvmend.locate import Installation, locate_installed
from kvmend.outcome import Outcome, Result
from kvmend.plan import Plan


def load_vllm() -> None:
    """Entry point of the group `vllm.general_plugins`."""
    load("vllm")


def load_fastdeploy() -> None:
    """Entry point of the plugin groups that every FastDeploy process loads."""
    load("fastdeploy")


def load(package: str) -> None:
    """Applies the fixes of one framework; whatever else goes wrong is logged and goes no further.

    Raises:
        StrictError: KVMEND_STRICT=1 asks for it.
    """
    voice.speak_as(functools.partial(logging.getLogger, f"{package}.kvmend"))
    try:
        apply_all(package)
    except StrictError:
        raise
    except Exception as error:  # a defect of ours is ours alone: the server comes up, the log says what happened
        if os.environ.get(settings.STRICT) == "1":
            raise StrictError(f"{settings.STRICT}=1: kvmend could not be loaded: {error!r}") from error
        voice.log(logging.ERROR, "kvmend could not be loaded; fixes may be missing", error=error)


def apply_all(package: str | None = None) -> list[Result]:
    """Applies or arms every registered fix; doing it again changes nothing.

    Args:
        package: Only fixes of the framework with this import package; every fix if None.

    Returns:
        One result per fix, in the order of their ids.

    Raises:
        StrictError: KVMEND_STRICT=1 and a wanted fix of `package` cannot do its job, or a registered fix is no fix.
            Other fixes keep their state.
    """
    registered, broken = registry.discover(package)
    fixes = [fix for fix in registered if package in (None, fix.framework.package)]
    if package is not None and fixes:
        voice.speak_as(fixes[0].framework.log)
    strict_problem, strict = "", False
    try:
        strict = settings.strict()
    except SettingsError as error:
        strict_problem = str(error)
    results = []
    # What one fix has read of a framework, the next one need not read again.
    installations: dict[str, Installation | None] = {}
    for fix in fixes:
        with JOURNAL.lock:
            known = fix.id in JOURNAL.entries
            if not known and fix.framework.package not in installations and _wanted(fix):
                installations[fix.framework.package] = locate_installed(fix.framework)
            at = installations.get(fix.framework.package)
            result = _refused(fix, strict_problem) if strict_problem and _wanted(fix) else applier.apply(fix, at)
            sites = JOURNAL.entries[fix.id].plan.sites if result.outcome is Outcome.ARMED else ()
        # Outside the lock: what is said and written may take its time.
        if sites and not known:
            from kvmend import hooks  # most processes arm nothing

            hooks.arm(fix.id, sites, _settled(fix, strict))
        elif not known:
            voice.say(fix, result)
        results.append(result)
    for entry in broken:
        voice.say_broken(entry)
    for name in _unknown_variables(registered):
        voice.warn_once(f"kvmend: {name} is no switch of kvmend; misspelt?")
    _publish()
    if strict:
        for fix, result in zip(fixes, results, strict=True):
            _stop_if_wanted(fix, result)
        if broken:  # nobody can say whether this one was wanted here
            first = f"fix {broken[0].name} of {broken[0].distribution} could not be loaded: {broken[0].reason}"
            raise StrictError(f"{settings.STRICT}=1: {first}")
    return results


def remove_all() -> list[Result]:
    """Takes every fix off that can be taken off; last applied, first removed."""
    with JOURNAL.lock:
        return [result for fix_id in reversed(list(JOURNAL.entries)) if (result := applier.remove(fix_id)) is not None]


def _unknown_variables(fixes: Sequence[Fix]) -> tuple[str, ...]:
    """Misspelt switches. One that none of these fixes has may be another framework's, and only then those are read."""
    return settings.unknown_variables(fixes) and settings.unknown_variables(registry.discover()[0])


def _wanted(fix: Fix) -> bool:
    try:
        return settings.setting_of(fix).wanted
    except SettingsError:
        return True


def _refused(fix: Fix, reason: str) -> Result:
    """The result of a fix that is not tried because KVMEND_STRICT cannot be read; in the journal like any other."""
    if fix.id not in JOURNAL.entries:
        result = Result(fix=fix.id, outcome=Outcome.FAILED, reason=reason, framework=fix.framework.name)
        plan = Plan(fix=fix, result=result)
        JOURNAL.entries[fix.id] = Entry(plan=plan, result=result, counters=Counters(fix.counters))
    return JOURNAL.entries[fix.id].result


def _settled(fix: Fix, strict: bool) -> Callable[[Result], None]:
    def settled(result: Result) -> None:
        voice.say(fix, result)
        _publish()
        if strict:
            _stop_if_wanted(fix, result)

    return settled


def _publish() -> None:
    if os.environ.get(settings.STATE_DIR):
        from kvmend import freshener  # what writes reports is needed only where they are asked for

        freshener.publish()


def _stop_if_wanted(fix: Fix, result: Result) -> None:
    if result.outcome is not Outcome.DISABLED and not result.outcome.good:
        raise StrictError(f"{settings.STRICT}=1: {fix.id} is {result.outcome}: {result.reason}")
