"""The generated parts of the reference pages: fixes from their records, commands from the command line itself."""

from __future__ import annotations

import inspect
import re

import click

from kvmend.cli import COMMANDS, cli
from kvmend.cli.catalogue import paragraphs
from kvmend.fix import Fix
from kvmend.settings import allowed_values


def table(headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(headings) + " |", "|" + " --- |" * len(headings)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def facts(fix: Fix) -> str:
    """What a reader wants to know of a fix at a glance."""
    rows = [
        ("framework", fix.framework.name),
        ("releases", fix.releases),
        ("switch", f"`{fix.switch}` = {', '.join(f'`{value}`' for value in allowed_values(fix))}; default `1`"),
        ("processes", fix.framework.processes),
        ("upstream", ", ".join(f"[{_name(link)}]({link})" for link in fix.upstream)),
    ]
    return table(("", fix.id), [(name, value) for name, value in rows if value])


def _name(link: str) -> str:
    found = re.fullmatch(r"https://github\.com/[^/]+/([^/]+)/(?:pull|issues)/(\d+)", link)
    return f"{found[1]} {found[2]}" if found else link.removeprefix("https://")


def cause(fix: Fix) -> str:
    """What triggers the fault; the pages say in their own words what an operator sees of it."""
    kept = [part for part in paragraphs(fix.why).split("\n\n") if not part.startswith("Symptom: ")]
    return "\n\n".join(_capital(part.removeprefix("Trigger: ")) for part in kept)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def how(fix: Fix) -> str:
    """What the fix does and why that is safe."""
    return _prose(fix.how)


def remove(fix: Fix) -> str:
    """When to take it off."""
    return _prose(fix.remove_when)


def _prose(text: str) -> str:
    return re.sub(r"^(Safe because): ", r"**\1:** ", paragraphs(text), flags=re.MULTILINE)


def counters(fix: Fix) -> str:
    """Name and meaning of each counter."""
    return table(("counter", "meaning"), [(f"`{name}`", meaning) for name, meaning in fix.counters.items()])


def touches(fix: Fix) -> str:
    """The functions it wraps, and those it only reads."""
    keys = list(dict.fromkeys(site.key for site in fix.sites))
    read = [body.key for body in fix.bodies]
    wrapped = "\n".join(f"- `{key}`" for key in keys)
    return f"Wrapped:\n\n{wrapped}\n\nRead, not touched:\n\n" + "\n".join(f"- `{key}`" for key in read)


FIX_BLOCKS = {"facts": facts, "cause": cause, "how": how, "remove": remove, "counters": counters, "touches": touches}


def commands() -> str:
    """Every command with its arguments and options."""
    parts = []
    for name in sorted(COMMANDS):
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        context = click.Context(command, info_name=f"kvmend {name}")
        parts.append(f"### kvmend {name}\n\n" + _command(command, context))
        if isinstance(command, click.Group):
            for inner in sorted(command.commands):
                inside = click.Context(command.commands[inner], info_name=inner, parent=context)
                parts.append(f"#### kvmend {name} {inner}\n\n" + _command(command.commands[inner], inside))
    return "\n\n".join(parts)


def _command(command: click.Command, context: click.Context) -> str:
    usage = command.get_usage(context).removeprefix("Usage: ")
    text = f"```text\n{' '.join(usage.split())}\n```\n\n{_help(command.help or '')}"
    records = [
        record
        for parameter in command.get_params(context)
        if isinstance(parameter, click.Option)  # some releases of click list arguments, too
        and (record := parameter.get_help_record(context)) is not None
        and "--help" not in parameter.opts
    ]
    if records:
        text += "\n\n" + table(("option", "meaning"), [(f"`{name}`", _escaped(said)) for name, said in records])
    return text


def _help(text: str) -> str:
    """Paragraphs; those that click is told to leave as they are become blocks."""
    parts = []
    for part in inspect.cleandoc(text).split("\n\n"):
        kept = part.startswith("\b\n")
        parts.append(f"```text\n{part[2:]}\n```" if kept else _escaped(paragraphs(part)))
    return "\n\n".join(parts)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("[", "\\[").replace("<", "&lt;")
