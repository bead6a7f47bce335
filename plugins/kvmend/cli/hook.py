"""`kvmend hook`: the startup hook of an environment, one `.pth` file, written and removed on request only."""

from __future__ import annotations

import json
import os
import re
import site
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from kvmend import settings, startup
from kvmend.cli.catalogue import all_fixes
from kvmend.cli.output import reader_may_leave
from kvmend.errors import UsageError

FILE = "kvmend_startup.pth"
_FIRST = '# The startup hook of kvmend: "kvmend hook enable" wrote this file, "kvmend hook disable" removes it.'
_OURS = re.compile(re.escape(startup.LINE).replace(re.escape("{names}"), r"((?:'\w+', )*'\w+')"))
#: Seconds that one start of an interpreter may take.
_PATIENCE = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Hook:
    """The startup hook of an environment.

    Attributes:
        path: Its file.
        state: "enabled", "disabled" (there is no such file) or "foreign" (it is not, or not only, what kvmend wrote).
        packages: The frameworks it watches for.
        problem: Why it is foreign, or "".
    """

    path: Path
    state: str
    packages: tuple[str, ...] = ()
    problem: str = ""


def read_hook(folder: Path | None = None) -> Hook:
    """The startup hook in a folder of packages; in that of the running interpreter if None."""
    path = (folder or Path(sysconfig.get_path("purelib"))) / FILE
    if path.is_symlink():
        return Hook(path=path, state="foreign", problem="is a symbolic link")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return Hook(path=path, state="disabled")
    except (OSError, UnicodeDecodeError) as error:
        return Hook(path=path, state="foreign", problem=f"cannot be read: {error}")
    packages: tuple[str, ...] = ()
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _OURS.fullmatch(line.rstrip())
        if match is None:
            return Hook(path=path, state="foreign", problem=f"has a line that kvmend did not write: line {number}")
        packages += tuple(name.strip("'") for name in match[1].split(", "))
    if not packages:
        return Hook(path=path, state="foreign", problem="has no line of kvmend's")
    return Hook(path=path, state="enabled", packages=packages)


def content(packages: Sequence[str]) -> str:
    """The file that watches for these packages."""
    return f"{_FIRST}\n{startup.line(packages)}\n"


@click.group("hook")
def hook_command() -> None:
    """The startup hook of this environment, for processes that load no plugins. Off unless enabled."""


@hook_command.command("enable")
@click.option("--system", is_flag=True, help="Also into a Python that the operating system manages.")
def enable_command(system: bool) -> int:
    """Writes one .pth file into this environment: every framework imported in it gets its fixes."""
    hook = _own_hook()
    packages = tuple(sorted({fix.framework.package for fix in all_fixes()}))
    if not packages:
        raise UsageError("no fix is registered in this environment; kvmend check says why")
    _refuse_where_it_would_not_do(hook.path, system)
    text = content(packages)
    already = hook.state == "enabled" and hook.path.read_text(encoding="utf-8") == text
    if not already:
        _write(hook.path, text)
    seen = _watched_by_a_new_interpreter()
    if seen != packages:
        # Not taken away again: where the interpreter is started otherwise, it may do.
        click.echo(f"kvmend: {hook.path} is there, but a new {sys.executable} does not run it", err=True)
        return 1
    click.echo(f"{hook.path}: {'was enabled before' if already else 'enabled'}, for {', '.join(packages)}")
    return 0


@hook_command.command("disable")
def disable_command() -> int:
    """Removes that file. A file with lines of somebody else's stays."""
    hook = _own_hook()
    if hook.state == "enabled":
        try:
            hook.path.unlink()
        except OSError as error:
            raise UsageError(f"{hook.path} cannot be removed: {error.strerror}") from error
        click.echo(f"{hook.path}: removed")
    else:
        click.echo(f"{hook.path}: was not enabled")
    return 0


@hook_command.command("status")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def status_command(as_json: bool) -> int:
    """Says if the hook is enabled, and if this interpreter ran it. Exit code 0 if both, 1 if not."""
    hook = read_hook()
    watching = startup.watched()
    report = {
        "state": hook.state,
        "path": str(hook.path),
        "packages": list(hook.packages),
        "watching": list(watching),
        "problem": hook.problem or None,
    }
    with reader_may_leave():
        if as_json:
            click.echo(json.dumps(report, indent=1))
        else:
            from kvmend.cli.printing import console, paragraph

            paragraph(console(), describe(hook, watching), indent=0)
    return 0 if hook.state == "enabled" and set(hook.packages) <= set(watching) else 1


def describe(hook: Hook, watching: Sequence[str]) -> str:
    """One line on the hook, for people."""
    if hook.state == "foreign":
        return f"startup hook: {hook.path} {hook.problem}; it is left alone"
    if hook.state == "disabled":
        return "startup hook: disabled"
    line = f"startup hook: enabled for {', '.join(hook.packages)} ({hook.path})"
    if set(hook.packages) <= set(watching):
        return line
    master = os.environ.get(settings.MASTER) == "0"
    return f"{line}, but not run by this interpreter{f': {settings.MASTER}=0' if master else ''}"


def _own_hook() -> Hook:
    hook = read_hook()
    if hook.state == "foreign":
        raise UsageError(f"{hook.path} {hook.problem}; nothing was changed, look at it and remove it by hand")
    return hook


def _refuse_where_it_would_not_do(path: Path, system: bool) -> None:
    """Raises where the file would be read by nobody, or by more than the caller may have in mind."""
    folder = path.parent
    places = [Path(place).resolve() for place in (*site.getsitepackages(), site.getusersitepackages())]
    if folder.resolve() not in places:
        raise UsageError(f"{folder} is no folder whose .pth files {sys.executable} reads at its start")
    managed = Path(sysconfig.get_path("stdlib")) / "EXTERNALLY-MANAGED"
    if sys.prefix == sys.base_prefix and managed.exists() and not system:
        raise UsageError(
            f"{sys.executable} belongs to the operating system ({managed}) and to every program of it: "
            "use a virtual environment, or add --system"
        )


def _write(path: Path, text: str) -> None:
    temporary = ""
    try:
        handle, temporary = tempfile.mkstemp(prefix=".kvmend_startup-", dir=path.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.chmod(temporary, 0o644)  # readable for whoever runs the servers
        os.replace(temporary, path)
    except OSError as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error


def _watched_by_a_new_interpreter() -> tuple[str, ...]:
    code = "from kvmend.startup import watched; print(','.join(watched()))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {settings.MASTER: "1"},
        capture_output=True,
        text=True,
        timeout=_PATIENCE,
        check=False,
    )
    lines = done.stdout.strip().splitlines()
    return tuple(lines[-1].split(",")) if lines else ()
