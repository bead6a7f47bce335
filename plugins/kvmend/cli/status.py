"""`kvmend status`: the reports of a server's processes, summed up for whoever runs it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

import click
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvmend import __version__, settings
from kvmend.cli.exposition import expose
from kvmend.cli.gathering import ENDED, RUNNING, SILENT, STATES, Folder, Seen, fix_ok, gather, prune
from kvmend.errors import UsageError
from kvmend.report import replace

SCHEMA = 1
#: Lines on files that are no report; the others are counted.
_MOST_FILES = 10
_STATE_STYLE = {RUNNING: "green", SILENT: "yellow", ENDED: "dim"}


@click.command("status")
@click.option("--state-dir", "folder", help=f"The folder of reports; {settings.STATE_DIR} if not given.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output, see status.schema.json.")
@click.option("--prometheus", is_flag=True, help="Prometheus text format.")
@click.option("--output", metavar="FILE", help="With --prometheus: write this file in one step.")
@click.option(
    "--watch",
    type=click.FloatRange(min=0.1),
    is_flag=False,
    flag_value="2",
    metavar="[SECONDS]",
    help="Show or write it again every so many seconds, 2 if not given, until interrupted.",
)
@click.option("--prune", "pruning", is_flag=True, help="Remove the reports of processes that are gone.")
def status_command(
    folder: str | None, as_json: bool, prometheus: bool, output: str | None, watch: float | None, pruning: bool
) -> int:
    """Shows which processes run with kvmend, what each fix does in them and how often it was used.

    Exit code 0 if there is a running process and every wanted fix does its job, or is not needed, in all of them; 1
    if not, which is also the answer to a folder without a running process or with a report that cannot be read; 2 if
    there is no folder or it cannot be read.
    """
    if as_json and prometheus:
        raise UsageError("--json and --prometheus cannot go together")
    if output is not None and not prometheus:
        raise UsageError("--output needs --prometheus")
    if watch is not None and (as_json or prometheus) and output is None:
        raise UsageError("--watch shows a table or, with --prometheus and --output, keeps a file")
    place = settings.state_dir({settings.STATE_DIR: folder} if folder is not None else None)
    if place is None:
        raise UsageError(f"no folder of reports: set {settings.STATE_DIR} or use --state-dir")

    def look() -> Folder:
        found = gather(place)
        return prune(found) if pruning else found

    if output is not None:
        file = os.path.abspath(output)
        return _repeat(lambda: _keep(look(), file), watch)
    if watch is not None:
        return _watch(look, watch)
    found = look()
    if as_json:
        click.echo(json.dumps(as_data(found), indent=1))
    elif prometheus:
        click.echo(expose(found).encode(), nl=False)  # the format is UTF-8, whatever the terminal is
    else:
        Console(highlight=False).print(render(found), crop=False)
    return 0 if found.ok else 1


def as_data(folder: Folder) -> dict[str, Any]:
    """What `kvmend status --json` prints; its schema is `status.schema.json` in the package."""
    return {
        "schema": SCHEMA,
        "kvmend": __version__,
        "folder": folder.path,
        "read": folder.read,
        "ok": folder.ok,
        "counts": {state: folder.count(state) for state in STATES},
        "processes": [_process(seen) for seen in folder.processes],
        "unreadable": [{"file": name, "reason": reason} for name, reason in folder.unreadable],
        "pruned": list(folder.pruned),
    }


_PROCESS = ("process", "host", "pid", "forked_from", "role", "command", "kvmend", "started", "written", "ended")
_FIX = ("fix", "outcome", "reason", "mode", "shadowed_by", "inherited", "counters", "derived")


def _process(seen: Seen) -> dict[str, Any]:
    framework, version = seen.framework()
    own: dict[str, Any] = {"file": seen.file, "state": seen.state, "age": round(seen.age, 3), "ok": seen.ok}
    own |= {"framework": framework, "version": version} | {name: seen.data[name] for name in _PROCESS}
    own["fixes"] = [{"ok": fix_ok(fix)} | {name: fix[name] for name in _FIX} for fix in seen.data["fixes"]]
    return own


def render(folder: Folder) -> Group:
    """The table and what must be said beneath it."""
    counts = ", ".join(f"{folder.count(state)} {state}" for state in STATES if folder.count(state))
    parts: list[Any] = [_line(f"{folder.path}: {counts or 'no reports'}", "bold")]
    if folder.processes:
        parts.append(_table(folder))
    if not any(seen.lives for seen in folder.processes):
        parts.append(_line(f"no running process reports here: is {settings.STATE_DIR} set for the server?", "red"))
    for seen in folder.processes:
        parts.extend(_line(text, "red") for text in _complaints(seen))
    for name, reason in folder.unreadable[:_MOST_FILES]:
        parts.append(_line(f"not a report: {name}: {reason}", "yellow"))
    if len(folder.unreadable) > _MOST_FILES:
        parts.append(_line(f"and {len(folder.unreadable) - _MOST_FILES} more files that are no report", "yellow"))
    parts.extend(_line(f"removed {name}", "dim") for name in folder.pruned)
    return Group(*parts)


def _line(text: str, style: str) -> Text:
    return Text(" ".join(_plain(text).split()), style=style, no_wrap=True, overflow="ignore")


def _table(folder: Folder) -> Table:
    """Two lines for a process and each of its fixes, so that it fits a terminal of 80 columns."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("process", "framework", "state", "outcome", "fix"):
        table.add_column(heading, overflow="fold")
    for seen in folder.processes:
        framework, version = seen.framework()
        own: tuple[Text, ...] = (
            Text(_plain(f"{seen.data['pid']} {seen.data['host']}\n{role_of(seen)}")),
            Text(_plain(f"{framework or '?'} {version or ''}\nkvmend {seen.data['kvmend']}")),
            Text(f"{seen.state}\n{_span(seen.age)} ago", style=_STATE_STYLE.get(seen.state, "red")),
        )
        for fix in seen.data["fixes"] or [None]:
            table.add_row(*own, *(_cells(seen, fix) if fix else (Text("no fix", style="red"), Text())))
            own = (Text(), Text(), Text())
    return table


def role_of(seen: Seen) -> str:
    """As in "worker 3, prefill"."""
    role = seen.data["role"]
    name = " ".join(filter(None, (role["name"] or "?", "" if role["rank"] is None else str(role["rank"]))))
    return f"{name}, {role['node']}" if role["node"] else name


def _cells(seen: Seen, fix: dict[str, Any]) -> tuple[Text, Text]:
    style = "dim" if not seen.lives or fix["outcome"] == "disabled" else "green" if fix_ok(fix) else "red"
    more = {"shadowed": fix["shadowed_by"], "inherited": fix["inherited"]}
    outcome = "\n".join([fix["outcome"], *(word for word, holds in more.items() if holds)])
    counters = ", ".join(f"{name} {value:,}" for name, value in fix["counters"].items() if value)
    return Text(outcome, style=style), Text(_plain(f"{fix['fix']}\n{counters or 'not used yet'}"))


def _complaints(seen: Seen) -> list[str]:
    """One line for each thing that is wrong with a process."""
    if seen.ok:
        return []
    who = f"{seen.data['pid']} {seen.data['host']}"
    found = [f"{who}: its last report is {_span(seen.age)} old"] if seen.state == SILENT else []
    if not seen.data["fixes"]:
        found.append(f"{who}: no fix was loaded")
    for fix in seen.data["fixes"]:
        if not fix_ok(fix | {"shadowed_by": []}):
            found.append(f"{who}: {fix['fix']} {fix['outcome']}: {fix['reason']}")
        elif not fix_ok(fix):
            found.append(f"{who}: {fix['fix']} does nothing, shadowed by {', '.join(fix['shadowed_by'])}")
    return found


def _span(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _plain(text: str) -> str:
    """Without what a terminal would obey: the files in the folder are not all ours."""
    return "".join(each if each.isprintable() or each == "\n" else "\N{REPLACEMENT CHARACTER}" for each in text)


def _keep(folder: Folder, output: str) -> int:
    try:
        replace(output, expose(folder).encode())
    except OSError as error:
        raise UsageError(f"{output} cannot be written: {error.strerror or error}") from error
    return 0 if folder.ok else 1


def _repeat(work: Callable[[], int], watch: float | None) -> int:
    code = work()
    try:
        while watch is not None:
            time.sleep(watch)
            code = work()
    except KeyboardInterrupt:
        pass
    return code


def _watch(look: Callable[[], Folder], seconds: float) -> int:
    console = Console(highlight=False)
    if not console.is_terminal:

        def show() -> int:
            found = look()
            console.print(render(found), crop=False)
            console.file.flush()
            return 0 if found.ok else 1

        return _repeat(show, seconds)
    found = look()
    with Live(render(found), console=console, auto_refresh=False, screen=False) as live:

        def refresh() -> int:
            found = look()
            live.update(render(found), refresh=True)
            return 0 if found.ok else 1

        return _repeat(refresh, seconds)
