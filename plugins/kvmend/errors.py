"""Every exception that kvmend raises on purpose. This module imports nothing."""

from __future__ import annotations


class KvmendError(Exception):
    """Base of all of them. `str()` is one line that an operator can act on."""


class FixDeclarationError(KvmendError):
    """A fix record or finding does not make sense; raised when it is made."""


class SettingsError(KvmendError):
    """An environment variable has a value that is not allowed.

    Attributes:
        variable: Name of the variable.
        value: The value found.
        allowed: The values that are allowed.
    """

    def __init__(self, variable: str, value: str, allowed: tuple[str, ...]) -> None:
        self.variable = variable
        self.value = value
        self.allowed = allowed
        super().__init__(f"{variable}={value!r} is not allowed; allowed: {', '.join(allowed)}")


class LocateError(KvmendError):
    """A path was given and no framework can be read there."""


class FingerprintError(KvmendError):
    """A table of known sources is missing or malformed."""


class StrictError(KvmendError):
    """Under KVMEND_STRICT=1: a wanted fix cannot do its job, so the process must not come up."""


class UsageError(KvmendError):
    """The command line was given something it cannot work with."""
