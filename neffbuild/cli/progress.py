"""What a running farm says: a live view on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from neffbuild.cli import output
from neffbuild.config.printable import shown
from neffbuild.farm.outcomes import (
    Event,
    FarmStarted,
    FarmStopping,
    FewerWorkers,
    UnitDeferred,
    UnitFinished,
    UnitStarted,
)
from neffbuild.report.text import counted, seconds, size

_TAIL_LINES = 12
"""Lines of a failed unit's output that are shown with it."""


@contextmanager
def farm_progress() -> Iterator[Callable[[Event], None]]:
    """What to call with each event. No ANSI and no animation when stderr is not a terminal or `CI`
    is set."""
    lines = Lines()
    if output.is_watched():
        from neffbuild.cli.live import live_view

        with live_view(lines) as on_event:
            yield on_event
    else:
        yield lambda event: _remark(lines(event))


def _remark(text: str | None) -> None:
    if text is not None:
        output.remark(text)


class Lines:
    """One line per thing that happened, None for what happens all the time."""

    def __init__(self) -> None:
        self._total = 0
        self._done = 0

    def __call__(self, event: Event) -> str | None:
        match event:
            case FarmStarted():
                self._total = event.units
                return f"{counted(event.units, 'unit')}, {event.workers} at once"
            case FewerWorkers():
                return event.reason
            case UnitStarted(warning=str(warning)):
                return f"{event.unit.bucket_name}: {warning}"
            case UnitFinished():
                self._done += 1
                return f"[{self._done}/{self._total}] {_finished(event)}"
            case UnitDeferred():
                return _deferred(event)
            case FarmStopping():
                return _stopping(event)
        return None


def _deferred(event: UnitDeferred) -> str:
    text = f"{event.unit.bucket_name} deferred: {event.reason}"
    if event.pause:
        text += f"; tried again in {seconds(event.pause)}"
    return f"{text}, with nothing beside it" if event.alone else text


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
    return "\n".join([text, *(f"    | {shown(line)}" for line in tail[-_TAIL_LINES:])])


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
    if event.failed is not None:
        return f"{event.failed} failed: no more units are started"
    if event.cancelling:
        return "ending the units that are running"
    return "finishing the units that are running; interrupt again to end them now"
