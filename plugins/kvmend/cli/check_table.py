"""The report of `kvmend check` for people."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from kvmend.cli.printing import console, paragraph, table
from kvmend.outcome import Outcome

_STYLE = {"will_apply": "green", "already_fixed": "green", "not_affected": "green", "disabled": "dim"}


def print_report(report: dict[str, Any], evidence: bool) -> None:
    """Prints what `kvmend check` found, for people.

    Args:
        report: As `examine` gives it.
        evidence: Whether every body that was read is listed.
    """
    out = console()
    for row in report["fixes"]:
        installed = ", ".join(f"{entry['name']} {entry['version']}" for entry in row["distributions"])
        if not installed:
            installed = "plain source, no version" if row["location"] else "not installed"
        style = _STYLE.get(row["forecast"], "yellow" if row["ok"] else "red")
        out.print(
            f"[bold]{row['fix']}[/]  [{style}]{row['forecast']}[/]  {escape(row['framework'] + ': ' + installed)}"
        )
        lines = [row["reason"]]
        if row["forecast"] not in (*_STYLE, Outcome.NOT_INSTALLED):
            lines.append(row["advice"])
        for text in lines:
            paragraph(out, text)
        for problem in row["problems"]:
            if not row["reason"].startswith(problem["text"]):
                paragraph(out, Text(problem["text"], style="yellow"))
        if evidence:
            _print_evidence(out, row)
    for problem in report["problems"]:
        paragraph(out, Text(problem["text"], style="red" if problem["fatal"] else "yellow"), indent=0)
    for note in report["notes"]:
        paragraph(out, note, indent=0)


def _print_evidence(out: Console, row: dict[str, Any]) -> None:
    rows = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("body", "fingerprint", "known from"):
        rows.add_column(heading, overflow="fold")
    for entry in row["evidence"]:
        known = entry["known_as"]
        spread = ", ".join(known) if len(known) <= 3 else f"{known[0]} … {known[-1]} ({len(known)})"
        name = entry["body"].partition(":")[2]
        if entry["fingerprint"] is None:
            rows.add_row(name, "absent", "")
        else:
            file = str(entry["path"]).removeprefix(f"{row['location'].rpartition(row['package'])[0]}")
            rows.add_row(f"{name}\n  [dim]{escape(file)}:{entry['line']}[/]", entry["fingerprint"], spread or "unknown")
    table(out, rows)
