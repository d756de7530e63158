"""What a place that runs units must offer the farm: one module for each place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self

from neffbuild.farm.admission import Admitted, Held
from neffbuild.farm.outcomes import UnitDeferred, UnitMemory, UnitResult, UnitStarted
from neffbuild.farm.schedule import Waiting
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

    def seen(self) -> Sequence[UnitStarted | UnitMemory | UnitDeferred]:
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


class Admission(Protocol):
    """Which units an executor has room for."""

    @property
    def workers(self) -> int:
        """The most units that run at once."""
        ...

    @property
    def asked(self) -> int:
        """How many were asked for."""
        ...

    @property
    def fewer(self) -> str | None:
        """Why those are fewer than were asked for; None when they are not."""
        ...

    def admit(self, due: Sequence[Waiting]) -> Admitted | Held | None:
        """Reserve room for one of the units that are `due`, in their order. `Held` where there is none,
        None where nothing is due or all workers are at work."""
        ...

    def release(self, key: str) -> None:
        """The unit of this key runs no longer."""
        ...

    def watch(self) -> None:
        """Called again and again while units run."""
        ...


class SlotAdmission:
    """For a place that finds room itself: as many units as there are workers for."""

    fewer = None

    def __init__(self, workers: int) -> None:
        self.workers = self.asked = workers
        self._running: set[str] = set()

    def admit(self, due: Sequence[Waiting]) -> Admitted | None:
        if not due or len(self._running) >= self.workers:
            return None
        self._running.add(due[0].unit.key)
        return Admitted(0, due[0].claim.needs)

    def release(self, key: str) -> None:
        self._running.discard(key)

    def watch(self) -> None:
        """Its executor does."""
