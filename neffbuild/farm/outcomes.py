"""What became of each unit, why, and what to do about it."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from neffbuild.cache.entry import Entry
from neffbuild.config.errors import ConfigError, NeffbuildError, StoreError
from neffbuild.grid.shapes import Family
from neffbuild.toolchain.base import Unit

RUN_SCHEMA = "neffbuild.run/1"
_LONGEST_TEXT = 400


class Outcome(StrEnum):
    """`units[].outcome` of `neffbuild.run/1`."""

    BUILT = "built"
    CACHED = "cached"
    FAILED = "failed"
    CANCELLED = "cancelled"
    SKIPPED = "skipped"


class CauseKind(StrEnum):
    """Classes of failure, for whoever decides by machine what to do next."""

    COMPILER_ERROR = "compiler_error"
    OUT_OF_MEMORY = "out_of_memory"
    TIMEOUT = "timeout"
    SIGNAL = "signal"
    MISSING_DEPENDENCY = "missing_dependency"
    DISK_FULL = "disk_full"
    REFUSED = "refused"
    STORE = "store"
    CANCELLED = "cancelled"
    LOST_WORKER = "lost_worker"


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a unit has no artifact: its class, a sentence for a person, and what to do."""

    kind: CauseKind
    text: str
    advice: str | None = None


@dataclass(frozen=True, slots=True)
class UnitResult:
    """What became of one unit.

    `compile_seconds` is the time from capture to artifact; `cpu_seconds` and `peak_memory_bytes` are of
    the worker with everything it started (resident memory, shared pages counted in each process);
    `scratch_bytes` is what its scratch folder took at the end. All four are None where nothing was
    compiled. `attempts` says how often the run has tried. `log`, the bounded output of everything that
    ran, is kept for units that failed; `log_tail` is its end.
    """

    bucket_name: str
    family: Family
    key: str
    outcome: Outcome
    cause: Cause | None = None
    compile_seconds: float | None = None
    cpu_seconds: float | None = None
    peak_memory_bytes: int | None = None
    artifact_bytes: int | None = None
    scratch_bytes: int | None = None
    attempts: int = 1
    log: Path | None = None
    log_tail: str = ""

    @classmethod
    def of(cls, unit: Unit, outcome: Outcome, **fields: Any) -> UnitResult:
        """The result of `unit`, its names filled in."""
        return cls(unit.shape.bucket_name, unit.shape.family, unit.key, outcome, **fields)

    def document(self) -> dict[str, Any]:
        """One of `units` in `neffbuild.run/1`. No absolute path: it is kept in stores."""
        return {
            "bucket_name": self.bucket_name,
            "family": self.family.value,
            "key": self.key,
            "outcome": self.outcome.value,
            "cause": self.cause.text if self.cause else None,
            "cause_kind": self.cause.kind.value if self.cause else None,
            "advice": self.cause.advice if self.cause else None,
            "compile_seconds": self.compile_seconds,
            "cpu_seconds": self.cpu_seconds,
            "peak_memory_bytes": self.peak_memory_bytes,
            "artifact_bytes": self.artifact_bytes,
            "scratch_bytes": self.scratch_bytes,
            "attempts": self.attempts,
        }


def stored_result(unit: Unit, outcome: Outcome, entry: Entry) -> UnitResult:
    """The result of a unit whose entry is in the store: with what its compile took if this run did it."""
    measured = entry.statistics if outcome is Outcome.BUILT else {}
    return UnitResult.of(
        unit,
        outcome,
        compile_seconds=measured.get("compile_seconds"),
        cpu_seconds=measured.get("cpu_seconds"),
        peak_memory_bytes=measured.get("peak_memory_bytes"),
        artifact_bytes=entry.artifact_bytes,
        scratch_bytes=measured.get("scratch_bytes"),
    )


@dataclass(frozen=True, slots=True)
class RunResult:
    """What became of every unit of one run, in the order the units were handed in."""

    units: tuple[UnitResult, ...]
    wall_seconds: float
    interrupted: bool = False

    @property
    def counts(self) -> dict[str, int]:
        """Units by outcome; every outcome is there."""
        found = Counter(unit.outcome for unit in self.units)
        return {outcome.value: found[outcome] for outcome in Outcome}

    def document(self) -> dict[str, Any]:
        """The `neffbuild.run/1` document."""
        return {
            "schema": RUN_SCHEMA,
            "counts": self.counts,
            "wall_seconds": self.wall_seconds,
            "interrupted": self.interrupted,
            "units": [unit.document() for unit in self.units],
        }


@dataclass(frozen=True, slots=True)
class FarmStarted:
    """Before the first unit. `workers` is the most units that will run at once; `expected_seconds` is by
    key."""

    units: int
    workers: int
    expected_seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class UnitStarted:
    """A worker has taken the unit up.

    It is expected to take `expected_seconds` and has `reserved_bytes` of memory reserved, both 0 where
    nobody expects anything. `attempt` counts from 1; `warning` says why it may well fail.
    """

    unit: Unit
    expected_seconds: float = 0.0
    reserved_bytes: int = 0
    attempt: int = 1
    warning: str | None = None


@dataclass(frozen=True, slots=True)
class UnitMemory:
    """A running unit with everything it started holds this many resident bytes now."""

    unit: Unit
    resident_bytes: int


@dataclass(frozen=True, slots=True)
class UnitDeferred:
    """The unit comes again after all others: another process of this host is compiling it, or it
    failed in a way that may pass. Not before `pause` seconds from now; `alone` when nothing of this farm
    will run beside it then."""

    unit: Unit
    reason: str
    pause: float = 0.0
    alone: bool = False


@dataclass(frozen=True, slots=True)
class UnitFinished:
    """The unit's outcome is final."""

    unit: Unit
    result: UnitResult


@dataclass(frozen=True, slots=True)
class FewerWorkers:
    """Units wait though fewer run than may: why, once for each resource that is short."""

    workers: int
    running: int
    reason: str


@dataclass(frozen=True, slots=True)
class FarmStopping:
    """No unit is started any more: the run was asked to end, or a unit failed and the rest is not worth
    it (`failed` names it). `cancelling` when running ones are ended too rather than finished."""

    cancelling: bool
    failed: str | None = None


Event = (
    FarmStarted
    | FewerWorkers
    | UnitStarted
    | UnitMemory
    | UnitDeferred
    | UnitFinished
    | FarmStopping
)


def cause_of_exception(error: BaseException) -> Cause:
    """Why a worker's code failed, from what it raised. What it was raised from is searched for what
    lies beneath: a compiler's exit status, a full disk, memory that ran out."""
    for link in _chain(error):
        if isinstance(link, MemoryError):
            return _out_of_memory(_described(link))
        if isinstance(link, OSError) and link.errno in (errno.ENOSPC, errno.EDQUOT):
            if isinstance(error, StoreError):
                return Cause(CauseKind.DISK_FULL, error.message, "make room where the cache is")
            return Cause(
                CauseKind.DISK_FULL,
                _described(link),
                "make room, or set TMPDIR to a larger disk",
            )
        if isinstance(link, subprocess.CalledProcessError):
            return _cause_of_status(link.returncode, _program(link.cmd))
        if isinstance(link, SystemExit) and link.code:
            return _cause_of_status(link.code if isinstance(link.code, int) else 1, "the compile")
        if isinstance(link, ImportError) or _is_missing_program(link):
            return Cause(CauseKind.MISSING_DEPENDENCY, _described(link), "run `neffbuild doctor`")
    if isinstance(error, NeffbuildError):
        refused = isinstance(error, ConfigError)
        stored = isinstance(error, StoreError)
        kind = CauseKind.COMPILER_ERROR
        kind = CauseKind.REFUSED if refused else CauseKind.STORE if stored else kind
        return Cause(kind, error.message, error.hint)
    return Cause(CauseKind.COMPILER_ERROR, _described(error))


def cause_of_exit(wait_status: int) -> Cause:
    """Why a worker that ended without a report failed, from its `waitpid` status."""
    return _cause_of_status(os.waitstatus_to_exitcode(wait_status), "the worker")


def timed_out(seconds: float) -> Cause:
    """The unit's own wall-clock limit was reached."""
    return Cause(
        CauseKind.TIMEOUT,
        f"not done after {seconds:g} s; ended with everything it had started",
        "raise `farm.timeout` if the compile is only slow",
    )


def over_memory(limit: int) -> Cause:
    """The unit's own memory limit, in bytes, was reached."""
    return _out_of_memory(f"used more than the {limit / 2**30:.1f} GiB of `farm.memory`")


def over_host_memory(resident: int, reserved: int, available: int) -> Cause:
    """Ended because the host was running out of memory; all in bytes."""
    return _out_of_memory(
        f"ended at {resident / 2**30:.1f} GiB, {reserved / 2**30:.1f} GiB of which were reserved for it: "
        f"the host had only {available / 2**30:.2f} GiB of memory left"
    )


def lost_worker(detail: str) -> Cause:
    """Whoever watched over the unit is gone."""
    return Cause(CauseKind.LOST_WORKER, detail, "run `compile` again")


NOT_STARTED = Cause(
    CauseKind.CANCELLED, "not started: another unit failed first", "run `compile` again"
)
CANCELLED = Cause(CauseKind.CANCELLED, "the run was interrupted", "run `compile` again")


def _cause_of_status(code: int, what: str) -> Cause:
    # A shell reports a child that died of signal n as 128 + n.
    number = -code if code < 0 else code - 128 if code > 128 else 0
    if number == signal.SIGKILL:
        return _out_of_memory(f"{what} was killed by signal 9 (SIGKILL), probably out of memory")
    if number:
        return Cause(CauseKind.SIGNAL, f"{what} was killed by signal {number}{_name(number)}")
    if code == 0:
        return Cause(CauseKind.COMPILER_ERROR, f"{what} ended without leaving an artifact")
    return Cause(CauseKind.COMPILER_ERROR, f"{what} ended with exit code {code}")


def _out_of_memory(text: str) -> Cause:
    return Cause(
        CauseKind.OUT_OF_MEMORY,
        text,
        "use fewer workers (`--workers`), or a machine with more memory",
    )


def _name(number: int) -> str:
    try:
        return f" ({signal.Signals(number).name})"
    except ValueError:
        return ""


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        # Only what was named as the cause: the context of an exception may be a cache miss it was
        # raised while handling.
        link = link.__cause__


def _is_missing_program(error: BaseException) -> bool:
    # A program looked up on PATH; a path that does not exist says nothing about what is installed.
    name = error.filename if isinstance(error, FileNotFoundError) else None
    return isinstance(name, str) and os.sep not in name


def _described(error: BaseException) -> str:
    text = " ".join(str(error).split())
    text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 1]}…"


def _program(command: Any) -> str:
    words = command.split() if isinstance(command, str) else list(command)
    return Path(str(words[0])).name if words else "the compiler"
