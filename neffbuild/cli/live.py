"""The live view of a farm on a terminal: what runs and how far it is, what is left and for how long."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, TextIO, cast

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
_SHORTEST_BAR = 6
_SHORT_NAME = 20
"""Names are shortened to no less than this for the sake of what stands beside them."""
_GAP = 2


@contextmanager
def live_view(lines: Callable[[Event], str | None]) -> Iterator[Callable[[Event], None]]:
    """What to call with each event. `lines` says what stays on the screen above the view."""
    state = FarmState()
    console = Console(file=cast(IO[str], _Terminal(sys.stderr)))
    with Live(
        console=console,
        get_renderable=lambda: rendered(state, time.monotonic(), console.width),
        refresh_per_second=_PER_SECOND,
        transient=True,
    ) as live:

        def on_event(event: Event) -> None:
            state.see(event, time.monotonic())
            text = lines(event)
            if text is not None:
                live.console.print(text, markup=False, highlight=False)

        yield on_event


class _Terminal:
    """A stream. What cannot be written to it, as its window was closed, is lost and stops nothing."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


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


def rendered(state: FarmState, now: float, width: int) -> Any:
    """The view at `now`: a line for each running unit and one for all, none longer than `width`."""
    if state.began is None:
        return Text()
    rows = list(state.running.values())
    figures = [[_time(one, now - one.began) for one in rows], [_memory(one) for one in rows]]
    while figures and width - _widths(figures) < _SHORT_NAME:
        figures.pop()
    room = width - _widths(figures)
    longest = max((len(one.name) for one in rows), default=0)
    # A name says more than a bar does.
    bar = min(_BAR_WIDTH, room - _GAP - longest)
    has_bar = bar >= _SHORTEST_BAR
    table = Table.grid(padding=(0, _GAP, 0, 0))
    for one, *cells in zip(rows, *figures, strict=True):
        name = Text(shortened(one.name, room - has_bar * (bar + _GAP)), no_wrap=True)
        texts = [Text(str(cell), no_wrap=True) for cell in cells]
        table.add_row(name, *([_bar(one, now, bar)] if has_bar else []), *texts)
    summary = Text(_summary(state, now), no_wrap=True, overflow="ellipsis")
    return Group(*([table] if rows else []), summary)


def _widths(columns: Sequence[Sequence[str]]) -> int:
    return sum(max(map(len, cells), default=0) + _GAP for cells in columns)


def shortened(name: str, room: int) -> str:
    """A name in `room` characters: of units, the beginning and the end say most."""
    if len(name) <= room:
        return name
    tail = max(room - 1, 0) // 2
    return f"{name[: max(room - 1 - tail, 0)]}…{name[len(name) - tail :]}"


def _bar(one: Running, now: float, width: int) -> ProgressBar:
    elapsed, known = now - one.began, one.expected > 0
    return ProgressBar(
        total=one.expected if known else None,
        completed=min(elapsed, one.expected),
        width=width,
        pulse=not known or elapsed > one.expected,
        animation_time=now,
    )


def _time(one: Running, elapsed: float) -> str:
    return seconds(elapsed) + (f" of about {seconds(one.expected)}" if one.expected > 0 else "")


def _memory(one: Running) -> str:
    if not one.resident and not one.reserved:
        return ""
    return f"{size(one.resident)} of {size(one.reserved)}" if one.reserved else size(one.resident)


def _summary(state: FarmState, now: float) -> str:
    """What matters least comes last: a narrow terminal does not show it."""
    parts = [f"{sum(state.counts.values())} of {state.units} units"]
    left = state.seconds_left(now)
    if left is not None:
        parts.append(f"about {seconds(left)} left")
    parts += [f"{number} {outcome.value}" for outcome, number in state.counts.items() if number]
    parts.append(f"{len(state.running)} running")
    if state.waiting:
        parts.append(f"{state.waiting} waiting")
    parts.append(f"{seconds(now - (state.began or now))} elapsed")
    return ", ".join(parts)
