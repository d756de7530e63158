"""Which waiting unit may start now: pure rules of cores, memory, scratch space and the host's device.

Longest expected first. Where the first does not fit, a smaller one may start before it if by all
expectation that does not keep the first waiting (EASY backfilling: D. Lifka, "The ANL/IBM SP Scheduling
System", 1995). Expectations may be wrong, so only so many may pass it; then nothing starts until it does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Self

MOST_PASSES = 16
"""Units that may start before one that does not fit yet. While it lacks a device others do not count: what
they take does not keep the device from it, and another farm may have that for hours."""


@dataclass(frozen=True, slots=True)
class Resources:
    """What units need and hosts have: CPU cores, bytes of memory, bytes of scratch space, and devices: a
    host has one, all of it, for one unit at a time."""

    cpus: int = 0
    memory: int = 0
    scratch: int = 0
    devices: int = 0

    def __add__(self, other: Self) -> Resources:
        return Resources(
            self.cpus + other.cpus,
            self.memory + other.memory,
            self.scratch + other.scratch,
            self.devices + other.devices,
        )

    def __sub__(self, other: Self) -> Resources:
        return Resources(
            self.cpus - other.cpus,
            self.memory - other.memory,
            self.scratch - other.scratch,
            self.devices - other.devices,
        )

    def shortage(self, free: Resources) -> str | None:
        """The first resource of which this needs more than `free` has; None when it fits."""
        for name in ("cpus", "memory", "scratch", "devices"):
            if getattr(self, name) > getattr(free, name):
                return name
        return None

    def lacks_device(self, free: Resources) -> bool:
        """Whether this needs a device that `free` does not have: no other room helps it until then."""
        return self.devices > free.devices


@dataclass(frozen=True, slots=True)
class Claim:
    """What a unit reserves, and for how many seconds it is expected to."""

    needs: Resources
    seconds: float


@dataclass(frozen=True, slots=True)
class Admitted:
    """The unit at `place` of those that are due may start; it has `needs` reserved. `warning` says why it
    may well fail."""

    place: int
    needs: Resources = Resources()
    warning: str | None = None


@dataclass(frozen=True, slots=True)
class Held:
    """No unit may start though there is a worker for one: `short` names what is short, `reason` says it
    to a person."""

    short: str
    reason: str


def choose(
    waiting: Sequence[Claim], free: Resources, running: Sequence[Claim], passes: int
) -> int | None:
    """The place in `waiting` of the unit to start, or None for none of them yet.

    `running` are units that will give back what they hold, with the seconds they are expected to run on;
    `passes` says how many have started before the first of `waiting` since it came to be the first.
    """
    if not waiting:
        return None
    first = waiting[0]
    if first.needs.shortage(free) is None:
        return 0
    if passes >= MOST_PASSES and not first.needs.lacks_device(free):
        return None
    start, spare = _start_of(first, free, running)
    for place, claim in enumerate(waiting[1:], start=1):
        if claim.needs.shortage(free) is not None:
            continue
        if claim.seconds <= start or claim.needs.shortage(spare) is None:
            return place
    return None


def _start_of(first: Claim, free: Resources, running: Sequence[Claim]) -> tuple[float, Resources]:
    """In how many seconds the first can start if nothing is put before it, and what is free beside it
    from then on. Where it needs room that others than `running` hold, nobody knows: never."""
    for claim in sorted(running, key=lambda claim: claim.seconds):
        free += claim.needs
        if first.needs.shortage(free) is None:
            return claim.seconds, free - first.needs
    return inf, Resources()


@dataclass(frozen=True, slots=True)
class Holding:
    """A unit that runs on this host, of whichever farm: what it has reserved, the resident bytes it had
    when last looked at, and whether it is being ended to free memory."""

    name: str
    needs: Resources
    resident: int = 0
    ending: bool = False

    @property
    def growth(self) -> int:
        """Bytes it may still take of what it has reserved."""
        return max(0, self.needs.memory - self.resident)


def free_resources(
    budget: Resources, holdings: Sequence[Holding], available_memory: int, free_scratch: int
) -> Resources:
    """What is left for one more unit on a host where `holdings` run.

    Memory is bounded twice: by what is not reserved of the budget, and by what is available right now
    beside what the running units may still grow into, which other programs may have made less. Of the
    scratch space that is free, `budget.scratch` at most is given out.
    """
    held = sum((holding.needs for holding in holdings), Resources())
    growth = sum(holding.growth for holding in holdings)
    left = budget - held
    return Resources(
        left.cpus,
        min(left.memory, available_memory - growth),
        min(budget.scratch, free_scratch) - held.scratch,
        left.devices,
    )


def must_yield(starved_since: float | None, others: Iterable[float | None]) -> bool:
    """Whether a farm leaves what is free to another one of the host: to one that has no unit running and
    waits, so that each gets at least one at a time, the one that has waited longest first.

    `others` are since when those do, None for one that does not; `starved_since` since when this one does,
    None while it runs units.
    """
    return any(
        since is not None and (starved_since is None or since < starved_since) for since in others
    )


def memory_floor(total: int) -> int:
    """Available bytes under which a host is about to run out of memory: 4 % of it, 1 GiB at most."""
    return min(total // 25, 1 << 30)


def to_be_ended(
    holdings: Sequence[Holding], available_memory: int, total_memory: int
) -> Holding | None:
    """The unit to end before the kernel picks something else: where available memory is under the
    floor, the one that is most above what it has reserved. Where none is, so that others than compiles
    have taken the memory, the one that is least below, and only under a quarter of the floor. None while
    another is still being ended."""
    if not holdings or any(holding.ending for holding in holdings):
        return None
    worst = max(holdings, key=lambda holding: holding.resident - holding.needs.memory)
    floor = memory_floor(total_memory)
    if worst.resident <= worst.needs.memory:
        floor //= 4
    return worst if available_memory < floor else None
