"""Environment switches, read when a fix is applied and never before."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from kvmend.errors import SettingsError
from kvmend.fix import Fix
from kvmend.record import record

MASTER = "KVMEND"
STRICT = "KVMEND_STRICT"
STATE_DIR = "KVMEND_STATE_DIR"
_ON_OFF = ("1", "0")
#: Variables that only the project's own tests and makefile read.
ASIDE = frozenset(
    {"KVMEND_CACHE", "KVMEND_FASTDEPLOY_PYTHON", "KVMEND_FASTDEPLOY_TREE", "KVMEND_FASTDEPLOY_TREES", "KVMEND_TRACE"}
)


@record(frozen=True, kw_only=True)
class Setting:
    """What the environment asks of one fix.

    Attributes:
        wanted: Whether the fix is to be applied.
        mode: The mode; "1" for a fix that has no modes of its own.
        forced: Whether a source that is not known may be touched.
        reason: Which variable decided, for the reader of a report.
    """

    wanted: bool
    mode: str
    forced: bool
    reason: str


def _one_of(environ: Mapping[str, str], variable: str, allowed: tuple[str, ...], default: str) -> str:
    value = environ.get(variable, default)
    if value not in allowed:
        raise SettingsError(variable, value, allowed)
    return value


def allowed_values(fix: Fix) -> tuple[str, ...]:
    """The values that the fix's switch takes."""
    return ("1", "0", "force", *fix.modes)


def setting_of(fix: Fix, environ: Mapping[str, str] | None = None) -> Setting:
    """Reads the master switch and the fix's own.

    Raises:
        SettingsError: A variable has a value that is not allowed; the message names variable, value and choices.
    """
    environ = os.environ if environ is None else environ
    master = _one_of(environ, MASTER, _ON_OFF, "1")
    value = _one_of(environ, fix.switch, allowed_values(fix), "1")
    if master == "0":
        return Setting(wanted=False, mode="", forced=False, reason=f"{MASTER}=0")
    if value == "0":
        return Setting(wanted=False, mode="", forced=False, reason=f"{fix.switch}=0")
    mode = value if value in fix.modes else fix.default_mode
    return Setting(wanted=True, mode=mode, forced=value == "force", reason=f"{fix.switch}={value}")


def strict(environ: Mapping[str, str] | None = None) -> bool:
    """Whether a wanted fix that cannot do its job stops the process.

    Raises:
        SettingsError: The variable is neither 1 nor 0.
    """
    return _one_of(os.environ if environ is None else environ, STRICT, _ON_OFF, "0") == "1"


def state_dir(environ: Mapping[str, str] | None = None) -> str | None:
    """The folder for per-process reports as an absolute path, a leading `~` expanded; None if none is asked for.

    Raises:
        SettingsError: The path begins with `~`, and there is no such home folder.
    """
    value = (os.environ if environ is None else environ).get(STATE_DIR)
    if not value:
        return None
    folder = os.path.expanduser(value)
    if folder.startswith("~"):
        raise SettingsError(STATE_DIR, value, ("a folder", "~/folder where there is a home"))
    return os.path.abspath(folder)


def pin_state_dir() -> None:
    """Makes a relative KVMEND_STATE_DIR absolute for this process and its children, which may work elsewhere.

    Raises:
        SettingsError: As in `state_dir`.
    """
    folder = state_dir()
    if folder is not None and not os.path.isabs(os.environ[STATE_DIR]):
        os.environ[STATE_DIR] = folder


def unknown_variables(fixes: Iterable[Fix], environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Variables that look like switches of kvmend and are none: a misspelt switch would be a silent no-op."""
    known = {MASTER, STRICT, STATE_DIR, *ASIDE, *(fix.switch for fix in fixes)}
    environ = os.environ if environ is None else environ
    return tuple(sorted(name for name in environ if name.startswith("KVMEND") and name not in known))
