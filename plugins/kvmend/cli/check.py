"""`kvmend check`: the verdict on an installation, a folder or a wheel, without importing any framework."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvmend import __version__, settings
from kvmend.cli.catalogue import all_fixes
from kvmend.errors import LocateError, SettingsError
from kvmend.fix import Fix
from kvmend.locate import Installation, locate_installed, locate_path
from kvmend.outcome import Outcome, Result
from kvmend.plan import make_plan

SCHEMA = 1


@click.command("check")
@click.option("--path", type=click.Path(path_type=Path), help="A folder, an environment, a container root or a wheel.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
@click.option("--evidence", is_flag=True, help="Also show every body that was read.")
def check_command(path: Path | None, as_json: bool, evidence: bool) -> int:
    """Says what each fix will do here. Exit code 0 if every wanted fix can do its job or is not needed, 1 if not."""
    fixes = all_fixes()
    report = examine(fixes, path)
    if as_json:
        click.echo(json.dumps(report, indent=1))
    else:
        _print(report, evidence)
    return 0 if report["ok"] else 1


def examine(fixes: Sequence[Fix], path: Path | None = None) -> dict[str, Any]:
    """The report of `kvmend check`.

    Args:
        fixes: The fixes to judge.
        path: What the user gave with --path, or None for this environment.

    Raises:
        LocateError: The path is no place, or holds none of the frameworks.
    """
    installations = _installations(fixes, path)
    if path is not None and not any(installations.values()):
        packages = ", ".join(sorted(installations))
        raise LocateError(f"{path}: none of the packages {packages} is in it")
    strict_problem = _strict_problem()
    rows = []
    for fix in fixes:
        installation = installations[fix.framework.package]
        if installation is None and path is not None:
            continue
        plan = make_plan(fix, installation=installation) if installation else make_plan(fix)
        problems = _problems(fix, installation) if plan.wanted and installation else []
        if plan.wanted and strict_problem:
            problems.append(_problem(f"{strict_problem}; no fix will be applied", fatal=True))
        # Without the framework there is nothing to mend, unless the user said where to look.
        ok = not plan.wanted or plan.result.outcome.good or plan.result.outcome is Outcome.NOT_INSTALLED
        rows.append(_row(fix, plan.result, installation, problems, ok and not any(p["fatal"] for p in problems)))
    warnings = [f"{name} is no switch of kvmend; misspelt?" for name in settings.unknown_variables(fixes)]
    if strict_problem:
        warnings.append(strict_problem)
    return {
        "schema": SCHEMA,
        "kvmend": __version__,
        "path": str(path) if path else None,
        "ok": all(row["ok"] for row in rows),
        "fixes": rows,
        "warnings": warnings,
    }


def _strict_problem() -> str:
    try:
        settings.strict()
    except SettingsError as error:
        return str(error)
    return ""


def _installations(fixes: Sequence[Fix], path: Path | None) -> dict[str, Installation | None]:
    frameworks = {fix.framework.package: fix.framework for fix in fixes}
    return {
        package: locate_path(framework, path) if path is not None else locate_installed(framework)
        for package, framework in frameworks.items()
    }


def _problems(fix: Fix, installation: Installation) -> list[dict[str, Any]]:
    """What would keep the fix from being loaded, or makes the verdict doubtful."""
    problems = []
    if len(installation.distributions) > 1:
        names = ", ".join(f"{entry.name} {entry.version}" for entry in installation.distributions)
        problems.append(_problem(f"{names} all provide {fix.framework.package}; uninstall all but one", fatal=False))
    reasons = fix.framework.unloadable(os.environ, installation) if fix.framework.unloadable else ()
    return problems + [_problem(reason, fatal=True) for reason in reasons]


def _problem(text: str, *, fatal: bool) -> dict[str, Any]:
    return {"text": text, "fatal": fatal}


def _row(
    fix: Fix, result: Result, installation: Installation | None, problems: list[dict[str, Any]], ok: bool
) -> dict[str, Any]:
    # "armed" is what a process says before the import; here it is a forecast.
    forecast = "will_apply" if result.outcome is Outcome.ARMED else str(result.outcome)
    return {
        "fix": fix.id,
        "forecast": forecast,
        "ok": ok,
        "reason": result.reason,
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
        "problems": problems,
        "advice": "It goes in when the framework is imported. Nothing to do."
        if forecast == "will_apply"
        else result.outcome.meaning,
    }


_STYLE = {"will_apply": "green", "already_fixed": "green", "not_affected": "green", "disabled": "dim"}


def _print(report: dict[str, Any], evidence: bool) -> None:
    console = Console(highlight=False)
    for row in report["fixes"]:
        installed = ", ".join(f"{entry['name']} {entry['version']}" for entry in row["distributions"])
        if not installed:
            installed = "plain source, no version" if row["location"] else "not installed"
        style = _STYLE.get(row["forecast"], "yellow" if row["ok"] else "red")
        console.print(
            f"[bold]{row['fix']}[/]  [{style}]{row['forecast']}[/]  {escape(row['framework'] + ': ' + installed)}"
        )
        lines = [row["reason"]]
        if not row["ok"] or row["forecast"] not in _STYLE:
            lines.append(row["advice"])
        for text in lines:
            console.print(Padding(Text(text), (0, 0, 0, 2)))
        for problem in row["problems"]:
            console.print(Padding(Text(problem["text"], style="yellow"), (0, 0, 0, 2)))
        if evidence:
            _print_evidence(console, row)
    for warning in report["warnings"]:
        console.print(Text(warning, style="yellow"))


def _print_evidence(console: Console, row: dict[str, Any]) -> None:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("body", "fingerprint", "known from"):
        table.add_column(heading, overflow="fold")
    for entry in row["evidence"]:
        known = entry["known_as"]
        spread = "unknown" if not known else known[0] if len(known) == 1 else f"{known[0]} … {known[-1]}"
        name = entry["body"].partition(":")[2]
        if entry["fingerprint"] is None:
            table.add_row(name, "absent", "")
        else:
            file = str(entry["path"]).removeprefix(f"{row['location'].rpartition(row['package'])[0]}")
            table.add_row(f"{name}\n  [dim]{escape(file)}:{entry['line']}[/]", entry["fingerprint"], spread)
    console.print(table)
