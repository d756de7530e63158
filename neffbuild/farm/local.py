"""Run units in processes of this host."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Self

from neffbuild.config.errors import ToolchainRefusal, UnitsIncomplete
from neffbuild.farm import processes
from neffbuild.farm.causes import cause_of_no_start
from neffbuild.farm.outcomes import (
    CANCELLED,
    Cause,
    CauseKind,
    Outcome,
    UnitDeferred,
    UnitMemory,
    UnitResult,
    UnitStarted,
    lost_worker,
)
from neffbuild.farm.scratch import remove_tree
from neffbuild.farm.server_process import ServerProcess
from neffbuild.farm.supervisor import GRACE_SECONDS, End, NotStarted, Sampled, Started
from neffbuild.farm.worker import Busy, Job

_ATTEMPTS = 10
"""How often a unit is started whose supervisor comes to nothing before it can say so."""
_SERVERS = 3
"""How many servers in a row may end before any unit has started."""
_START_SECONDS = 300.0
"""How long a server may take to import its modules and fork a supervisor."""
_SLACK_SECONDS = 20.0
"""How much longer than it should a supervisor may take to end its unit."""
_FULL_SECONDS = 60.0
"""How long after the host let nothing more be started it is not asked for more than runs."""
_DESCRIPTORS = 24
"""Files that this process opens for a moment while units run: a unit is not started at their cost."""


@dataclass(slots=True)
class _Running:
    job: Job
    attempts: int = 0
    worker: int | None = None
    supervisor: int | None = None
    deadline: float = math.inf


def _not_started(job: Job, cause: Cause) -> UnitResult:
    return UnitResult.of(job.unit, Outcome.FAILED, cause=cause)


def _time_of(job: Job) -> float:
    """When a unit that begins now must have ended, whatever happens."""
    if job.timeout is None:
        return math.inf
    return time.monotonic() + job.lock_wait + job.timeout + GRACE_SECONDS + _SLACK_SECONDS


class LocalExecutor:
    """Each unit in a process of its own, forked from one server that has the toolchain's modules
    imported. Nothing that happens to a worker, a supervisor or the server costs more than its units.

    `environment` is what the server and, with the unit's TMPDIR, every worker sees; `folder` is the
    farm's own; `modules` are imported once for all workers. Leaving the context ends whatever still runs.
    """

    def __init__(
        self,
        toolchain: str,
        environment: Mapping[str, str],
        folder: Path,
        modules: Sequence[str] = (),
    ) -> None:
        self._toolchain = toolchain
        self._server = ServerProcess(toolchain, environment, folder, modules)
        self._running: dict[Connection, _Running] = {}
        self._seen: list[UnitStarted | UnitMemory | UnitDeferred] = []
        self._not_started: list[tuple[Job, UnitResult]] = []
        self._lowered = 0.0
        self.most = math.inf
        """How many units this host has let run at once, where it lets no more be started."""
        self.why_no_more = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for connection in self._running:
            connection.close()  # for its supervisor this is the end of the farm
        self._server.stop()

    @property
    def running(self) -> int:
        """Units started and not yet finished."""
        return len(self._running) + len(self._not_started)

    def start(self, job: Job) -> None:
        """Start a unit; how it ends comes from `finished`.

        Raises `UnitsIncomplete` when this host lets no server be started though nothing runs.
        """
        self._start(_Running(job))
        self._seen.append(UnitStarted(job.unit))

    def seen(self) -> list[UnitStarted | UnitMemory | UnitDeferred]:
        """What has started since the last call, and how much memory it takes."""
        seen, self._seen = self._seen, []
        return seen

    def withdraw(self) -> list[Job]:
        """Nothing: what was handed in runs already."""
        return []

    def resident(self) -> dict[str, int]:
        """Key of each running unit → resident bytes of everything it has started, now."""
        return {
            running.job.unit.key: processes.resident_bytes(
                processes.descendants(running.supervisor)
            )
            for running in self._running.values()
            if running.supervisor is not None
        }

    def finished(self, timeout: float) -> list[tuple[Job, UnitResult | Busy]]:
        """What has ended since the last call; waits up to `timeout` seconds for something to end.

        Raises `ToolchainRefusal` or `UnitsIncomplete` when workers cannot be started at all.
        """
        ended: list[tuple[Job, UnitResult | Busy]] = [*self._not_started]
        self._not_started = []
        for connection in wait(list(self._running), 0 if ended else timeout):
            assert isinstance(connection, Connection)
            try:
                message = connection.recv()
            except (EOFError, OSError):
                message = self._lost(connection)
            else:
                self._learn_from(message)
            if isinstance(message, Started):
                running = self._running[connection]
                running.worker, running.supervisor = message.worker, message.supervisor
                running.deadline = _time_of(running.job)
                self._server.started = 0
            elif isinstance(message, Sampled):
                unit = self._running[connection].job.unit
                self._seen.append(UnitMemory(unit, message.resident))
            elif isinstance(message, NotStarted):
                connection.close()
                job = self._running.pop(connection).job
                ended.append((job, _not_started(job, message.cause)))
            elif message is not None:
                connection.close()
                ended.append((self._running.pop(connection).job, message))
        self._kill_who_does_not_answer()
        return ended

    def cancel(self) -> None:
        """Ask every running unit to end now; how each ends comes from `finished`."""
        for connection, running in self._running.items():
            self._ask_to_end(connection, running, End(CANCELLED, GRACE_SECONDS))

    def end(self, key: str, cause: Cause) -> None:
        """End the running unit of this key at once; that it ended so comes from `finished`."""
        for connection, running in self._running.items():
            if running.job.unit.key == key:
                self._ask_to_end(connection, running, End(cause, 0.0))

    def _ask_to_end(self, connection: Connection, running: _Running, end: End) -> None:
        running.deadline = min(running.deadline, time.monotonic() + end.grace + _SLACK_SECONDS)
        running.attempts = _ATTEMPTS
        with contextlib.suppress(OSError):
            connection.send(end)

    def _kill_who_does_not_answer(self) -> None:
        """A supervisor keeps its unit's limits; one that is stopped, or the server it should have come
        from, keeps none. Killed, it is a lost one."""
        for running in self._running.values():
            if time.monotonic() > running.deadline:
                running.deadline = math.inf
                if running.supervisor is not None:
                    stuck = [running.supervisor]
                else:
                    # Stopped before it could say who it is, or never forked: nobody here knows.
                    server = self._server.pid
                    stuck = [server, *processes.descendants(server)] if server else []
                for process in stuck:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)

    def _start(self, running: _Running) -> None:
        running.attempts += 1
        running.deadline = time.monotonic() + _START_SECONDS
        try:
            processes.require_descriptors(_DESCRIPTORS)
            self._server.ensure()
        except OSError as error:
            cause = cause_of_no_start(error)
            if not self._running:
                raise UnitsIncomplete(
                    f"no unit can be compiled: {cause.text}", hint=cause.advice
                ) from error
            self._lower(len(self._running), cause)
            self._not_started.append((running.job, _not_started(running.job, cause)))
            return
        ours, theirs = socket.socketpair()
        connection = Connection(ours.detach())
        self._running[connection] = running
        # If the server dies in the middle of this, its end closes and `_lost` starts over.
        with contextlib.suppress(OSError):
            self._server.hand_over(theirs.fileno())
            theirs.close()
            connection.send(running.job)
        theirs.close()

    def _learn_from(self, message: object) -> None:
        """How much this host lets run, from what a supervisor says."""
        cause = message.cause if isinstance(message, NotStarted | UnitResult) else None
        if cause is not None and cause.kind is CauseKind.LOST_WORKER:
            self._lower(len(self._running) - 1, cause)
        elif isinstance(message, UnitResult) and time.monotonic() > self._lowered + _FULL_SECONDS:
            self.most = math.inf

    def _lower(self, running: int, cause: Cause) -> None:
        self.most = min(self.most, max(1, running))
        self.why_no_more, self._lowered = cause.text, time.monotonic()

    def _lost(self, connection: Connection) -> UnitResult | None:
        """The unit's supervisor is gone, or never came to be (None: it is tried again)."""
        running = self._running[connection]
        if running.worker is not None:
            # The kernel has ended the worker with its supervisor, and the server ends what is left;
            # unless the server is gone as well.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.worker, signal.SIGKILL)
            remove_tree(running.job.scratch)
            cause = lost_worker("the process that watched over the worker was killed")
            return UnitResult.of(running.job.unit, Outcome.FAILED, cause=cause)
        server = self._server
        if server.refused or (server.started >= _SERVERS and not server.lives):
            server.stop()
            reason = server.last_words or "the server they are forked from dies"
            raise ToolchainRefusal(
                f"workers for the toolchain {self._toolchain!r} cannot be started: {reason}",
                field="toolchain.name",
                value=self._toolchain,
                hint="run `neffbuild doctor`",
            )
        if running.attempts >= _ATTEMPTS:
            cause = lost_worker(f"killed {_ATTEMPTS} times before it had begun")
            return UnitResult.of(running.job.unit, Outcome.FAILED, cause=cause)
        connection.close()
        del self._running[connection]
        # Its worker may have begun all the same.
        remove_tree(running.job.scratch)
        self._start(running)
        return None
