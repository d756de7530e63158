"""How close the farm's schedule comes to the best there can be, beside cruder ways to share units out.

First the measured times of a 27-unit EAGLE3 grid on 2 workers, against the best schedule of those times:
with the times known exactly, from half the grid, from the toolchain's prior alone, and 30 % wrong. Then
simulated grids, against max(longest unit, total / workers), below which no schedule can go. Then units
that differ in memory on one host. The simulation starts units by the farm's own rules.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from neffbuild.config.load import load_config
from neffbuild.farm.admission import MOST_PASSES, Claim, Resources, choose
from neffbuild.farm.expectations import Sample, scaled_from, work
from neffbuild.grid.shapes import DecodeShape, Family, Shape
from neffbuild.toolchain.inductor.prior import inductor_prior

MEASURED = Path(__file__).parent / "measured" / "eagle3-27-units.json"
GRID_CONFIG = Path(__file__).parents[1] / "configs/quickstart-eagle3.yaml"
WRONG = 0.3

_Times = Sequence[float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10)
    seeds = parser.parse_args().seeds
    _measured_grid(seeds)
    _simulated_grids(seeds)
    _units_of_different_memory(seeds)


def _measured_grid(seeds: int) -> None:
    shapes, times = measured_grid()
    best = best_of_two(times)
    document = json.loads(MEASURED.read_text())
    own = sum(unit["compile_seconds"] for unit in document["units"]) / 2
    print(f"27 measured units on 2 workers; the best schedule takes {best:.1f} s")
    for name, expected in grid_expectations(shapes, times).items():
        print(f"  longest first, times {name:24} {makespan(times, expected, 2) / best:.3f}")
    wrong = [makespan(times, off(times, random.Random(seed)), 2) / best for seed in range(seeds)]
    print(f"  longest first, times {WRONG:.0%} wrong {'':13} {_spread(wrong)}")
    for name, way in CRUDER.items():
        print(f"  {name:44} {way(times, 2) / best:.3f}")
    print(
        f"  the run they were measured in, by the wall clock of a shared machine: "
        f"{document['wall_seconds'] / own:.3f} of half of its own units' times"
    )


def _simulated_grids(seeds: int) -> None:
    names = ["exact", "of reachable", f"{WRONG:.0%} wrong", *CRUDER]
    print(
        "\nsimulated units, in parts of max(longest, total / workers): median (worst); `of reachable` is "
        "the exact schedule\nin parts of a bound that counts too that whole units have to share workers"
    )
    print(f"{'times':12}{'units':>6}{'workers':>8} " + " ".join(f"{name:>15}" for name in names))
    for (name, one), units, workers in (
        (case, units, workers)
        for case in DISTRIBUTIONS.items()
        for units in (144, 1000)
        for workers in (8, 64, 512)
    ):
        columns: list[list[float]] = [[] for _ in names]
        for seed in range(seeds):
            source = random.Random(seed)
            times = [one(source) for _ in range(units)]
            bound = max(max(times), sum(times) / workers)
            exact = makespan(times, times, workers)
            spans = [
                exact,
                exact * bound / reachable(times, workers),
                makespan(times, off(times, source), workers),
                *(way(times, workers) for way in CRUDER.values()),
            ]
            for column, span in zip(columns, spans, strict=True):
                column.append(span / bound)
        print(f"{name:12}{units:6}{workers:8} " + " ".join(f"{_spread(c):>15}" for c in columns))


def _units_of_different_memory(seeds: int) -> None:
    """A few units need most of the host's memory: what starting smaller ones before them is worth."""
    print("\n144 units of 10 to 170 GiB on a host of 16 cores and 230 GiB: median (worst)")
    ratios: dict[str, list[float]] = {"longest first with backfill": [], "without backfill": []}
    for seed in range(seeds):
        source = random.Random(seed)
        times = [source.lognormvariate(6, 1) for _ in range(144)]
        memory = [round(min(170, 10 * source.paretovariate(1))) for _ in times]
        host = Resources(cpus=16, memory=230)
        area = sum(size * each for size, each in zip(memory, times, strict=True)) / host.memory
        bound = max(max(times), sum(times) / host.cpus, area)
        claims = [Claim(Resources(1, size), each) for size, each in zip(memory, times, strict=True)]
        for name, passes in zip(ratios, (0, MOST_PASSES), strict=True):
            ratios[name].append(simulated(claims, times, host, passes) / bound)
    for name, found in ratios.items():
        print(f"  {name:28} {_spread(found)} of what memory, cores and the longest unit allow")


def measured_grid() -> tuple[list[DecodeShape], list[float]]:
    """The shapes of the measured grid, and what each took in seconds."""
    units = json.loads(MEASURED.read_text())["units"]
    shapes = []
    for unit in units:
        rows, query, context = (
            int(part.lstrip("bsctx")) for part in unit["bucket_name"].split("_")[1:]
        )
        shapes.append(DecodeShape(Family(unit["family"]), rows, query, context))
    return shapes, [unit["seconds"] for unit in units]


def grid_expectations(shapes: Sequence[DecodeShape], times: _Times) -> dict[str, list[float]]:
    """What may be known of a grid before it is compiled: ways → expected seconds in its order."""

    config = load_config(GRID_CONFIG)

    def prior(shape: Shape) -> float:
        return inductor_prior(config, shape).seconds

    half = list(zip(shapes, times, strict=True))[::2]
    scale = scaled_from([Sample(shape, each) for shape, each in half], prior)
    known = dict(half)
    return {
        "known": list(times),
        "known for half the grid": [known.get(shape, scale(shape)) for shape in shapes],
        "by the prior alone": [prior(shape) for shape in shapes],
        "growing with their work": [float(work(shape)) for shape in shapes],
    }


def makespan(times: _Times, expected: _Times, workers: int) -> float:
    """Seconds until the last of the units is done, longest expected first, one core each."""
    order = sorted(range(len(times)), key=lambda place: -expected[place])
    claims = [Claim(Resources(cpus=1), expected[place]) for place in order]
    return simulated(claims, [times[place] for place in order], Resources(cpus=workers), 0)


def simulated(claims: Sequence[Claim], times: _Times, host: Resources, passes_before: int) -> float:
    """Seconds until the last of the units is done that `host` starts as the farm would; `passes_before`
    counts as starts that have passed each first unit already."""
    waiting = list(range(len(claims)))
    running: list[tuple[float, int]] = []
    now, passes, free = 0.0, passes_before, host
    while waiting or running:
        first = waiting[:1]
        # The first fits as long as a core is free where units need nothing else: no need to look on.
        due = waiting if host.memory else first
        ahead = (
            [Claim(claims[number].needs, end - now) for end, number in running]
            if host.memory
            else []
        )
        place = choose([claims[number] for number in due], free, ahead, passes)
        if place is None:
            now, number = heapq.heappop(running)
            free += claims[number].needs
            continue
        number = waiting.pop(place)
        passes = passes + 1 if place else passes_before
        free -= claims[number].needs
        heapq.heappush(running, (now + times[number], number))
    return now


def best_of_two(times: _Times) -> float:
    """Seconds of the best schedule on 2 workers, to a hundredth: all sums that one of them can have."""
    hundredths = [round(each * 100) for each in times]
    sums = 1
    for each in hundredths:
        sums |= sums << each
    half = (sum(hundredths) + 1) // 2
    while not sums >> half & 1:
        half += 1
    return half / 100


def reachable(times: _Times, workers: int) -> float:
    """A higher bound: of the k * workers + 1 longest units, k + 1 share a worker."""
    longest = sorted(times, reverse=True)
    shared = [
        sum(longest[k * workers - k : k * workers + 1])
        for k in range(1, (len(times) - 1) // workers + 1)
    ]
    return max(longest[0], sum(times) / workers, *shared)


def off(times: _Times, source: random.Random) -> list[float]:
    """Expectations that are wrong by up to `WRONG`, either way."""
    return [each * source.uniform(1 - WRONG, 1 + WRONG) for each in times]


def in_contiguous_parts(times: _Times, workers: int) -> float:
    size = -(-len(times) // workers)
    return max(sum(times[start : start + size]) for start in range(0, len(times), size))


def round_robin(times: _Times, workers: int) -> float:
    return max(sum(times[start::workers]) for start in range(workers))


def in_order_of_arrival(times: _Times, workers: int) -> float:
    return makespan(times, [0.0] * len(times), workers)


def _bimodal(source: random.Random) -> float:
    return source.uniform(60, 180) if source.random() < 0.8 else source.uniform(1800, 3600)


def _spread(found: Sequence[float]) -> str:
    return f"{median(found):.3f} ({max(found):.3f})"


CRUDER: dict[str, Callable[[_Times, int], float]] = {
    "contiguous": in_contiguous_parts,
    "round-robin": round_robin,
    "arrival order": in_order_of_arrival,
}
DISTRIBUTIONS: dict[str, Callable[[random.Random], float]] = {
    "log-normal": lambda source: source.lognormvariate(6, 1),
    "Pareto": lambda source: 60 * source.paretovariate(1.5),
    "bimodal": _bimodal,
    # Hardly any spread around either length: what is left over at the end is whole long units.
    "two lengths": lambda source: source.gauss(30, 3) if source.random() < 0.9 else 3600.0,
}


if __name__ == "__main__":
    main()
