"""`kvmend verify`: the behaviour before and after, on the installed framework, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvmend import __version__
from kvmend.cli.catalogue import all_fixes, fix_named
from kvmend.fix import Fix
from kvmend.locate import locate_installed

SCHEMA = 1
#: Seconds that one measurement may take.
TIMEOUT = 300


@click.command("verify")
@click.argument("fix", required=False)
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def verify_command(fix: str | None, as_json: bool) -> int:
    """Shows each fault, and FIX mending it, on the framework installed here. Exit code 1 if one is not mended."""
    fixes = (fix_named(fix),) if fix else all_fixes()
    console = Console(stderr=True)
    rows = []
    for record in fixes:
        with console.status(f"{record.id}: measuring on the installed {record.framework.name}"):
            rows.append(_verify(record))
    report = {"schema": SCHEMA, "kvmend": __version__, "ok": all(row["ok"] for row in rows), "fixes": rows}
    if as_json:
        click.echo(json.dumps(report, indent=1))
    else:
        _print(rows)
    return 0 if report["ok"] else 1


def _verify(fix: Fix) -> dict[str, Any]:
    row: dict[str, Any] = {"fix": fix.id, "framework": fix.framework.name, "cases": [], "outcome": None, "ok": True}
    installation = locate_installed(fix.framework)
    row["version"] = installation.version if installation else None
    if installation is None:
        return row | {"verdict": "not shown", "reason": f"{fix.framework.name} is not installed here"}
    if not fix.proof:
        return row | {"verdict": "not shown", "reason": "this fix ships no proof"}
    before, after = (_measure(fix, switch) for switch in ("0", "1"))
    failed = before.get("error") or after.get("error")
    if failed:
        return row | {"verdict": "not shown", "reason": failed, "ok": False}
    row["outcome"] = after["outcome"]
    if [case["name"] for case in before["cases"]] != [case["name"] for case in after["cases"]]:
        reason = f"the proof gave {len(before['cases'])} cases without the fix and {len(after['cases'])} others with it"
        return row | {"verdict": "not shown", "reason": reason, "ok": False}
    row["cases"] = [
        {"case": one["name"], "expected": one["expected"], "without": one["measured"], "with": two["measured"]}
        for one, two in zip(before["cases"], after["cases"], strict=True)
    ]
    mended = all(case["with"] == case["expected"] for case in row["cases"])
    faulty = any(case["without"] != case["expected"] for case in row["cases"])
    verdict = "mended" if mended and faulty else "right without kvmend" if mended else "NOT mended"
    return row | {"verdict": verdict, "reason": after["reason"], "ok": mended}


def _measure(fix: Fix, switch: str) -> dict[str, Any]:
    """Runs the proof in a fresh interpreter; the answer comes in a file, since frameworks print what they like."""
    with tempfile.TemporaryDirectory(prefix="kvmend-verify-") as folder:
        answer = Path(folder) / "answer.json"
        environment = os.environ | {"KVMEND": "1", fix.switch: switch}
        for variable in (
            "KVMEND_STRICT",
            "KVMEND_STATE_DIR",
        ):  # no server of the operator's: it stops and reports nothing
            environment.pop(variable, None)
        command = [sys.executable, "-m", "kvmend.cli.measure", fix.id, str(answer)]
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=TIMEOUT, cwd=folder, check=False
            )
        except subprocess.TimeoutExpired:
            return {"error": f"no answer within {TIMEOUT} s"}
        if not answer.exists():
            tail = (done.stderr or done.stdout).strip().splitlines()
            return {"error": f"the measuring process ended with {done.returncode}: {tail[-1] if tail else 'no output'}"}
        result: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return result


def _print(rows: list[dict[str, Any]]) -> None:
    console = Console(highlight=False)
    for row in rows:
        style = {"mended": "green", "NOT mended": "red"}.get(row["verdict"], "dim")
        release = f"{row['framework']} {row['version'] or ''}".strip()
        console.print(
            f"[bold]{row['fix']}[/] on {escape(release)}: [{style}]{row['verdict']}[/] - {escape(row['reason'])}"
        )
        if not row["cases"]:
            continue
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("case", overflow="fold", ratio=1)
        for heading in ("expected", "without", "with"):
            table.add_column(heading, justify="right")
        for case in row["cases"]:
            wrong = case["without"] != case["expected"]
            table.add_row(
                case["case"],
                str(case["expected"]),
                f"[red]{case['without']}[/]" if wrong else str(case["without"]),
                str(case["with"]) if case["with"] == case["expected"] else f"[red]{case['with']}[/]",
            )
        console.print(table)
