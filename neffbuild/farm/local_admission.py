"""Which units this host has room for, beside those of its other farms, and which must go when it has not."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from neffbuild.config.build import FarmConfig
from neffbuild.farm.admission import (
    Admitted,
    Claim,
    Held,
    Holding,
    Resources,
    choose,
    free_resources,
    memory_floor,
    must_yield,
    to_be_ended,
)
from neffbuild.farm.causes import over_host_memory
from neffbuild.farm.host import THIS_HOST, Host
from neffbuild.farm.local import LocalExecutor
from neffbuild.farm.reservations import FarmClaims, Reservations
from neffbuild.farm.schedule import Waiting

_DEVICES = 1
"""Whether there is one is for the toolchain to say. What runs on it takes every core it can see."""
_WATCH_SECONDS = 0.2
_STATE_SECONDS = 1.0
"""How often the other farms are told what units of this one hold."""


@dataclass(frozen=True, slots=True)
class _Held:
    """A running unit: what it holds, and when it is expected to end on the monotonic clock."""

    holding: Holding
    ends: float


class LocalAdmission:
    """Admits what `executor` may run in the farm's own `folder` on `host`, and ends what it may not run
    on with."""

    def __init__(
        self, host: Host, folder: Path, executor: LocalExecutor, farm: FarmConfig, units: int
    ) -> None:
        self._host = host
        self._folder = folder
        self._executor = executor
        self._reservations = Reservations(folder)
        self._cpus = host.cpus
        self._total = host.total_memory
        self._fraction = farm.memory_fraction
        self._unit_cpus = farm.cpus
        by_cpus = max(1, self._cpus // farm.cpus)
        self._is_asked = isinstance(farm.workers, int)
        self.asked = farm.workers if isinstance(farm.workers, int) else by_cpus
        self.workers = min(self.asked, by_cpus, units)
        self._is_bounded = by_cpus < min(self.asked, units)
        self._running: dict[str, _Held] = {}
        self._starved_since: float | None = None
        self._lacks_device = False
        self._is_short = False
        self._first = ""
        self._passes = 0
        self._watched = self._stated = 0.0

    @property
    def fewer(self) -> str | None:
        """Why fewer units than asked for will run at once however small they are, or None."""
        if not self._is_bounded:
            return None
        return (
            f"{self.asked} workers asked for; {self.workers} run at once: {self._host.cpus_of} has "
            f"{_counted(self._cpus, 'CPU core')}, {self._unit_cpus} for each"
        )

    def admit(self, due: Sequence[Waiting]) -> Admitted | Held | None:
        """The place in `due` of a unit that may start now; its resources are reserved. Else why none may;
        None where nothing is due, or all workers are at work."""
        if not due or len(self._running) >= self.workers:
            return None
        if len(self._running) >= self._executor.most:
            return Held("limit", f"{self._head()}{self._executor.why_no_more}")
        with self._reservations.exclusive() as others:
            if others is None:
                return Held("farms", "another farm on this host does not let go of their lock")
            decision = self._decide(due, others)
            self._state(self._claims())
        return decision

    def release(self, key: str) -> None:
        """The unit of this key has ended."""
        self._running.pop(key, None)
        self._state(FarmClaims(self._holdings()))

    def watch(self) -> None:
        """Look at the memory that running units take; end one before the host runs out of it."""
        now = time.monotonic()
        if now < self._watched + _WATCH_SECONDS:
            return
        self._watched = now
        for key, resident in self._executor.resident().items():
            if key in self._running:
                held = self._running[key]
                self._running[key] = replace(held, holding=replace(held.holding, resident=resident))
        available, was_short = self._host.available_memory(), self._is_short
        self._is_short = available < memory_floor(self._total)
        if self._is_short and was_short:
            # By now every farm has stated what its units hold.
            others = [held for farm in self._reservations.others() for held in farm.holdings]
            self._end(to_be_ended([*self._holdings(), *others], available, self._total), available)
        if self._is_short or now > self._stated + _STATE_SECONDS:
            self._state(self._claims())

    def _decide(self, due: Sequence[Waiting], others: Sequence[FarmClaims]) -> Admitted | Held:
        if self._running:
            self._starved_since = None
        elif self._starved_since is None:
            self._starved_since = time.monotonic()
        holdings = [*self._holdings(), *(h for farm in others for h in farm.holdings)]
        free_scratch = int(self._host.free_scratch(self._folder) * self._fraction)
        budget = Resources(self._cpus, int(self._total * self._fraction), free_scratch, _DEVICES)
        free = free_resources(budget, holdings, self._host.available_memory(), free_scratch)
        if must_yield(self._starved_since, (farm.device_since for farm in others)):
            free = replace(free, devices=0)
        claims = [self._claim(waiting, budget) for waiting in due]
        self._lacks_device = all(claim.needs.lacks_device(free) for claim in claims)
        if must_yield(self._starved_since, (farm.starved_since for farm in others)):
            return Held("farms", "another farm on this host waits for its first unit to find room")
        place = choose(claims, free, self._ahead(), self._passed(due[0]))
        warning = None
        if place is None:
            if holdings or claims[0].needs.lacks_device(free):
                return self._held(claims[0], free, budget, due[0])
            # Expectations may be wrong, and nothing will ever make more room than there is now.
            place, warning = 0, self._warning(claims[0], free, due[0])
        if place > 0:
            self._passes += 1
        waiting, claim = due[place], claims[place]
        holding = Holding(f"{self._folder.name}/{waiting.unit.key}", claim.needs)
        self._running[waiting.unit.key] = _Held(holding, time.monotonic() + claim.seconds)
        self._starved_since = None
        return Admitted(place, claim.needs, warning)

    def _claim(self, waiting: Waiting, budget: Resources) -> Claim:
        """What the unit reserves: everything where it is to run alone."""
        return replace(waiting.claim, needs=budget) if waiting.alone else waiting.claim

    def _ahead(self) -> list[Claim]:
        now = time.monotonic()
        return [
            Claim(held.holding.needs, max(0.0, held.ends - now)) for held in self._running.values()
        ]

    def _passed(self, first: Waiting) -> int:
        """How many units have started before the one that is now first."""
        if first.unit.key != self._first:
            self._first, self._passes = first.unit.key, 0
        return self._passes

    def _held(self, claim: Claim, free: Resources, budget: Resources, first: Waiting) -> Held:
        name, head = first.unit.bucket_name, self._head()
        short = claim.needs.shortage(free)
        if first.alone:
            return Held("alone", f"{head}{name} is tried again alone")
        if short == "cpus":
            return Held(
                "cpus",
                f"{head}all {_counted(self._cpus, 'CPU core')} of {self._host.cpus_of} are taken",
            )
        if short == "memory":
            return Held(
                "memory",
                f"{head}{name} needs {_size(claim.needs.memory)} of memory, "
                f"{_size(free.memory)} of the {_size(budget.memory)} for compiles are free"
                + self._whole_memory(),
            )
        if short == "devices":
            return Held(
                "devices",
                f"{head}{name} needs this host's device, which another unit has or is to have first",
            )
        return Held(
            "scratch",
            f"{head}{name} needs {_size(claim.needs.scratch)} of scratch space, "
            f"{_size(free.scratch)} are free",
        )

    def _whole_memory(self) -> str:
        bound = self._host.memory_of
        return "" if bound == THIS_HOST else f" ({bound} has {_size(self._total)})"

    def _head(self) -> str:
        asked = (
            f"{self.asked} workers asked for"
            if self._is_asked
            else f"cores for {self.asked} workers"
        )
        return f"{asked}; {len(self._running)} run: "

    def _warning(self, claim: Claim, free: Resources, first: Waiting) -> str | None:
        short = claim.needs.shortage(free)
        if first.alone or short is None:
            return None
        if short == "cpus":
            return f"expected to use {claim.needs.cpus} CPU cores; {self._host.cpus_of} has {self._cpus}"
        what, wanted, there, place = (
            ("memory", claim.needs.memory, free.memory, self._host.memory_of)
            if short == "memory"
            else ("scratch space", claim.needs.scratch, free.scratch, THIS_HOST)
        )
        return (
            f"expected to need {_size(wanted)} of {what}; {place} has {_size(there)} to give: "
            "started alone"
        )

    def _end(self, chosen: Holding | None, available: int) -> None:
        for key, held in self._running.items():
            if held.holding == chosen:
                cause = over_host_memory(
                    held.holding.resident,
                    held.holding.needs.memory,
                    available,
                    self._host.memory_of,
                )
                self._executor.end(key, cause)
                self._running[key] = replace(held, holding=replace(held.holding, ending=True))

    def _holdings(self) -> tuple[Holding, ...]:
        return tuple(held.holding for held in self._running.values())

    def _claims(self) -> FarmClaims:
        if self._lacks_device:
            return FarmClaims(self._holdings(), device_since=self._starved_since)
        return FarmClaims(self._holdings(), self._starved_since)

    def _state(self, claims: FarmClaims) -> None:
        self._stated = time.monotonic()
        self._reservations.write(claims)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _size(count: int) -> str:
    mebibytes = max(0, count) / 2**20
    return f"{mebibytes / 1024:.1f} GiB" if mebibytes >= 100 else f"{mebibytes:.0f} MiB"
