"""How close the schedule comes to the best there can be: with measured times, and in simulation."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import bench_schedule as bench


def test_the_measured_grid_is_within_a_tenth_of_the_best_schedule_of_its_times() -> None:
    shapes, times = bench.measured_grid()
    assert len(times) == 27
    best = bench.best_of_two(times)
    for what, expected in bench.grid_expectations(shapes, times).items():
        assert best <= bench.makespan(times, expected, 2) <= 1.1 * best, what


def test_the_best_of_two_is_found() -> None:
    # 7 and 4, 6 and 5.
    assert bench.best_of_two([7, 6, 5, 4]) == 11
    assert bench.best_of_two([9, 1, 1]) == 9


@pytest.mark.parametrize("name", ["log-normal", "Pareto", "bimodal"])
@pytest.mark.parametrize("workers", [8, 64, 512])
@pytest.mark.parametrize("units", [144, 1000])
def test_with_exact_expectations_no_schedule_is_more_than_a_twentieth_shorter(
    name: str, workers: int, units: int
) -> None:
    for seed in range(3):
        source = random.Random(seed)
        times = [bench.DISTRIBUTIONS[name](source) for _ in range(units)]
        bound = max(max(times), sum(times) / workers)
        assert bound <= bench.makespan(times, times, workers) * 1.000001 <= 1.05 * bound
