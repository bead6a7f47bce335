"""`kvmend demo`: a fix at work on the real framework."""

from __future__ import annotations

import importlib

import click

from kvmend.cli.catalogue import all_fixes, fix_named
from kvmend.errors import UsageError


@click.command("demo")
@click.argument("fix", required=False)
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
@click.option("--no-http", is_flag=True, help="Leave out the scenarios that start an HTTP server.")
@click.option("--runs", type=click.IntRange(1, 20), default=1, show_default=True, help="Repeat each scenario.")
@click.option("--requests", type=click.IntRange(8, 512), default=48, show_default=True, help="Requests a scenario.")
def demo_command(fix: str | None, as_json: bool, no_http: bool, runs: int, requests: int) -> int:
    """Shows FIX at work on the real engine, without it and with it. The only fix with a demo needs no name."""
    with_demo = [record for record in all_fixes() if record.demo]
    record = fix_named(fix) if fix else with_demo[0] if with_demo else None
    if record is None or not record.demo:
        there_are = ", ".join(each.id for each in with_demo) or "none"
        raise UsageError(f"{fix or 'kvmend'} has no demo; fixes with one: {there_are}")
    module = importlib.import_module(record.demo)
    code: int = module.run({"json": as_json, "http": not no_http, "runs": runs, "requests": requests})
    return code
