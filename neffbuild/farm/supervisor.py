"""Watch over one unit: start its worker, bound its time, memory and output, end its whole tree.

One supervisor per unit, forked beside the worker and free of toolchain code, so that it is there when
the worker hangs in a call, crashes, or is taken by the kernel. Whatever the worker starts stays below
the supervisor in the process tree, even what leaves the process group.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import selectors
import shutil
import time
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

from neffbuild.farm import processes, worker
from neffbuild.farm.causes import cause_of_exit, cause_of_no_start, over_memory, timed_out
from neffbuild.farm.logfile import UnitLog, log_tail
from neffbuild.farm.outcomes import (
    CANCELLED,
    Cause,
    CauseKind,
    Outcome,
    UnitResult,
    lost_worker,
    stored_result,
)
from neffbuild.farm.scratch import remove_tree
from neffbuild.farm.worker import Busy, Compiled, Compiling, Job, Report
from neffbuild.toolchain.base import Toolchain

GRACE_SECONDS = 2.0
"""Between asking a compiler to end (SIGTERM) and ending it (SIGKILL)."""
_SAMPLE_SECONDS = 0.2
_TOLD_BYTES = 4 << 20
"""Changes of memory that the farm is not told of."""
_READ_BYTES = 1 << 16
_DESCRIPTORS = 8
"""Files that a supervisor opens while its worker runs, and some to spare."""


@dataclass(frozen=True, slots=True)
class Started:
    """The unit's worker runs; it leads a process group of its own, and all it starts is below the
    supervisor."""

    worker: int
    supervisor: int


@dataclass(frozen=True, slots=True)
class NotStarted:
    """The unit has no worker: this host let none be started."""

    cause: Cause


@dataclass(frozen=True, slots=True)
class Sampled:
    """What the worker with everything it started holds now, in resident bytes; sent as it changes."""

    resident: int


@dataclass(frozen=True, slots=True)
class End:
    """From the farm: end the unit for this cause; `grace` seconds are between asking and killing."""

    cause: Cause
    grace: float


def supervise(farm: Connection, toolchain: Toolchain) -> None:
    """Take a `Job` from `farm`; send `Started`, `Sampled` as memory is taken, then how it ended: a
    `UnitResult`, or `Busy`. Where no worker can be started, all that is sent is `NotStarted`.

    When the other end of `farm` closes, the farm is dead and the unit ends at once.
    """
    try:
        job: Job = farm.recv()
    except (EOFError, OSError):
        return
    processes.adopt_orphans()
    try:
        watch = _Watch(farm, job, toolchain)
    except OSError as error:
        _log_path(job).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            farm.send(NotStarted(cause_of_no_start(error)))
        return
    # Where the farm is dead already, `until_end` is told so too.
    with contextlib.suppress(OSError):
        farm.send(Started(watch.worker, os.getpid()))
    ended = watch.until_end()
    remove_tree(job.scratch)
    _log_path(job).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        farm.send(ended)


def _log_path(job: Job) -> Path:
    """Where a unit's output goes until the outcome is known: another farm may be at the same unit."""
    return job.scratch.parent / f"{job.scratch.name}.log"


class _Watch:
    """The running worker and what is known of it."""

    def __init__(self, farm: Connection, job: Job, toolchain: Toolchain) -> None:
        self._farm = farm
        self._job = job
        self._log = UnitLog(_log_path(job))
        self._channel, worker_end = Pipe()
        self._output, output_end = os.pipe()
        supervisor = os.getpid()
        # Once there is a worker, nothing may fail that it takes to watch over it and to end it.
        processes.require_descriptors(_DESCRIPTORS)
        self.worker = os.fork()
        if self.worker == 0:
            # The farm sees its end close when the supervisor dies: the worker must not hold it.
            farm.close()
            self._channel.close()
            os.close(self._output)
            worker.run(job, toolchain, worker_end, output_end, supervisor)
        worker_end.close()
        os.close(output_end)
        os.set_blocking(self._output, False)
        self._exit = os.pidfd_open(self.worker)
        self._exited = False
        self._deadline = float("inf")
        self._next_sample = 0.0
        self._peak = 0
        self._told = 0
        self._report: Report | Busy | None = None
        self._stop: Cause | None = None
        self._grace = 0.0

    def until_end(self) -> UnitResult | Busy:
        """Wait for the report, the exit, a limit or the farm's word; leave no process behind."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._farm, selectors.EVENT_READ, self._hear_farm)
            selector.register(self._channel, selectors.EVENT_READ, self._hear_worker)
            selector.register(self._output, selectors.EVENT_READ, self._read_output)
            selector.register(self._exit, selectors.EVENT_READ, self._see_exit)
            while self._report is None and self._stop is None and not self._exited:
                for ready, _ in selector.select(_SAMPLE_SECONDS):
                    if not ready.data():
                        selector.unregister(ready.fileobj)
                self._check_limits()
        statuses = processes.end_descendants(self._grace)
        # What the worker said last, it may have said while it was being ended.
        while self._report is None and self._channel.poll() and self._hear_worker():
            pass
        while self._read_output():
            pass
        self._log.close()
        return self._verdict(statuses.get(self.worker))

    # Each of the next four returns whether there may be more to hear.

    def _hear_farm(self) -> bool:
        try:
            order: End = self._farm.recv()
            self._end(order.cause, order.grace)
        except (EOFError, OSError):
            self._end(CANCELLED, 0)  # the farm is dead: nobody is left to wait for
        return True

    def _hear_worker(self) -> bool:
        try:
            message = self._channel.recv()
            if isinstance(message, Compiling) and self._job.timeout is not None:
                self._deadline = time.monotonic() + self._job.timeout
            elif isinstance(message, Compiled):
                self._sample()
                self._channel.send(self._peak)
            elif isinstance(message, Report | Busy):
                self._report = message
        except (EOFError, OSError):
            return False
        return True

    def _read_output(self) -> bool:
        try:
            data = os.read(self._output, _READ_BYTES)
        except BlockingIOError:
            return False
        self._log.write(data)
        return bool(data)

    def _see_exit(self) -> bool:
        self._exited = True
        return False

    def _check_limits(self) -> None:
        now = time.monotonic()
        if now >= self._next_sample:
            self._next_sample = now + _SAMPLE_SECONDS
            resident = self._sample()
            self._tell(resident)
            if self._job.memory is not None and resident > self._job.memory:
                self._end(over_memory(self._job.memory), 0)
        if now >= self._deadline and self._job.timeout is not None:
            self._end(timed_out(self._job.timeout), GRACE_SECONDS)

    def _sample(self) -> int:
        resident = processes.resident_bytes(processes.descendants(os.getpid()))
        self._peak = max(self._peak, resident)
        return resident

    def _tell(self, resident: int) -> None:
        if abs(resident - self._told) < _TOLD_BYTES:
            return
        # Never wait for a farm that does not listen (it is stopped): the limits here still hold.
        _, listening, _ = select.select([], [self._farm], [], 0)
        if listening:
            with contextlib.suppress(OSError):
                self._farm.send(Sampled(resident))
                self._told = resident

    def _end(self, cause: Cause, grace: float) -> None:
        if self._stop is None:
            self._stop, self._grace = cause, grace

    def _verdict(self, status: int | None) -> UnitResult | Busy:
        unit, report = self._job.unit, self._report
        if isinstance(report, Busy):
            return report
        if report is not None and report.entry is not None:
            with contextlib.suppress(OSError):
                self._job.log.unlink()  # an earlier failure's
            return stored_result(unit, report.outcome, report.entry)
        if self._stop is not None:
            # Before what the worker says: a compiler ended for this reason looks to it like a failure.
            cause = self._stop
        elif report is not None and report.cause is not None:
            cause = report.cause
        elif status is not None:
            cause = cause_of_exit(status)
        else:
            cause = lost_worker(f"the worker, process {self.worker}, cannot be ended")
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        result = UnitResult.of(
            unit,
            Outcome.CANCELLED if cause.kind is CauseKind.CANCELLED else Outcome.FAILED,
            cause=cause,
            cpu_seconds=used.ru_utime + used.ru_stime,
            peak_memory_bytes=max(self._peak, used.ru_maxrss * 1024),
        )
        if result.outcome is Outcome.CANCELLED:
            return result
        return replace(result, log=self._keep_log(), log_tail=log_tail(_log_path(self._job)))

    def _keep_log(self) -> Path | None:
        try:
            self._job.log.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(_log_path(self._job), self._job.log)
        except OSError:
            return None
        return self._job.log
