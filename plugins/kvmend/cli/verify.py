"""`kvmend verify`: the behaviour before and after, on the installed framework, each in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvmend import __version__, registry, settings
from kvmend.cli.capacity import room_for_two
from kvmend.cli.catalogue import fix_named
from kvmend.cli.check import examine
from kvmend.cli.output import reader_may_leave
from kvmend.cli.printing import console, paragraph, table
from kvmend.errors import UsageError
from kvmend.fix import Fix
from kvmend.outcome import Outcome

SCHEMA = 1
MENDED, RIGHT, NOT_MENDED, NOT_SHOWN = "mended", "right without kvmend", "NOT mended", "not shown"
#: Exit codes. 2 is a wrong use of the command line.
GOOD, BAD, UNKNOWN = 0, 1, 3
#: Bytes that a measuring process may need. One with vLLM 0.26.0 for the CPU takes 961 MiB.
_MEMORY = 2 << 30


@click.command("verify")
@click.argument("fix", required=False)
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output; verify.schema.json describes it.")
@click.option(
    "--timeout", type=click.FloatRange(min=0, min_open=True), default=120.0, show_default=True,
    help="Seconds that one of the two measurements of a fix may take.",
)  # fmt: skip
def verify_command(fix: str | None, as_json: bool, timeout: float) -> int:
    """Shows each fault, and FIX mending it, on the framework installed here; without a GPU or a model.

    \b
    Exit code
      0  every fault that can be shown here is mended, or is not there without kvmend
      1  one is not mended, or servers of this environment would not load the fix
      2  wrong usage
      3  FIX, or a fix of an installed framework, or every one, could not be shown here
    """
    fixes = (fix_named(fix),) if fix else registry.discover()[0]
    if not fixes:
        raise UsageError("no fix is registered in this environment; kvmend check says why")
    rows = []
    for number, record in enumerate(fixes, 1):
        rows.append(_verify(record, timeout, f"{number} of {len(fixes)}, {record.id}"))
    code = exit_code(rows, named=fix is not None)
    report = {"schema": SCHEMA, "kvmend": __version__, "python": sys.executable, "ok": code == GOOD, "fixes": rows}
    with reader_may_leave():
        if as_json:
            click.echo(json.dumps(report, indent=1))
        else:
            _print(rows)
    return code


def exit_code(rows: list[dict[str, Any]], *, named: bool) -> int:
    """The exit code for the rows of a report; `named` says that the user asked for this one fix."""
    if any(row["verdict"] == NOT_MENDED or row["kept_out"] for row in rows):
        return BAD
    shown = [row for row in rows if row["verdict"] in (MENDED, RIGHT)]
    hidden = [row for row in rows if row["verdict"] == NOT_SHOWN and (named or row["location"] is not None)]
    return UNKNOWN if hidden or not shown else GOOD


def _verify(fix: Fix, timeout: float, label: str) -> dict[str, Any]:
    (forecast,) = examine((fix,))["fixes"]
    loaders = [each["text"] for each in forecast["problems"] if each["fatal"]]
    row: dict[str, Any] = {
        "fix": fix.id,
        "framework": fix.framework.name,
        "version": forecast["distributions"][0]["version"] if forecast["distributions"] else None,
        "location": forecast["location"],
        "switch": f"{fix.switch}={_value(fix)}",
        "outcome": None,
        "kept_out": loaders,
        "switched_off": forecast["reason"] if forecast["forecast"] == Outcome.DISABLED else None,
        "seconds": 0.0,
        "cases": [],
    }
    if row["location"] is None:
        return row | {"verdict": NOT_SHOWN, "reason": f"{fix.framework.name} is not installed for {sys.executable}"}
    if not fix.proof:
        return row | {"verdict": NOT_SHOWN, "reason": "this fix ships no proof"}
    started = time.monotonic()
    answers = _measured(fix, timeout, label)
    row["seconds"] = round(time.monotonic() - started, 1)
    return row | _judge(*answers)


def _value(fix: Fix) -> str:
    """The switch's value to measure with: that of this environment, if it is one that puts the fix in place."""
    value = os.environ.get(fix.switch, "1")
    return value if value != "0" and value in settings.allowed_values(fix) else "1"


def _judge(before: dict[str, Any], after: dict[str, Any] | None = None) -> dict[str, Any]:
    failed = before.get("error") or (after or {}).get("error")
    if failed or after is None:
        return {"verdict": NOT_SHOWN, "reason": f"cannot be shown here, because {failed}"}
    if [case["name"] for case in before["cases"]] != [case["name"] for case in after["cases"]]:
        counts = f"{len(before['cases'])} cases without the fix and {len(after['cases'])} others with it"
        return {"verdict": NOT_SHOWN, "reason": f"cannot be shown here, because the proof gave {counts}"}
    cases = [
        {"case": one["name"], "expected": one["expected"], "without": one["measured"], "with": two["measured"]}
        for one, two in zip(before["cases"], after["cases"], strict=True)
    ]
    faulty = any(case["without"] != case["expected"] for case in cases)
    found = {"outcome": after["outcome"], "reason": after["reason"], "cases": cases}
    if any(case["with"] != case["expected"] for case in cases):
        return found | {"verdict": NOT_MENDED}
    if faulty:
        return found | {"verdict": MENDED}
    if not cases or after["outcome"] in (Outcome.APPLIED, Outcome.ARMED):
        reason = f"cannot be shown here, because the fault did not appear without the fix ({after['reason']})"
        return found | {"verdict": NOT_SHOWN, "reason": reason}
    return found | {"verdict": RIGHT}


@contextlib.contextmanager
def _progress(text: str) -> Iterator[None]:
    """What is going on, for whoever watches; nothing in a log."""
    if not sys.stderr.isatty():
        yield
        return
    with Console(stderr=True).status(escape(text)):
        yield


def _measured(fix: Fix, timeout: float, label: str) -> list[dict[str, Any]]:
    """The answers without the fix and with it, up to the first that is an error.

    Nearly all of a measurement is the import of the framework, on one core: where there is room, both go on at once.
    """
    sides = [("without", "0"), ("with", _value(fix))]
    answers: list[dict[str, Any]] = []
    for group in [sides] if room_for_two(_MEMORY) else [[side] for side in sides]:
        names = " and ".join(name for name, _ in group)
        with _progress(f"{label}: measuring {fix.framework.name} {names} it"), contextlib.ExitStack() as running:
            for answer in [running.enter_context(_measuring(fix, switch, timeout)) for _, switch in group]:
                answers.append(answer())
                if "error" in answers[-1]:
                    return answers
    return answers


@contextlib.contextmanager
def _measuring(fix: Fix, switch: str, timeout: float) -> Iterator[Callable[[], dict[str, Any]]]:
    """Runs the proof in a fresh interpreter, which ends with the context; gives what waits for its answer.

    The answer comes in a file, since frameworks print what they like.
    """
    with tempfile.TemporaryDirectory(prefix="kvmend-verify-", ignore_cleanup_errors=True) as folder:
        path, output = Path(folder) / "answer.json", Path(folder) / "output"
        environment = os.environ | {settings.MASTER: "1", fix.switch: switch}
        # No server of the operator's: it stops and reports nothing.
        for variable in (settings.STRICT, settings.STATE_DIR):
            environment.pop(variable, None)
        command = [sys.executable, "-m", "kvmend.cli.measure", fix.id, str(path)]
        with output.open("wb") as stream:
            # Its own session, so that whatever it starts can be ended with it.
            child = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT,
                cwd=folder, start_new_session=True,
            )  # fmt: skip
        deadline = time.monotonic() + timeout

        def answer() -> dict[str, Any]:
            try:
                code = child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                return {"error": f"there was no answer within {timeout:g} s; --timeout allows more"}
            finally:
                _end(child)
            if not path.exists():
                last = _last_words(output.read_text(encoding="utf-8", errors="replace"))
                return {"error": f"the measuring process ended with {code}: {last}"}
            result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return result

        try:
            yield answer
        finally:
            if child.returncode is None:
                _end(child)


def _end(child: subprocess.Popen[bytes]) -> None:
    """Ends a process that leads a session, and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _last_words(output: str) -> str:
    """The error in a process's output; its last line where there is none, since frameworks go on logging."""
    lines = output.strip().splitlines() or ["no output"]
    return next((line for line in reversed(lines) if re.match(r"[\w.]+(Error|Exception)\b", line)), lines[-1])


def _print(rows: list[dict[str, Any]]) -> None:
    out = console()
    for row in rows:
        style = {MENDED: "green", RIGHT: "green", NOT_MENDED: "red"}.get(row["verdict"], "yellow")
        release = f"{row['framework']} {row['version'] or ''}".strip()
        out.print(f"[bold]{row['fix']}[/] on {escape(release)}: [{style}]{row['verdict']}[/] - {escape(row['reason'])}")
        for reason in row["kept_out"]:
            paragraph(out, f"But servers of this environment would not have it: {reason}")
        if row["switched_off"]:
            paragraph(out, f"Measured with {row['switch']}; in this environment it is off ({row['switched_off']}).")
        if row["cases"]:
            table(out, _cases(row["cases"]))


def _cases(cases: list[dict[str, Any]]) -> Table:
    rows = Table(box=None, pad_edge=False, header_style="bold")
    rows.add_column("case", overflow="fold")
    for heading in ("expected", "without", "with"):
        rows.add_column(heading, justify="right")
    for case in cases:
        figures = [str(case["expected"])]
        for name in ("without", "with"):
            text = escape(str(case[name]))
            figures.append(text if case[name] == case["expected"] else f"[red]{text}[/]")
        rows.add_row(escape(case["case"]), *figures)
    return rows
