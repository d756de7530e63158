"""Compile units: order them, keep the executor busy, record what became of each."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

from neffbuild.cache.records import append_run, clear_failure, read_runs, record_failure
from neffbuild.cache.store import Store
from neffbuild.config.build import FarmConfig
from neffbuild.config.errors import NeffbuildError
from neffbuild.farm.environment import worker_environment
from neffbuild.farm.interrupts import Interrupts
from neffbuild.farm.local import LocalExecutor
from neffbuild.farm.outcomes import (
    CANCELLED,
    Cause,
    CauseKind,
    Event,
    FarmStarted,
    FarmStopping,
    Outcome,
    RunResult,
    UnitDeferred,
    UnitFinished,
    UnitResult,
    UnitStarted,
)
from neffbuild.farm.schedule import longest_first
from neffbuild.farm.scratch import farm_folder
from neffbuild.farm.worker import Busy, Job
from neffbuild.toolchain.base import Toolchain, Unit

_LOCK_WAIT_SECONDS = 7200.0
"""How long a unit waits for another farm of this host that is compiling it, where no `farm.timeout`
says how long a compile may take."""
_COMMIT_SECONDS = 60.0
_MAY_PASS = frozenset({CauseKind.OUT_OF_MEMORY, CauseKind.LOST_WORKER, CauseKind.STORE})
"""Failures that say more about the host at that moment than about the unit."""
_REMEMBERED_RUNS = 20
_LOOK_SECONDS = 0.2
_log = logging.getLogger(__name__)


def compile_units(
    units: Sequence[Unit],
    toolchain: Toolchain,
    store: Store,
    farm: FarmConfig,
    *,
    logs: Path,
    on_event: Callable[[Event], None],
) -> RunResult:
    """Compile every unit into `store`, at most `farm.workers` at once (default: one per core).

    The units are of one serve config, each once. One that fails costs no other: its cause is in its
    result and in the store's failure records, and its log stays in the folder `logs`. On SIGINT what
    runs is finished and nothing more started; on a second one, or SIGTERM, what runs is ended. The
    store holds whole entries only, whenever and however this process ends, and the next run needs no
    clean-up. `on_event` is called in this thread as things happen.

    Raises `ToolchainRefusal` when workers of this toolchain cannot be started, `StoreError` when there
    is no place for scratch.
    """
    if not units:
        return RunResult(units=(), wall_seconds=0.0)
    began = time.monotonic()
    identity = toolchain.identity(units[0].config)
    environment = worker_environment(os.environ, identity.environment, store.url)
    with (
        Interrupts() as interrupts,
        farm_folder() as folder,
        LocalExecutor(toolchain.name, environment, folder) as executor,
    ):

        def job(unit: Unit, waits: bool) -> Job:
            return Job(
                unit=unit,
                store=store,
                platform=identity.platform,
                options={"flags": list(identity.flags)},
                environment=environment,
                scratch=folder / unit.key[:16],
                shared=folder / "shared",
                log=logs / f"{unit.shape.bucket_name}-{unit.key[:12]}.log",
                lock_wait=(farm.timeout or _LOCK_WAIT_SECONDS) + _COMMIT_SECONDS if waits else 0.0,
                timeout=farm.timeout,
                memory=farm.memory,
            )

        workers = min(farm.workers or len(os.sched_getaffinity(0)), len(units))
        run = _Run(executor, store, workers, farm.retries, job, on_event)
        run.work_off(longest_first(units, _measured_seconds(store)), interrupts)
    result = RunResult(
        units=tuple(run.results[unit.key] for unit in units),
        wall_seconds=time.monotonic() - began,
        interrupted=interrupts.stopping,
    )
    with _warned("the run could not be recorded"):
        append_run(store, result.document())
    return result


class _Run:
    """Keeps the executor busy until every unit has a result."""

    def __init__(
        self,
        executor: LocalExecutor,
        store: Store,
        workers: int,
        retries: int,
        job: Callable[[Unit, bool], Job],
        on_event: Callable[[Event], None],
    ) -> None:
        self.results: dict[str, UnitResult] = {}
        self._executor = executor
        self._store = store
        self._workers = workers
        self._retries = retries
        self._failures: Counter[str] = Counter()
        self._job = job
        self._on_event = on_event
        self._queue: deque[Unit] = deque()
        self._deferred: deque[Unit] = deque()

    def work_off(self, units: Sequence[Unit], interrupts: Interrupts) -> None:
        """Give every unit a result, starting them in the order given."""
        self._on_event(FarmStarted(len(units), self._workers))
        self._queue.extend(units)
        announced: FarmStopping | None = None
        while True:
            if interrupts.stopping and announced != FarmStopping(interrupts.cancelling):
                announced = FarmStopping(interrupts.cancelling)
                self._on_event(announced)
                if announced.cancelling:
                    self._executor.cancel()
            if not interrupts.stopping:
                self._fill()
            if not self._executor.running:
                break
            for job, ended in self._executor.finished(_LOOK_SECONDS):
                self._see(job, ended)
        for unit in (*self._queue, *self._deferred):
            self._finish(unit, UnitResult.of(unit, Outcome.CANCELLED, cause=CANCELLED))

    def _fill(self) -> None:
        while self._executor.running < self._workers:
            if self._queue:
                unit, waits = self._queue.popleft(), False
            elif self._deferred:
                unit, waits = self._deferred.popleft(), True
            else:
                return
            self._executor.start(self._job(unit, waits))
            self._on_event(UnitStarted(unit))

    def _see(self, job: Job, ended: UnitResult | Busy) -> None:
        unit = job.unit
        if isinstance(ended, Busy):
            if not job.lock_wait:
                # Not worth waiting for while there is other work: the two farms then share the grid.
                self._defer(unit, ended.reason)
                return
            cause = Cause(CauseKind.STORE, ended.reason, "run `compile` again")
            ended = UnitResult.of(unit, Outcome.FAILED, cause=cause)
        failed = ended.cause if ended.outcome is Outcome.FAILED else None
        if failed and failed.kind in _MAY_PASS and self._failures[unit.key] < self._retries:
            self._failures[unit.key] += 1
            self._defer(unit, failed.text)
        else:
            self._finish(unit, ended)

    def _defer(self, unit: Unit, reason: str) -> None:
        self._deferred.append(unit)
        self._on_event(UnitDeferred(unit, reason))

    def _finish(self, unit: Unit, result: UnitResult) -> None:
        self.results[unit.key] = result
        with _warned(f"what became of {result.bucket_name} could not be recorded"):
            if result.outcome is Outcome.FAILED and result.cause is not None:
                record_failure(
                    self._store,
                    unit.key,
                    cause=result.cause.kind.value,
                    message=result.cause.text,
                    log_tail=result.log_tail,
                )
            elif result.outcome in (Outcome.BUILT, Outcome.CACHED):
                clear_failure(self._store, unit.key)
        self._on_event(UnitFinished(unit, result))


def _measured_seconds(store: Store) -> dict[str, float]:
    """key → compile seconds, the newest of the last runs that built the unit."""
    measured: dict[str, float] = {}
    for _, document in islice(read_runs(store), _REMEMBERED_RUNS):
        for unit in document.get("units", ()):
            if unit.get("outcome") == Outcome.BUILT and unit.get("compile_seconds"):
                measured.setdefault(unit["key"], float(unit["compile_seconds"]))
    return measured


@contextmanager
def _warned(what: str) -> Iterator[None]:
    """Let a store that refuses a record cost a warning, not the run: the artifacts are what counts."""
    try:
        yield
    except NeffbuildError as error:
        _log.warning(what, extra={"fields": {"cause": error.message}})
