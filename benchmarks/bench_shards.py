"""Static shards against the schedule that talks: how much longer do they take?

Simulated makespans, in parts of what the farm's own schedule (longest first, one queue for all machines)
takes with as many workers: shards as `--shard I/N` cuts them, contiguous pieces of the plan, every n-th
unit, and one queue in the order of the plan. Each machine works its part off longest first. First the
measured times of a 27-unit EAGLE3 grid, by what can be known of them before; then simulated units whose
times were expected exactly, and up to 30 % wrong.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise, product
from statistics import median

from bench_schedule import DISTRIBUTIONS, WRONG, grid_expectations, makespan, measured_grid, off

from neffbuild.farm.shards import Shard, shard_members

_Times = Sequence[float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10)
    seeds = parser.parse_args().seeds
    print(f"{'':42} " + " ".join(f"{name:>15}" for name in WAYS))
    shapes, times = measured_grid()
    for name, expected in grid_expectations(shapes, times).items():
        # Shards know no measurements: only what follows from the shapes.
        if name.startswith("known"):
            continue
        for machines in (2, 3, 8):
            print_ratios(
                f"27 measured, {name}: {machines} × 1", [ratios(times, expected, machines, 1)]
            )
    for wrong, (name, one), units, machines, workers in product(
        (False, True), DISTRIBUTIONS.items(), (144, 1000), (8, 64), (1, 8)
    ):
        found = []
        for seed in range(seeds):
            source = random.Random(seed)
            drawn = [one(source) for _ in range(units)]
            expected = off(drawn, source) if wrong else drawn
            found.append(ratios(drawn, expected, machines, workers))
        off_by = f", {WRONG:.0%} wrong" if wrong else ""
        print_ratios(f"{units} {name}{off_by}: {machines} × {workers}", found)


def ratios(times: _Times, expected: _Times, machines: int, workers: int) -> list[float]:
    """What each way takes on `machines` with `workers` each, in parts of one queue, longest first."""
    best = makespan(times, expected, machines * workers)
    return [way(times, expected, machines, workers) / best for way in WAYS.values()]


def static(
    split: Callable[[_Times, int], Iterable[Sequence[int]]],
) -> Callable[[_Times, _Times, int, int], float]:
    """The makespan of machines that each work a part off, none of them helping another."""

    def span(times: _Times, expected: _Times, machines: int, workers: int) -> float:
        return max(
            makespan([times[n] for n in part], [expected[n] for n in part], workers)
            for part in split(expected, machines)
        )

    return span


def shards(expected: _Times, machines: int) -> list[list[int]]:
    return [shard_members(expected, Shard(number, machines)) for number in range(1, machines + 1)]


def contiguous(expected: _Times, machines: int) -> list[range]:
    ends = [len(expected) * number // machines for number in range(machines + 1)]
    return [range(*pair) for pair in pairwise(ends)]


def every_nth(expected: _Times, machines: int) -> list[range]:
    return [range(number, len(expected), machines) for number in range(machines)]


def plan_order(times: _Times, expected: _Times, machines: int, workers: int) -> float:
    return makespan(times, [0.0] * len(times), machines * workers)


def print_ratios(what: str, found: Sequence[list[float]]) -> None:
    cells = [f"{median(column):.3f} ({max(column):.3f})" for column in zip(*found, strict=True)]
    print(f"{what:42} " + " ".join(f"{cell:>15}" for cell in cells))


WAYS: dict[str, Callable[[_Times, _Times, int, int], float]] = {
    "shards": static(shards),
    "contiguous": static(contiguous),
    "every n-th": static(every_nth),
    "plan order": plan_order,
}


if __name__ == "__main__":
    main()
