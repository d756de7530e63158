"""What earlier runs measured, and what this one may expect from it.

Run records in the store say what each unit took. Beside the fields of `neffbuild.run/1` they hold the
unit's shape and what makes units kin, so that they say something about units with other keys too: other
shapes of the grid, the same shape under another version of the toolchain.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from neffbuild.cache.records import read_runs
from neffbuild.cache.store import Store
from neffbuild.farm.expectations import Sample, expected_seconds, kin
from neffbuild.farm.outcomes import CauseKind, Outcome, RunResult
from neffbuild.grid.shapes import Shape, shape_from_document
from neffbuild.toolchain.base import Expectation, Unit

REMEMBERED_RUNS = 20
MEMORY_MARGIN = 1.2
"""What is reserved over a measured or scaled peak: compilers allocate a little differently each time."""
GROWTH_AFTER_OOM = 2.0
"""What is expected of a unit that ran out of memory, over the peak it had then."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Measured:
    """What a unit took in an earlier run. `kin` and `shape` are None where its record does not say."""

    key: str
    kin: str | None
    shape: Shape | None
    seconds: float | None
    memory: float | None
    scratch: float | None


def record_document(result: RunResult, units: Iterable[Unit]) -> dict[str, Any]:
    """The record of a run of `units`: its `neffbuild.run/1` document, with each unit's shape and kin."""
    by_key = {unit.key: unit for unit in units}
    document = result.document()
    for recorded in document["units"]:
        unit = by_key[recorded["key"]]
        recorded["shape"] = unit.shape.document()
        recorded["kin"] = kin(unit)
    return document


def read_measured(store: Store) -> dict[str, Measured]:
    """By key, what the newest of the last runs says that measured the unit."""
    found: dict[str, Measured] = {}
    for run, document in islice(read_runs(store), REMEMBERED_RUNS):
        try:
            for unit in map(_measured, document.get("units", ())):
                if unit is not None:
                    found.setdefault(unit.key, unit)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            _log.warning("ignoring the run record %s in %s: %r", run, store.url, error)
    return found


def expectations(
    units: Sequence[Unit],
    measured: Mapping[str, Measured],
    prior: Callable[[Shape], Expectation],
) -> dict[str, Expectation]:
    """By key, what each unit of one serve config is expected to take; memory with its margin."""
    wanted = {unit.key for unit in units}
    families = {kin(unit) for unit in units}
    related = [one for one in measured.values() if one.key not in wanted and one.kin in families]

    def expected(figure: str, prior_figure: Callable[[Shape], float]) -> dict[str, float]:
        own = {
            key: value
            for key, one in measured.items()
            if (value := getattr(one, figure)) is not None
        }
        neighbours = [
            Sample(one.shape, value)
            for one in related
            if one.shape is not None and (value := getattr(one, figure)) is not None
        ]
        return expected_seconds(units, own, prior_figure, neighbours)

    seconds = expected("seconds", lambda shape: prior(shape).seconds)
    memory = expected("memory", lambda shape: float(prior(shape).memory_bytes))
    scratch = expected("scratch", lambda shape: float(prior(shape).scratch_bytes))
    return {
        unit.key: Expectation(
            seconds[unit.key], round(memory[unit.key] * MEMORY_MARGIN), round(scratch[unit.key])
        )
        for unit in units
    }


def _measured(unit: Mapping[str, Any]) -> Measured | None:
    """What a record of a unit says, or None where nothing was measured."""
    peak, shape = unit.get("peak_memory_bytes"), unit.get("shape")
    seconds = memory = scratch = None
    if unit["outcome"] == Outcome.BUILT and unit.get("compile_seconds"):
        seconds, memory, scratch = unit["compile_seconds"], peak, unit.get("scratch_bytes")
    elif unit.get("cause_kind") == CauseKind.OUT_OF_MEMORY and peak:
        memory = peak * GROWTH_AFTER_OOM
    if not (seconds or memory):
        return None
    return Measured(
        key=str(unit["key"]),
        kin=unit.get("kin"),
        shape=shape_from_document(shape) if shape else None,
        seconds=_positive(seconds),
        memory=_positive(memory),
        scratch=_positive(scratch),
    )


def _positive(figure: Any) -> float | None:
    return float(figure) if figure else None
