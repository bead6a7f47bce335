"""What to do with a fix here: switches, installation, verdict. Free of side effects, imports no framework."""

from __future__ import annotations

from collections.abc import Mapping

from kvmend.errors import SettingsError
from kvmend.fix import AFFECTED, FIXED, NOT_AFFECTED, Fix, Site
from kvmend.judge import Judgement, judge, may_force
from kvmend.locate import Installation, locate_installed
from kvmend.outcome import Outcome, Result
from kvmend.record import record
from kvmend.settings import setting_of


@record(frozen=True, kw_only=True)
class Plan:
    """A forecast: the result if nothing goes wrong, and what to wrap.

    Attributes:
        fix: The fix.
        result: `armed` stands for "will be applied when the framework's modules are there".
        sites: What to wrap; empty unless the result is `armed`.
        wanted: Whether the switches ask for the fix; a bad value counts as asking for it.
        judgement: The verdict on source, or None where it was not asked for or is left for later.
    """

    fix: Fix
    result: Result
    sites: tuple[Site, ...] = ()
    wanted: bool = True
    judgement: Judgement | None = None


def make_plan(
    fix: Fix,
    environ: Mapping[str, str] | None = None,
    installation: Installation | None = None,
    *,
    judge_now: bool = True,
    by_files: bool = False,
) -> Plan:
    """Plans one fix.

    Args:
        fix: The fix.
        environ: Environment to read switches from; the process's own if None.
        installation: Where the framework is; what `import` finds if None.
        by_files: As in `judge`.
        judge_now: If false, no source is read: a fix that is wanted here is `armed` with all of its sites.
    """
    try:
        setting = setting_of(fix, environ)
    except SettingsError as error:
        return Plan(fix=fix, result=_result(fix, Outcome.FAILED, str(error)))
    if not setting.wanted:
        return Plan(fix=fix, result=_result(fix, Outcome.DISABLED, setting.reason), wanted=False)
    installation = installation or locate_installed(fix.framework)
    if installation is None:
        reason = f"no package {fix.framework.package!r} in this environment"
        return Plan(fix=fix, result=_result(fix, Outcome.NOT_INSTALLED, reason, mode=setting.mode))
    if not judge_now:
        reason = "the source is judged when the framework's module is imported"
        return Plan(fix=fix, result=_result(fix, Outcome.ARMED, reason, mode=setting.mode), sites=fix.sites)
    verdict = judge(fix, installation, by_files=by_files)

    def planned(outcome: Outcome, reason: str, sites: tuple[Site, ...] = ()) -> Plan:
        result = Result(
            fix=fix.id,
            outcome=outcome,
            reason=reason,
            mode=setting.mode,
            framework=fix.framework.name,
            version=installation.version,
            sites=tuple(site.key for site in sites),
            evidence=verdict.evidence,
            features=tuple(sorted(verdict.features)),
            facts=verdict.facts,
            known_as=verdict.known_as,
        )
        return Plan(fix=fix, result=result, sites=sites, judgement=verdict)

    if verdict.state == FIXED:
        return planned(Outcome.ALREADY_FIXED, verdict.reason)
    if verdict.state == NOT_AFFECTED:
        return planned(Outcome.NOT_AFFECTED, verdict.reason)
    reason = verdict.reason
    if verdict.state != AFFECTED:
        if not (setting.forced and may_force(verdict)):
            return planned(Outcome.UNKNOWN_SOURCE, reason)
        reason = f"FORCED on an unknown source ({setting.reason}); {reason}"
    sites = fix.sites_for(setting.mode, verdict.features)
    if not sites:
        return planned(Outcome.NOT_AFFECTED, f"mode {setting.mode} needs nothing on this source; {reason}")
    absent = {entry.body for entry in verdict.evidence if entry.fingerprint is None}
    missing = [site.key for site in sites if site.key in absent]
    if missing:
        return planned(Outcome.UNKNOWN_SOURCE, f"{missing[0]} is not in the installed source; {reason}")
    return planned(Outcome.ARMED, reason, sites)


def _result(fix: Fix, outcome: Outcome, reason: str, mode: str = "") -> Result:
    return Result(fix=fix.id, outcome=outcome, reason=reason, mode=mode, framework=fix.framework.name)
