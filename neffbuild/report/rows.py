"""One row per unit: what compiling it cost and what became of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from neffbuild.cache.entry import Entry
from neffbuild.cache.plan import PlannedUnit, Status
from neffbuild.cache.records import Failure


@dataclass(frozen=True, slots=True)
class UnitRow:
    """`units[]` of `neffbuild.run/1`. Seconds and bytes; None where nothing was measured."""

    bucket_name: str
    family: str
    key: str | None
    outcome: str
    compile_seconds: float | None = None
    peak_memory_bytes: int | None = None
    artifact_bytes: int | None = None
    cause: str | None = None
    cause_kind: str | None = None


def stored_rows(
    units: Iterable[PlannedUnit], entries: Mapping[str, Entry], failures: Mapping[str, Failure]
) -> list[UnitRow]:
    """Rows of a plan from what the store holds: cached units with the figures of their compile, the
    rest as `failed` where a last failure is recorded, else as `skipped`."""
    return [
        _stored_row(unit, entries.get(unit.key or ""), failures.get(unit.key or ""))
        for unit in units
        if unit.status is not Status.CANNOT_OCCUR
    ]


def run_document(rows: Sequence[UnitRow], wall_seconds: float) -> dict[str, Any]:
    """The `neffbuild.run/1` document."""
    outcomes = Counter(row.outcome for row in rows)
    return {
        "schema": "neffbuild.run/1",
        "counts": {name: outcomes[name] for name in ("built", "cached", "failed")},
        "wall_seconds": round(wall_seconds, 3),
        "units": [asdict(row) for row in rows],
    }


def _stored_row(unit: PlannedUnit, entry: Entry | None, failure: Failure | None) -> UnitRow:
    family = unit.shape.family.value
    if entry is None:
        outcome = "failed" if failure else "skipped"
        cause = failure.message if failure else unit.reason or "not compiled yet"
        kind = failure.cause if failure else None
        return UnitRow(unit.bucket_name, family, unit.key, outcome, cause=cause, cause_kind=kind)
    return UnitRow(
        unit.bucket_name,
        family,
        unit.key,
        "cached",
        compile_seconds=entry.statistics.get("compile_seconds"),
        peak_memory_bytes=entry.statistics.get("peak_memory_bytes"),
        artifact_bytes=entry.artifact_bytes,
    )
