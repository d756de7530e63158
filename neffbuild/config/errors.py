"""Every error a user can meet, each with the exit status the command line gives it.

An error is written for the person who reads it in a log at night: what failed, the field and value
concerned, the allowed values, and what to do next.
"""

from __future__ import annotations

from typing import ClassVar


class NeffbuildError(Exception):
    """Base of all errors that are reported without a traceback.

    `field` is a dotted path (`serve.additional_config.neuron_config.num_seqs_buckets`), `value` the
    offending value as given, `hint` the next thing to do.
    """

    kind: ClassVar[str] = "error"
    exit_status: ClassVar[int] = 1

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        value: object = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.value = value
        self.hint = hint

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions cross process boundaries in the farm; keyword arguments do not survive the
        # default pickling of exceptions.
        return (_rebuild, (type(self), self.message, self.field, self.value, self.hint))


def _rebuild(
    cls: type[NeffbuildError], message: str, field: str | None, value: object, hint: str | None
) -> NeffbuildError:
    return cls(message, field=field, value=value, hint=hint)


class UnitsIncomplete(NeffbuildError):
    """Some unit failed or is missing; everything else is stored and usable."""

    kind = "units_incomplete"
    exit_status = 1


class MissingUnit(UnitsIncomplete):
    """Strict mode met a unit that is not in the store."""

    kind = "missing_unit"


class ConfigError(NeffbuildError):
    """The configuration or the command line is wrong."""

    kind = "config"
    exit_status = 2


class AboveLadder(ConfigError):
    """A step is larger than the last bucket of a ladder, so no program can run it."""

    kind = "above_ladder"


class MissingExtra(ConfigError):
    """An optional dependency is needed and not installed."""

    kind = "missing_extra"


class ToolchainRefusal(ConfigError):
    """The toolchain cannot build or load what was asked (a capability, a host or a version)."""

    kind = "toolchain"


class StoreError(NeffbuildError):
    """A store cannot be reached or refuses."""

    kind = "store"
    exit_status = 3


class LockTimeout(StoreError):
    """Another process of this host kept a lock for longer than we may wait."""

    kind = "lock_timeout"


class IntegrityError(NeffbuildError):
    """Content does not match its digest, size, schema or signature."""

    kind = "integrity"
    exit_status = 4
