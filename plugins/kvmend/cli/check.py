"""`kvmend check`: the verdict on an installation, a folder or a wheel, without importing any framework."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from kvmend import __version__, registry, settings, startup
from kvmend.cli import hook, presence
from kvmend.cli.output import reader_may_leave
from kvmend.errors import LocateError, SettingsError
from kvmend.fix import Fix, Framework
from kvmend.locate import Installation, locate_installed, locate_path
from kvmend.outcome import Outcome, Result
from kvmend.plan import make_plan
from kvmend.trees import FolderTree

SCHEMA = 1
WILL_APPLY, NOT_LOADED = "will_apply", "not_loaded"
_ADVICE = {
    WILL_APPLY: "It goes in when the framework is imported. Nothing to do.",
    NOT_LOADED: (
        "The source is one that kvmend mends, but no process would load kvmend: do what the problem says, or, for "
        "processes that load no plugins, run kvmend hook enable."
    ),
}


@click.command("check")
@click.option("--path", type=click.Path(path_type=Path), help="A folder, an environment, a container root or a wheel.")
@click.option("--env", "with_env", is_flag=True, help="With --path: let this shell's environment variables count.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output; check.schema.json describes it.")
@click.option("--evidence", is_flag=True, help="Also show every body that was read.")
def check_command(path: Path | None, with_env: bool, as_json: bool, evidence: bool) -> int:
    """Says what each fix will do here, and what to do about it.

    Exit code 0 if every wanted fix will do its job or is not needed, 1 if not, 2 if there is nothing to look at.
    With --path, switches and plugin lists of this shell do not count unless --env says so: the server's environment is
    another one.
    """
    fixes, broken = registry.discover()
    environ = os.environ if path is None or with_env else {}
    report = examine(fixes, path, environ=environ, broken=broken)
    with reader_may_leave():
        if as_json:
            click.echo(json.dumps(report, indent=1))
        else:
            from kvmend.cli.check_table import print_report

            print_report(report, evidence)
    return 0 if report["ok"] else 1


def examine(
    fixes: Sequence[Fix],
    path: Path | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    broken: Sequence[registry.BrokenFix] = (),
) -> dict[str, Any]:
    """The report of `kvmend check`.

    Args:
        fixes: The fixes to judge.
        path: What the user gave with --path, or None for this environment.
        environ: Environment variables that count; the process's own if None.
        broken: Registered fixes that could not be loaded.

    Raises:
        LocateError: The path is no place, or holds none of the frameworks.
    """
    environ = os.environ if environ is None else environ
    installations = _installations(fixes, path)
    if path is not None and fixes and not any(installations.values()):
        packages = ", ".join(sorted(installations))
        raise LocateError(f"{path}: none of the packages {packages} is in it")
    metadata, select = presence.metadata_in(sys.path), presence.entry_points()
    problems = [_problem(text, fatal=fatal) for text, fatal in presence.own_problems(metadata, select)]
    problems += [
        _problem(f"fix {each.name} of {each.distribution} could not be loaded: {each.reason}", fatal=True)
        for each in broken
    ]
    strict_problem = _strict_problem(environ)
    if strict_problem:
        problems.append(_problem(f"{strict_problem}; no fix will be applied", fatal=True))
    here = _Here(
        environ=environ,
        path=path,
        unregistered=lambda framework: presence.unregistered(framework, metadata, select),
        hook=hook.read_hook(_site(path, installations)),
    )
    rows = []
    for fix in fixes:
        installation = installations[fix.framework.package]
        if installation is None and path is not None:
            continue
        rows.append(_row(fix, installation, here, strict_problem))
    problems += [
        _problem(f"{name} is no switch of kvmend; misspelt?", fatal=False)
        for name in settings.unknown_variables(fixes, environ)
    ]
    return {
        "schema": SCHEMA,
        "kvmend": __version__,
        "python": sys.executable,
        "path": str(path) if path else None,
        "environment": path is None or environ is os.environ,
        "ok": all(row["ok"] for row in rows) and not any(each["fatal"] for each in problems),
        "fixes": rows,
        "problems": problems,
        "hook": {"state": here.hook.state, "path": str(here.hook.path), "packages": list(here.hook.packages)},
        "notes": [
            *_unlooked_at(fixes, path, environ),
            *_nothing_here(path, installations),
            *_not_there(path, installations),
            *_hook_note(here),
        ],
    }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Here:
    """What a row needs beside its fix and installation."""

    environ: Mapping[str, str]
    path: Path | None
    unregistered: Callable[[Framework], str]
    hook: hook.Hook

    def hooked(self, package: str) -> bool:
        """Whether the startup hook would bring kvmend in, whatever the plugin lists say."""
        return package in self.hook.packages and (self.path is not None or package in startup.watched())


def _strict_problem(environ: Mapping[str, str]) -> str:
    try:
        settings.strict(environ)
    except SettingsError as error:
        return str(error)
    return ""


def _installations(fixes: Sequence[Fix], path: Path | None) -> dict[str, Installation | None]:
    frameworks = {fix.framework.package: fix.framework for fix in fixes}
    return {
        package: locate_path(framework, path) if path is not None else locate_installed(framework)
        for package, framework in frameworks.items()
    }


def _site(path: Path | None, installations: Mapping[str, Installation | None]) -> Path | None:
    """The folder of packages that the startup hook would be in; None for that of this interpreter."""
    if path is None:
        return None
    trees = [each.tree for each in installations.values() if each and isinstance(each.tree, FolderTree)]
    return trees[0].root if trees else path


def _row(fix: Fix, installation: Installation | None, here: _Here, strict_problem: str) -> dict[str, Any]:
    plan = make_plan(fix, here.environ, installation) if installation else make_plan(fix, here.environ)
    result = plan.result
    # "armed" is what a process says before the import; here it is a forecast.
    forecast, reason = (WILL_APPLY if result.outcome is Outcome.ARMED else str(result.outcome)), result.reason
    problems = _doubts(fix, installation, here.path) if plan.wanted and installation else []
    if result.outcome is Outcome.ARMED and installation:
        kept_out = _kept_out(fix, installation, here)
        problems += kept_out
        fatal = [each["text"] for each in kept_out if each["fatal"]]
        if strict_problem:
            forecast, reason = str(Outcome.FAILED), f"{strict_problem}; no fix will be applied"
        elif fatal:
            forecast, reason = NOT_LOADED, f"{fatal[0]}; otherwise it would apply: {result.reason}"
    if result.outcome is Outcome.NOT_INSTALLED and (elsewhere := presence.command_elsewhere(fix.framework)):
        problems.append(_problem(elsewhere, fatal=False))
    # Without the framework there is nothing to mend, unless the user said where to look.
    good = result.outcome.good or result.outcome is Outcome.NOT_INSTALLED
    ok = not plan.wanted or (good and forecast not in (NOT_LOADED, Outcome.FAILED))
    return _row_of(fix, result, installation) | {
        "forecast": forecast,
        "ok": ok,
        "reason": reason,
        "problems": problems,
        "advice": _ADVICE.get(forecast) or Outcome(forecast).meaning,
    }


def _doubts(fix: Fix, installation: Installation, path: Path | None) -> list[dict[str, Any]]:
    """What makes the verdict doubtful."""
    doubts = []
    if len(installation.distributions) > 1:
        names = ", ".join(f"{entry.name} {entry.version}" for entry in installation.distributions)
        doubts.append(f"{names} all provide {fix.framework.package}; uninstall all but one")
    if installation.others:
        doubts.append(
            f"{fix.framework.package} is also at {', '.join(installation.others)}; name the one that is meant"
        )
    if path is not None and isinstance(installation.tree, FolderTree):
        real = Path(installation.location).resolve()
        if path.is_dir() and not real.is_relative_to(path.resolve()):
            doubts.append(f"{installation.location} leads out of {path}, to {real}: that is what was judged")
    return [_problem(text, fatal=False) for text in doubts]


def _kept_out(fix: Fix, installation: Installation, here: _Here) -> list[dict[str, Any]]:
    """What would keep the framework's processes from loading a fix that they need."""
    framework = fix.framework
    listed = framework.unloadable(here.environ, installation) if framework.unloadable else ()
    if here.path is not None and here.environ is not os.environ:
        texts = [f"for the server's environment: {text}" for text in listed]
        return [_problem(text, fatal=False) for text in texts]
    reasons = [*listed]
    if here.path is None and (reason := here.unregistered(framework)):
        reasons.append(reason)
    if here.hooked(framework.package):
        return [_problem(f"{reason}; the startup hook brings it in all the same", fatal=False) for reason in reasons]
    return [_problem(reason, fatal=True) for reason in reasons]


def _problem(text: str, *, fatal: bool) -> dict[str, Any]:
    return {"text": text, "fatal": fatal}


def _unlooked_at(fixes: Sequence[Fix], path: Path | None, environ: Mapping[str, str]) -> list[str]:
    """Variables of this shell that say something and were left aside."""
    if path is None or environ is os.environ:
        return []
    lists = {fix.framework.plugin_list for fix in fixes}
    names = sorted(
        name for name in os.environ if name in lists or (name.startswith("KVMEND") and name not in settings.ASIDE)
    )
    return [f"this shell's {', '.join(names)} did not count; with --env they do"] if names else []


def _not_there(path: Path | None, installations: Mapping[str, Installation | None]) -> list[str]:
    """Environments at the path that have the framework and not kvmend."""
    if path is None:
        return []
    trees = [each.tree for each in installations.values() if each and each.distributions]
    roots = dict.fromkeys(tree.root for tree in trees if isinstance(tree, FolderTree))
    return [
        f"kvmend is not installed in {root}: the forecast is for when it is"
        for root in roots
        if not presence.metadata_in([root])
    ]


def _nothing_here(path: Path | None, installations: Mapping[str, Installation | None]) -> list[str]:
    if path is not None or any(installations.values()):
        return []
    return [f"none of the packages {', '.join(sorted(installations))} is installed for {sys.executable}"]


def _hook_note(here: _Here) -> list[str]:
    if here.path is not None and here.hook.state == "disabled":
        return []
    watching = here.hook.packages if here.path is not None else startup.watched()
    return [hook.describe(here.hook, watching)]


def _row_of(fix: Fix, result: Result, installation: Installation | None) -> dict[str, Any]:
    return {
        "fix": fix.id,
        "mode": result.mode,
        "switch": fix.switch,
        "framework": fix.framework.name,
        "distributions": [dataclasses.asdict(entry) for entry in installation.distributions] if installation else [],
        "package": fix.framework.package,
        "location": installation.location if installation else None,
        "known_as": list(result.known_as),
        "features": list(result.features),
        "facts": dict(result.facts),
        "sites": list(result.sites),
        "evidence": [dataclasses.asdict(entry) for entry in result.evidence],
    }
