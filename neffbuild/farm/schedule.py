"""In which order units are started, and which of them are due."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from neffbuild.farm.admission import Claim
from neffbuild.toolchain.base import Unit


@dataclass(frozen=True, slots=True)
class Waiting:
    """A unit that is to be started, with what it will reserve.

    `attempt` counts from 1. `alone`: nothing else of this farm may run beside it. `waits`: another
    process of this host compiles it, and it is now worth waiting for that one's lock. Not to be started
    before `not_before`, in seconds of the monotonic clock.
    """

    unit: Unit
    claim: Claim
    attempt: int = 1
    alone: bool = False
    waits: bool = False
    not_before: float = 0.0


def longest_first(units: Sequence[Unit], expected: Mapping[str, float]) -> list[Unit]:
    """The units, longest expected compile first: a long one started last would run alone at the end.
    `expected` seconds are by key; equal ones keep the order they came in."""
    return sorted(units, key=lambda unit: -expected[unit.key])


class Queue:
    """Units that are to be started: those of the plan in their order, then those that were deferred."""

    def __init__(self, planned: Sequence[Waiting]) -> None:
        self._planned = {waiting.unit.key: waiting for waiting in planned}
        self._deferred: dict[str, Waiting] = {}

    def __iter__(self) -> Iterator[Waiting]:
        yield from self._planned.values()
        yield from self._deferred.values()

    def __bool__(self) -> bool:
        return bool(self._planned or self._deferred)

    def due(self, now: float) -> Sequence[Waiting]:
        """The units that may be started now, in the order they should be."""
        if self._planned:
            return list(self._planned.values())
        return [waiting for waiting in self._deferred.values() if waiting.not_before <= now]

    def next_due(self) -> float:
        """When the next unit may be started, on the monotonic clock. Raises `ValueError` if none waits."""
        return min(waiting.not_before for waiting in self)

    def take(self, waiting: Waiting) -> None:
        """A unit is being started."""
        key = waiting.unit.key
        del (self._planned if key in self._planned else self._deferred)[key]

    def defer(self, waiting: Waiting) -> None:
        """A unit is to come again, after all that are planned."""
        self._deferred[waiting.unit.key] = waiting
