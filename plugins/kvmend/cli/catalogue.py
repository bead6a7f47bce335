"""`kvmend list` and `kvmend explain`: what the records say of themselves."""

from __future__ import annotations

import click
from rich.console import Console
from rich.padding import Padding

from kvmend import registry
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
    console = Console(highlight=False)
    for fix in all_fixes():
        console.print(f"[bold]{fix.id}[/]  {fix.framework.name} {fix.releases}  {fix.switch}", soft_wrap=True)
        console.print(Padding(fix.summary, (0, 0, 0, 2)))


def paragraphs(text: str) -> str:
    """A record's text with the line breaks of the source taken out; paragraphs are set off by blank lines."""
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


@click.command("explain")
@click.argument("fix")
def explain_command(fix: str) -> None:
    """Says why FIX is needed, how it works, and when to remove it."""
    record = fix_named(fix)
    console = Console(highlight=False)
    console.print(f"[bold]{record.id}[/] - {record.summary}")
    console.print(
        f"{record.framework.name} {record.releases}; switch {record.switch} = {'|'.join(allowed_values(record))}\n"
    )
    for heading, text in (("Why", record.why), ("How", record.how), ("Remove when", record.remove_when)):
        console.print(f"[bold]{heading}[/]")
        console.print(paragraphs(text) + "\n", markup=False)
    console.print("[bold]Touches[/]")
    for site in record.sites:
        only = f"  (where the source has: {', '.join(sorted(site.features))})" if site.features else ""
        console.print(f"  {site.key}{only}", markup=False, soft_wrap=True)
    console.print("[bold]Reads[/]")
    for body in record.bodies:
        console.print(f"  {body.key}", markup=False, soft_wrap=True)
    console.print("[bold]Counters[/]")
    for name, meaning in record.counters.items():
        console.print(f"  {name}: {meaning}", markup=False)
    console.print("[bold]Upstream[/]")
    for link in record.upstream:
        console.print(f"  {link}", markup=False, soft_wrap=True)
