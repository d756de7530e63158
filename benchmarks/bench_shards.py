"""Static shards against the schedule that talks: how much longer do they take?

Simulated makespans, in parts of what the farm's own schedule (longest first, one queue for all machines)
takes on as many workers: shards as `--shard I/N` cuts them, contiguous pieces of the plan, every n-th
unit, and one queue in the order of the plan. Shards work their units off longest first. Times are those
that were expected, then up to 30 % off them.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections.abc import Callable, Sequence
from itertools import product
from statistics import median

from neffbuild.farm.expectations import work
from neffbuild.farm.shards import Shard, shard_members
from neffbuild.grid.shapes import DecodeShape, Family

_Times = list[float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 8], help="of one machine")
    arguments = parser.parse_args()
    header = f"{'units':24} {'machines':>8} {'workers':>7}" + "".join(
        f" {name:>16}" for name in ("shards", "contiguous", "every n-th", "plan order")
    )
    for wrong in (0.0, 0.3):
        print(
            f"\nexpectations off by up to {wrong:.0%}: median (worst) of what longest first takes"
        )
        print(header)
        for (name, draw), machines in product(CASES.items(), (2, 8, 64)):
            for workers in arguments.workers:
                ratios = [
                    compared(draw(random.Random(seed)), machines, workers, wrong, seed)
                    for seed in range(arguments.seeds)
                ]
                cells = [
                    f"{median(column):9.3f} ({max(column):.2f})"
                    for column in zip(*ratios, strict=True)
                ]
                print(f"{name:24} {machines:8} {workers:7} " + " ".join(cells))


def compared(
    expected: _Times, machines: int, workers: int, wrong: float, seed: int
) -> tuple[float, ...]:
    """Makespans of the four ways, each divided by that of one queue, longest first."""
    noise = random.Random(seed)
    actual = [each * noise.uniform(1 - wrong, 1 + wrong) for each in expected]
    places = range(len(expected))

    def worked_off(part: Sequence[int], on: int) -> float:
        return makespan([actual[place] for place in longest_first(part, expected)], on)

    splits = (
        [shard_members(expected, Shard(number, machines)) for number in range(1, machines + 1)],
        [
            places[len(places) * number // machines : len(places) * (number + 1) // machines]
            for number in range(machines)
        ],
        [places[number::machines] for number in range(machines)],
    )
    best = worked_off(places, machines * workers)
    static = [max(worked_off(part, workers) for part in parts) for parts in splits]
    return tuple(each / best for each in (*static, makespan(actual, machines * workers)))


def longest_first(part: Sequence[int], expected: _Times) -> list[int]:
    return sorted(part, key=lambda place: -expected[place])


def makespan(times: Sequence[float], workers: int) -> float:
    """When the last of `workers` is done that take units in this order as they come free."""
    free = [0.0] * workers
    for each in times:
        heapq.heapreplace(free, free[0] + each)
    return max(free)


def grid(rows: int, contexts: int) -> _Times:
    """An EAGLE3 grid of `3 × rows × contexts` units, as a toolchain without a prior expects it."""
    return [
        work(DecodeShape(family, 1 << row, query_len, 1024 << context)) ** 0.5
        for family, query_len in (
            (Family.TARGET_WITH_SPEC, 6),
            (Family.TARGET_WITHOUT_SPEC, 1),
            (Family.DRAFT, 6),
        )
        for row, context in product(range(rows), range(contexts))
    ]


def drawn(count: int, one: Callable[[random.Random], float]) -> Callable[[random.Random], _Times]:
    return lambda source: [one(source) for _ in range(count)]


def bimodal(source: random.Random) -> float:
    return source.uniform(60, 180) if source.random() < 0.8 else source.uniform(1800, 3600)


CASES: dict[str, Callable[[random.Random], _Times]] = {
    "EAGLE3 grid, 27": lambda _: grid(3, 3),
    "EAGLE3 grid, 144": lambda _: grid(8, 6),
    **{
        f"{name}, {count}": drawn(count, one)
        for count in (144, 1000)
        for name, one in (
            ("log-normal", lambda source: source.lognormvariate(6, 1)),
            ("Pareto", lambda source: 60 * source.paretovariate(1.5)),
            ("bimodal", bimodal),
        )
    },
}


if __name__ == "__main__":
    main()
