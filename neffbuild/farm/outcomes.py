"""What became of each unit, why, and what to do about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from neffbuild.cache.entry import Entry
from neffbuild.grid.shapes import Family
from neffbuild.toolchain.base import Unit

RUN_SCHEMA = "neffbuild.run/1"


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
        return cls(unit.bucket_name, unit.shape.family, unit.key, outcome, **fields)

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
    """Units wait though fewer are `running` than the `workers` that were asked for: why, once for each
    resource that is short."""

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


def lost_worker(detail: str) -> Cause:
    """Whoever watched over the unit is gone."""
    return Cause(CauseKind.LOST_WORKER, detail, "run `compile` again")


NOT_STARTED = Cause(
    CauseKind.CANCELLED, "not started: another unit failed first", "run `compile` again"
)
CANCELLED = Cause(CauseKind.CANCELLED, "the run was interrupted", "run `compile` again")
