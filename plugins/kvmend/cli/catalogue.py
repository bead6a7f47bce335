"""`kvmend list` and `kvmend explain`: what the records say of themselves."""

from __future__ import annotations

import click

from kvmend import registry
from kvmend.cli.output import reader_may_leave
from kvmend.errors import UsageError
from kvmend.fix import Fix
from kvmend.settings import allowed_values


def all_fixes() -> tuple[Fix, ...]:
    """Every registered fix; a fix that cannot be loaded is said on standard error."""
    fixes, broken = registry.discover()
    for entry in broken:
        click.echo(f"kvmend: fix {entry.name} of {entry.distribution} could not be loaded: {entry.reason}", err=True)
    return fixes


def fix_named(name: str) -> Fix:
    """The fix with this id.

    Raises:
        UsageError: There is none; the message names those there are.
    """
    fixes = all_fixes()
    for fix in fixes:
        if fix.id == name:
            return fix
    raise UsageError(f"no fix {name!r}; there are: {', '.join(fix.id for fix in fixes) or 'none'}")


@click.command("list")
def list_command() -> None:
    """Lists the fixes."""
    from kvmend.cli.printing import console, paragraph

    fixes = all_fixes()
    with reader_may_leave():
        out = console()
        for fix in fixes:
            out.print(f"[bold]{fix.id}[/]  {fix.framework.name} {fix.releases}  {fix.switch}", soft_wrap=True)
            paragraph(out, fix.summary)


def paragraphs(text: str) -> str:
    """A record's text with the line breaks of the source taken out; paragraphs are set off by blank lines."""
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


@click.command("explain")
@click.argument("fix")
def explain_command(fix: str) -> None:
    """Says why FIX is needed, how it works, and when to remove it."""
    record = fix_named(fix)
    with reader_may_leave():
        _explain(record)


def _explain(record: Fix) -> None:
    from kvmend.cli.printing import console

    out = console()
    out.print(f"[bold]{record.id}[/] - {record.summary}")
    out.print(
        f"{record.framework.name} {record.releases}; switch {record.switch} = {'|'.join(allowed_values(record))}\n"
    )
    for heading, text in (("Why", record.why), ("How", record.how), ("Remove when", record.remove_when)):
        out.print(f"[bold]{heading}[/]")
        out.print(paragraphs(text) + "\n", markup=False)
    out.print("[bold]Touches[/]")
    for site in record.sites:
        only = f"  (where the source has: {', '.join(sorted(site.features))})" if site.features else ""
        out.print(f"  {site.key}{only}", markup=False, soft_wrap=True)
    out.print("[bold]Reads[/]")
    for body in record.bodies:
        out.print(f"  {body.key}", markup=False, soft_wrap=True)
    out.print("[bold]Counters[/]")
    for name, meaning in record.counters.items():
        out.print(f"  {name}: {meaning}", markup=False)
    out.print("[bold]Upstream[/]")
    for link in record.upstream:
        out.print(f"  {link}", markup=False, soft_wrap=True)
