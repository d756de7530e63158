"""What a place that runs units must offer the farm: one module for each place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self

from neffbuild.farm.outcomes import UnitDeferred, UnitResult, UnitStarted
from neffbuild.farm.worker import Busy, Job


class Executor(Protocol):
    """Entered once for a run; leaving it ends whatever still runs."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...

    @property
    def running(self) -> int:
        """Units handed to `start` that `finished` has not returned yet."""
        ...

    def start(self, job: Job) -> None:
        """Run a unit as soon as there is a place for it; how it ends comes from `finished`."""
        ...

    def seen(self) -> Sequence[UnitStarted | UnitDeferred]:
        """What has happened to running units since the last call, in order. A unit starts when a
        machine takes it up, which may be long after `start`; one that lost its machine is deferred,
        and starts again."""
        ...

    def finished(self, timeout: float) -> Sequence[tuple[Job, UnitResult | Busy]]:
        """What has ended since the last call; waits up to `timeout` seconds for something to end.

        Raises `ToolchainRefusal` when workers cannot be started at all.
        """
        ...

    def withdraw(self) -> Sequence[Job]:
        """Take back the units that no machine has taken up yet; they no longer run."""
        ...

    def cancel(self) -> None:
        """Ask every running unit to end now; how each ends comes from `finished`."""
        ...
