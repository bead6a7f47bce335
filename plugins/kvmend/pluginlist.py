"""A framework's list of allowed plugins: an environment variable with names between commas."""

from __future__ import annotations

import re
import shlex

NAME = "kvmend"


def left_out(variable: str, value: str) -> str:
    """Why a list leaves kvmend out, and what to set instead; "" if it names kvmend.

    Args:
        variable: The environment variable, as in "VLLM_PLUGINS".
        value: Its value. Frameworks split it at commas and compare the names as they stand, spaces and all.
    """
    names = value.split(",")
    if NAME in names:
        return ""
    near = next((name for name in names if _near(name)), None)
    hint = "" if near is None else f" ({_why_not(near)})"
    kept = [name.strip() for name in names if name.strip() and name is not near]
    if near is not None:
        kept += [part for part in _parts(near) if not _near(part)] if len(_parts(near)) > 1 else []
    advice = f"{variable}={shlex.quote(','.join([*kept, NAME]))}"
    return f"{variable}={value!r} does not name {NAME}{hint}: it will not be loaded; set {advice}"


def _parts(name: str) -> list[str]:
    return [part for part in re.split(r"[\s;:|]+", name) if part]


def _near(name: str) -> bool:
    import difflib  # costs milliseconds, and a list that names kvmend needs it not

    plain = name.strip(" \t'\"").lower()
    if NAME in plain or plain.replace("-", "").replace("_", "") == NAME:
        return True
    return difflib.SequenceMatcher(None, plain, NAME).ratio() >= 0.75


def _why_not(near: str) -> str:
    if near.strip() == NAME:
        return "spaces are not stripped"
    if NAME in _parts(near):
        return "names are split at commas only"
    return f"{near.strip()!r} is a near miss"
