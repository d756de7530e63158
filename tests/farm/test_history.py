"""What run records say about units, those with other keys among them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import farmtools
import pytest

from neffbuild.cache.directory import DirectoryStore
from neffbuild.cache.records import append_run
from neffbuild.farm.history import expectations, read_measured, record_document
from neffbuild.farm.outcomes import Cause, CauseKind, Outcome, RunResult, UnitResult
from neffbuild.grid.shapes import Shape
from neffbuild.toolchain.base import Expectation, Unit

MIB = 1 << 20


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "store")


@pytest.fixture
def units() -> list[Unit]:
    return farmtools.make_units(Path("/nowhere"), 3)


def prior(shape: Shape) -> Expectation:
    return Expectation(seconds=10.0, memory_bytes=100 * MIB, scratch_bytes=7 * MIB)


def record(store: DirectoryStore, unit: Unit, outcome: Outcome, **fields: Any) -> None:
    result = RunResult((UnitResult.of(unit, outcome, **fields),), 1.0)
    append_run(store, record_document(result, [unit]))


def expected(store: DirectoryStore, units: list[Unit]) -> list[Expectation]:
    found = expectations(units, read_measured(store), prior)
    return [found[unit.key] for unit in units]


def test_without_records_the_prior_holds_with_a_margin_for_memory(
    store: DirectoryStore, units: list[Unit]
) -> None:
    assert expected(store, units) == [Expectation(10.0, 120 * MIB, 7 * MIB)] * 3


def test_what_was_measured_counts_for_the_unit_and_for_its_neighbours(
    store: DirectoryStore, units: list[Unit]
) -> None:
    figures = {"compile_seconds": 40.0, "peak_memory_bytes": 50 * MIB, "scratch_bytes": 14 * MIB}
    record(store, units[0], Outcome.BUILT, **figures)
    # It is not compiled now, as it was built then.
    assert expected(store, units[1:]) == [Expectation(40.0, 60 * MIB, 14 * MIB)] * 2


def test_another_version_of_the_toolchain_is_a_neighbour_and_another_model_is_not(
    store: DirectoryStore, units: list[Unit]
) -> None:
    def newer(unit: Unit, **changed: Any) -> Unit:
        return replace(unit, key=unit.key[::-1], recipe={**unit.recipe, **changed})

    record(store, units[0], Outcome.BUILT, compile_seconds=40.0, peak_memory_bytes=MIB)
    toolchain = {**units[0].recipe["toolchain"], "versions": {"hostile": "2.0"}}
    (same,) = expected(store, [newer(units[0], toolchain=toolchain)])
    assert same.seconds == pytest.approx(40.0)
    (other,) = expected(store, [newer(units[0], model={"model_type": "larger"})])
    assert other.seconds == 10.0


def test_the_newest_record_counts(
    store: DirectoryStore, units: list[Unit], monkeypatch: pytest.MonkeyPatch
) -> None:
    for hour, seconds in ((3, 30.0), (9, 90.0), (6, 60.0)):
        stamp = f"20260101T{hour:02}0000Z"
        monkeypatch.setattr("time.strftime", lambda *_, stamp=stamp: stamp)
        record(store, units[0], Outcome.BUILT, compile_seconds=seconds)
    assert expected(store, units[:1])[0].seconds == 90.0


def test_a_unit_that_ran_out_of_memory_is_expected_to_need_twice_as_much(
    store: DirectoryStore, units: list[Unit]
) -> None:
    cause = Cause(CauseKind.OUT_OF_MEMORY, "")
    record(store, units[0], Outcome.FAILED, cause=cause, peak_memory_bytes=300 * MIB)
    found = expected(store, units[:1])[0]
    assert found.memory_bytes == 720 * MIB
    assert found.seconds == 10.0


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"units": 5},
        {"units": [{}]},
        {"units": [{"key": "k", "outcome": "built", "compile_seconds": "long"}]},
        {"units": [{"key": "k", "outcome": "built", "compile_seconds": 1, "shape": {"kind": "x"}}]},
        {"units": [{"key": "k", "outcome": "built", "compile_seconds": 1, "shape": [1]}]},
    ],
)
def test_records_of_another_make_cost_nothing(
    store: DirectoryStore, units: list[Unit], document: dict[str, Any]
) -> None:
    record(store, units[0], Outcome.BUILT, compile_seconds=40.0)
    append_run(store, document)
    assert expected(store, units[:1])[0].seconds == 40.0
    assert expected(store, units[1:2])[0].seconds == 40.0
