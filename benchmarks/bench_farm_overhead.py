"""What the farm itself costs each unit: compiles of fixed length, and the time that is not theirs.

The toolchain is the one of the farm's tests; each compile sleeps. Reported is, by unit, the time from the
end of the first to the end of the last that was not compiled in, and the CPU time of all processes; then
how long a farm takes until its first unit is done beside that unit's compile (the server is started that
workers are forked from) and after its last. The same for a second farm that finds nothing but hits.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

sys.path.append(str(Path(__file__).parents[1] / "tests/farm"))
import farmtools

from neffbuild.farm.host import LinuxHost
from neffbuild.farm.outcomes import Event, UnitFinished


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--units", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=0.2, help="of each compile")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, LinuxHost().cpus])
    chosen = parser.parse_args()
    print(f"{chosen.units} units of {chosen.seconds} s, load {os.getloadavg()[0]:.1f}")
    for workers in dict.fromkeys(chosen.workers):
        rounds = [measured(chosen.units, chosen.seconds, workers) for _ in range(chosen.rounds)]
        each, cpu, before, after, hit = (median(found) for found in zip(*rounds, strict=True))
        print(
            f"{workers} workers: {each * 1000:.0f} ms for each unit ({cpu * 1000:.0f} ms of CPU), "
            f"{before:.2f} s before the first, {after:.2f} s after the last; "
            f"{hit * 1000:.0f} ms for each that is a hit"
        )


def measured(units: int, seconds: float, workers: int) -> tuple[float, float, float, float, float]:
    """Seconds of overhead: for each unit, by the wall clock and of CPU; before the first, after the
    last; for each hit."""
    with tempfile.TemporaryDirectory(prefix="neffbuild-bench-") as folder:
        place = Path(folder)
        farmtools.order(place, seconds=seconds)
        began, used = time.monotonic(), _cpu_seconds()
        first, last = _run(place, units, workers)
        ended, cpu = time.monotonic(), _cpu_seconds() - used
        hits = _run(place, units, workers)
        rounds = (units - workers) / workers  # each worker's, after its first unit
        return (
            (last - first) / rounds - seconds,
            cpu / units,
            first - began - seconds,
            ended - last,
            (hits[1] - hits[0]) / rounds,
        )


def _run(place: Path, units: int, workers: int) -> tuple[float, float]:
    """Run a farm: when its first unit ended and when its last."""
    ends: list[float] = []

    def on_event(event: Event) -> None:
        if isinstance(event, UnitFinished):
            ends.append(time.monotonic())

    result = farmtools.run(place, units, workers=workers, on_event=on_event)
    assert result.counts["failed"] == 0
    return ends[0], ends[-1]


def _cpu_seconds() -> float:
    """Of this process and of all it has started that ended."""
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(used.ru_utime + used.ru_stime for used in both)


if __name__ == "__main__":
    main()
