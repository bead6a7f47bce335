"""What kvmend says in a server's log: in the framework's own logger, and never at the server's cost."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable

from kvmend.fix import Fix
from kvmend.outcome import Outcome, Result
from kvmend.registry import BrokenFix

_QUIET = frozenset({Outcome.APPLIED, Outcome.ALREADY_FIXED, Outcome.NOT_AFFECTED, Outcome.DISABLED})
#: Fix to the outcome that the log has of it.
said: dict[str, Outcome] = {}
_logger: Callable[[], logging.Logger] = functools.partial(logging.getLogger, "kvmend")
_warned: set[str] = set()


def speak_as(logger: Callable[[], logging.Logger]) -> None:
    """Has what belongs to no fix said by the logger that this function finds."""
    global _logger
    _logger = logger


def say(fix: Fix, result: Result) -> None:
    """Logs the end of one fix in the framework's own style; a fix that is only armed has not ended yet."""
    said[fix.id] = result.outcome
    level = logging.INFO if result.outcome in _QUIET else logging.WARNING
    if result.outcome is Outcome.ARMED or result.outcome is Outcome.NOT_INSTALLED:
        level = logging.DEBUG
    elif result.outcome is Outcome.APPLIED and "FORCED" in result.reason:
        level = logging.WARNING
    log(level, f"kvmend: {line(result)}", fix.framework.log)


def say_broken(entry: BrokenFix) -> None:
    """Logs that somebody's fix could not be loaded."""
    warn_once(f"kvmend: fix {entry.name} of {entry.distribution} could not be loaded: {entry.reason}")


def line(result: Result) -> str:
    """One line for a result, as in `vllm-prefix-stats applied [vLLM 0.26.0]: source is that of 0.26.0; …`."""
    where = f" [{' '.join(filter(None, (result.framework, result.version)))}]" if result.framework else ""
    return f"{result.fix} {result.outcome}{where}: {result.reason}"


def warn_once(message: str) -> None:
    """Logs a warning, the same text once per process."""
    if message not in _warned:
        _warned.add(message)
        log(logging.WARNING, message)


def log(
    level: int,
    message: str,
    logger: Callable[[], logging.Logger] | None = None,
    error: BaseException | None = None,
) -> None:
    """Logs a line. Whatever a logger, a handler or a full disk behind it makes of it, the server goes on."""
    # Nobody is left to tell.
    with contextlib.suppress(Exception):
        (logger or _logger)().log(level, "%s", message, exc_info=error)
