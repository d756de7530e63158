"""How a toolchain says what its compiler reports, so that the farm knows what became of the unit."""

from __future__ import annotations

from enum import StrEnum

from neffbuild.config.errors import NeffbuildError


class FailureClass(StrEnum):
    """What is to blame for a compiler's failure, as a toolchain tells from what its compiler reports; the
    farm decides by it what to try again. Memory is the host's: a graph that is too large for the device
    is a compiler error."""

    COMPILER_ERROR = "compiler_error"
    OUT_OF_MEMORY = "out_of_memory"
    SIGNAL = "signal"
    MISSING_DEPENDENCY = "missing_dependency"
    TIMEOUT = "timeout"


class CompilerFailure(NeffbuildError):
    """The compiler failed: `message` says how, in its own words where it has any, `hint` what to do, and
    `failure` what is to blame."""

    kind = "compiler"

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        value: object = None,
        hint: str | None = None,
        failure: FailureClass = FailureClass.COMPILER_ERROR,
    ) -> None:
        super().__init__(message, field=field, value=value, hint=hint)
        self.failure = failure

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_failure, (self.message, self.field, self.value, self.hint, self.failure))


def _rebuild_failure(
    message: str, field: str | None, value: object, hint: str | None, failure: FailureClass
) -> CompilerFailure:
    return CompilerFailure(message, field=field, value=value, hint=hint, failure=failure)
