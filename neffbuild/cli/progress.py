"""The live view of a running farm: a display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from neffbuild.cli import output
from neffbuild.farm.outcomes import (
    Event,
    FarmStarted,
    FarmStopping,
    Outcome,
    UnitDeferred,
    UnitFinished,
    UnitStarted,
)
from neffbuild.report.text import seconds, size

_TAIL_LINES = 12
"""Lines of a failed unit's output that are shown with it."""


@contextmanager
def farm_progress() -> Iterator[Callable[[Event], None]]:
    """What to call with each event. No ANSI and no animation when stderr is not a terminal or `CI`
    is set."""
    if sys.stderr.isatty() and not os.environ.get("CI"):
        with _display() as on_event:
            yield on_event
    else:
        yield _Lines()


class _Lines:
    """One line per thing that happened."""

    def __init__(self) -> None:
        self._total = 0
        self._done = 0

    def __call__(self, event: Event) -> None:
        match event:
            case FarmStarted():
                self._total = event.units
                output.remark(f"{event.units} units, {event.workers} at once")
            case UnitFinished():
                self._done += 1
                output.remark(f"[{self._done}/{self._total}] {_finished(event)}")
            case UnitDeferred():
                output.remark(f"{event.unit.shape.bucket_name} deferred: {event.reason}")
            case FarmStopping():
                output.remark(_stopping(event))
            case UnitStarted():
                pass


@contextmanager
def _display() -> Iterator[Callable[[Event], None]]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TaskID,
        TextColumn,
        TimeElapsedColumn,
    )

    console = Console(stderr=True)
    running: dict[str, TaskID] = {}
    counts = dict.fromkeys(Outcome, 0)
    began = time.monotonic()
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
        transient=True,
    ) as progress:
        overall = progress.add_task("units", total=None, note="")

        def on_event(event: Event) -> None:
            match event:
                case FarmStarted():
                    progress.update(overall, total=event.units)
                case UnitStarted():
                    name = event.unit.shape.bucket_name
                    running[event.unit.key] = progress.add_task(f"  {name}", total=None, note="")
                case UnitDeferred():
                    progress.remove_task(running.pop(event.unit.key))
                case UnitFinished():
                    if event.unit.key in running:
                        progress.remove_task(running.pop(event.unit.key))
                    counts[event.result.outcome] += 1
                    progress.console.print(_finished(event), markup=False, highlight=False)
                    progress.update(overall, advance=1, note=_note(counts, progress_total()))
                case FarmStopping():
                    progress.console.print(_stopping(event), markup=False, highlight=False)

        def progress_total() -> float | None:
            done = sum(counts.values())
            total = progress.tasks[0].total
            if not done or total is None:
                return None
            return (time.monotonic() - began) / done * (total - done)

        yield on_event


def _note(counts: dict[Outcome, int], left: float | None) -> str:
    parts = [f"{counts[outcome]} {outcome.value}" for outcome in Outcome if counts[outcome]]
    if left:
        parts.append(f"about {seconds(left)} left")
    return ", ".join(parts)


def _finished(event: UnitFinished) -> str:
    result = event.result
    text = f"{result.outcome.value} {result.bucket_name}"
    if result.compile_seconds is not None:
        text += f" in {seconds(result.compile_seconds)}"
    if result.peak_memory_bytes is not None:
        text += f", peak memory {size(result.peak_memory_bytes)}"
    if result.cause is not None:
        text += f": {result.cause.text}"
    # Where a log is read, the machine it was written on is often gone, and the unit's own log with it.
    tail = [line for line in _without_frames(result.log_tail.splitlines()) if line.strip()]
    return "\n".join([text, *(f"    | {line}" for line in tail[-_TAIL_LINES:])])


def _without_frames(lines: Iterable[str]) -> Iterator[str]:
    """Without the frames of Python tracebacks, which push a compiler's own words out of sight."""
    in_frames = False
    for line in lines:
        if line.startswith("Traceback (most recent call last):"):
            in_frames = True
        elif not (in_frames and line.startswith(" ")):
            in_frames = False
            yield line


def _stopping(event: FarmStopping) -> str:
    if event.cancelling:
        return "ending the units that are running"
    return "finishing the units that are running; interrupt again to end them now"
