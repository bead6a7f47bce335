"""`kvmend check --json` in this process or in one of its own, its output held against the schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
from click.testing import CliRunner

import kvmend as package
from kvmend import cli
from support.interpreter import kvmend
from support.toyfw import ENGINE

SCHEMA = json.loads((Path(package.__file__).parent / "check.schema.json").read_text(encoding="utf-8"))
#: A source of the toy framework that no table knows, with the fault in it.
UNKNOWN = {"engine": ENGINE.replace('f"found {request}"', 'f"found {request!r}"')}
#: Exit code, report, and the toy fix's row or {}.
Checked = tuple[int, dict[str, Any], dict[str, Any]]


def check(*arguments: str, **env: str) -> Checked:
    """In this process."""
    result = CliRunner().invoke(cli.cli, ["check", "--json", *arguments], env=env, standalone_mode=False)
    assert result.exception is None
    return checked(result.return_value, json.loads(result.output))


def check_apart(*path: Path, **env: str) -> Checked:
    """In a process of its own: what is wrong with an installation shows there."""
    done = kvmend("check", "--json", path=path, env=env)
    return checked(done.code, done.value)


def checked(code: int, report: dict[str, Any]) -> Checked:
    jsonschema.validate(report, SCHEMA)
    rows = [row for row in report["fixes"] if row["fix"] == "toy-count"]
    return code, report, rows[0] if rows else {}
