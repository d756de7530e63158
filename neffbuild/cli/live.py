"""The live view of a farm on a terminal: what runs and how far it is, what is left and for how long."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from neffbuild.farm.outcomes import (
    Event,
    FarmStarted,
    Outcome,
    UnitDeferred,
    UnitFinished,
    UnitMemory,
    UnitStarted,
)
from neffbuild.report.text import seconds, size

_PER_SECOND = 4
_BAR_WIDTH = 24


@contextmanager
def live_view(lines: Callable[[Event], str | None]) -> Iterator[Callable[[Event], None]]:
    """What to call with each event. `lines` says what stays on the screen above the view."""
    state = FarmState()
    console = Console(stderr=True)
    with Live(
        console=console,
        get_renderable=lambda: _rendered(state, time.monotonic()),
        refresh_per_second=_PER_SECOND,
        transient=True,
    ) as live:

        def on_event(event: Event) -> None:
            state.see(event, time.monotonic())
            text = lines(event)
            if text is not None:
                live.console.print(text, markup=False, highlight=False)

        yield on_event


@dataclass(slots=True)
class Running:
    """A unit that runs since `began`; seconds of one clock, bytes of memory. 0: not known."""

    name: str
    began: float
    expected: float
    reserved: int
    resident: int = 0


class FarmState:
    """What the events so far add up to."""

    def __init__(self) -> None:
        self.began: float | None = None
        self.units = 0
        self.workers = 1
        self.counts = dict.fromkeys(Outcome, 0)
        self.running: dict[str, Running] = {}
        self._expected: Mapping[str, float] = {}
        self._finished: set[str] = set()
        self._taken = 0.0
        self._foreseen = 0.0

    @property
    def waiting(self) -> int:
        return self.units - len(self._finished) - len(self.running)

    def see(self, event: Event, now: float) -> None:
        match event:
            case FarmStarted():
                self.began, self.units, self.workers = now, event.units, event.workers
                self._expected = event.expected_seconds
            case UnitStarted():
                self.running[event.unit.key] = Running(
                    event.unit.bucket_name,
                    now,
                    event.expected_seconds,
                    event.reserved_bytes,
                )
            case UnitMemory():
                if event.unit.key in self.running:
                    self.running[event.unit.key].resident = event.resident_bytes
            case UnitDeferred():
                self.running.pop(event.unit.key, None)
            case UnitFinished():
                self._finish(event, now)

    def seconds_left(self, now: float) -> float | None:
        """Until the last unit is done, by what units were expected to take and have taken; None where
        nothing says so."""
        left = [seconds for key, seconds in self._expected.items() if not self._is_begun(key)]
        if self._taken and self._foreseen:
            pace = self._taken / self._foreseen
        elif self._finished or not any(self._expected.values()):
            return None
        else:
            pace = 1.0
        running = [
            max(one.expected * pace - (now - one.began), 0.0) for one in self.running.values()
        ]
        together = (sum(left) * pace + sum(running)) / max(self.workers, 1)
        return max(together, max(running, default=0.0))

    def _is_begun(self, key: str) -> bool:
        return key in self._finished or key in self.running

    def _finish(self, event: UnitFinished, now: float) -> None:
        key = event.unit.key
        self.counts[event.result.outcome] += 1
        self._finished.add(key)
        ran = self.running.pop(key, None)
        if ran is not None and event.result.outcome is Outcome.BUILT:
            self._taken += now - ran.began
            self._foreseen += self._expected.get(key, 0.0)


def _rendered(state: FarmState, now: float) -> Any:
    if state.began is None:
        return Text()
    table = Table.grid(padding=(0, 2))
    for one in state.running.values():
        elapsed = now - one.began
        known = one.expected > 0
        table.add_row(
            Text(one.name),
            ProgressBar(
                total=one.expected if known else None,
                completed=min(elapsed, one.expected),
                width=_BAR_WIDTH,
                pulse=not known or elapsed > one.expected,
                animation_time=now,
            ),
            Text(seconds(elapsed) + (f" of about {seconds(one.expected)}" if known else "")),
            Text(_memory(one)),
        )
    return Group(table, Text(_summary(state, now)))


def _memory(one: Running) -> str:
    if not one.resident and not one.reserved:
        return ""
    return f"{size(one.resident)} of {size(one.reserved)}" if one.reserved else size(one.resident)


def _summary(state: FarmState, now: float) -> str:
    parts = [f"{sum(state.counts.values())} of {state.units} units"]
    parts += [f"{number} {outcome.value}" for outcome, number in state.counts.items() if number]
    parts.append(f"{len(state.running)} running")
    if state.waiting:
        parts.append(f"{state.waiting} waiting")
    parts.append(f"{seconds(now - (state.began or now))} elapsed")
    left = state.seconds_left(now)
    if left is not None:
        parts.append(f"about {seconds(left)} left")
    return ", ".join(parts)
