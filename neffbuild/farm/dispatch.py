"""The loop of a run: start what is due and admitted, hear how it ends, decide what comes of that."""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from neffbuild.cache.records import clear_failure, record_failure
from neffbuild.cache.store import Store
from neffbuild.config.build import FarmConfig
from neffbuild.config.errors import NeffbuildError
from neffbuild.farm.admission import Admitted, Held
from neffbuild.farm.executor import Admission, Executor
from neffbuild.farm.interrupts import Interrupts
from neffbuild.farm.outcomes import (
    CANCELLED,
    NOT_STARTED,
    Cause,
    CauseKind,
    Event,
    FarmStarted,
    FarmStopping,
    FewerWorkers,
    Outcome,
    UnitDeferred,
    UnitFinished,
    UnitResult,
    UnitStarted,
)
from neffbuild.farm.retries import Retry, enlarged, retry_of
from neffbuild.farm.schedule import Queue, Waiting
from neffbuild.farm.worker import Busy, Job
from neffbuild.toolchain.base import Unit

_LOOK_SECONDS = 0.2
_log = logging.getLogger(__name__)


class Dispatch:
    """Keeps the executor busy until every unit has a result."""

    def __init__(
        self,
        executor: Executor,
        admission: Admission,
        store: Store,
        farm: FarmConfig,
        job: Callable[[Waiting], Job],
        on_event: Callable[[Event], None],
        group_of: Callable[[Unit], str | None],
    ) -> None:
        self.results: dict[str, UnitResult] = {}
        self._executor = executor
        self._admission = admission
        self._store = store
        self._farm = farm
        self._job = job
        self._on_event = on_event
        self._group_of = group_of
        self._queue = Queue(())
        self._flying: dict[str, tuple[Waiting, Admitted]] = {}
        self._failures: Counter[str] = Counter()
        self._last_failures: dict[str, UnitResult] = {}
        self._failed: str | None = None
        self._short: set[str] = set()
        self._fill_at = 0.0

    def work_off(self, units: Sequence[Waiting], interrupts: Interrupts) -> None:
        """Give every unit a result, starting them in the order given as far as there is room."""
        self._begin(units)
        announced: FarmStopping | None = None
        while True:
            stopping = self._stopping(interrupts)
            if stopping is not None and stopping != announced:
                announced = stopping
                self._stop(stopping)
            if stopping is None:
                self._fill()
            self._tell_seen()
            if not self._executor.running and (stopping is not None or not self._queue):
                break
            for job, ended in self._wait():
                self._see(job, ended)
            self._admission.watch()
        for waiting in list(self._queue):
            cause = CANCELLED if interrupts.stopping else NOT_STARTED
            cancelled = UnitResult.of(waiting.unit, Outcome.CANCELLED, cause=cause)
            # One that was to be tried again has failed until then.
            self._finish(waiting.unit, self._last_failures.get(waiting.unit.key, cancelled))

    def _begin(self, units: Sequence[Waiting]) -> None:
        self._queue = Queue(units)
        seconds = {waiting.unit.key: waiting.claim.seconds for waiting in units}
        self._on_event(FarmStarted(len(units), self._admission.workers, seconds))
        if self._admission.fewer is not None:
            self._short.add("cpus")
            self._on_event(
                FewerWorkers(self._admission.asked, self._admission.workers, self._admission.fewer)
            )

    def _stopping(self, interrupts: Interrupts) -> FarmStopping | None:
        if interrupts.stopping:
            return FarmStopping(interrupts.cancelling)
        return FarmStopping(False, self._failed) if self._failed is not None else None

    def _stop(self, stopping: FarmStopping) -> None:
        self._on_event(stopping)
        for job in self._executor.withdraw():
            waiting, _ = self._landed(job.unit)
            self._queue.defer(waiting)
        if stopping.cancelling:
            self._executor.cancel()

    def _fill(self) -> None:
        now = time.monotonic()
        # Looking takes a lock that all farms of the host share: not for each word from a worker.
        if now < self._fill_at:
            return
        self._fill_at = now + _LOOK_SECONDS
        while True:
            due = self._due(now)
            decision = self._admission.admit(due)
            if not isinstance(decision, Admitted):
                break
            waiting = due[decision.place]
            self._queue.take(waiting)
            self._flying[waiting.unit.key] = (waiting, decision)
            self._executor.start(self._job(waiting))
        if isinstance(decision, Held) and decision.short not in self._short:
            self._short.add(decision.short)
            running = self._executor.running
            self._on_event(FewerWorkers(self._admission.asked, running, decision.reason))

    def _due(self, now: float) -> Sequence[Waiting]:
        """The units that may be started, but those that a running compile makes too."""
        making = {self._group_of(waiting.unit) for waiting, _ in self._flying.values()} - {None}
        due = self._queue.due(now)
        return [one for one in due if self._group_of(one.unit) not in making] if making else due

    def _wait(self) -> Sequence[tuple[Job, UnitResult | Busy]]:
        if self._executor.running:
            ended = self._executor.finished(_LOOK_SECONDS)
            self._tell_seen()
            return ended
        pause = self._queue.next_due() - time.monotonic()
        time.sleep(min(max(pause, 0.01), _LOOK_SECONDS))
        return ()

    def _tell_seen(self) -> None:
        for event in self._executor.seen():
            if isinstance(event, UnitStarted) and event.unit.key in self._flying:
                waiting, admitted = self._flying[event.unit.key]
                event = replace(
                    event,
                    expected_seconds=waiting.claim.seconds,
                    reserved_bytes=admitted.needs.memory,
                    attempt=waiting.attempt,
                    warning=admitted.warning,
                )
            self._on_event(event)

    def _see(self, job: Job, ended: UnitResult | Busy) -> None:
        unit = job.unit
        waiting, _ = self._landed(unit)
        if isinstance(ended, Busy):
            if not waiting.waits:
                # Not worth waiting for while there is other work: the two farms then share the grid.
                self._defer(replace(waiting, waits=True), ended.reason)
                return
            cause = Cause(CauseKind.STORE, ended.reason, "run `compile` again")
            ended = UnitResult.of(unit, Outcome.FAILED, cause=cause)
        ended = replace(ended, attempts=waiting.attempt)
        retry = self._retry(waiting, ended)
        if retry is not None and ended.cause is not None:
            again = Waiting(
                unit,
                enlarged(waiting.claim, ended),
                attempt=waiting.attempt + 1,
                alone=retry.alone,
                waits=waiting.waits,
                not_before=time.monotonic() + retry.pause,
            )
            self._last_failures[unit.key] = ended
            self._defer(again, ended.cause.text, retry.pause)
            return
        if ended.outcome is Outcome.FAILED and self._farm.fail_fast and self._failed is None:
            self._failed = ended.bucket_name
        self._finish(unit, ended)

    def _retry(self, waiting: Waiting, ended: UnitResult) -> Retry | None:
        if ended.outcome is not Outcome.FAILED or ended.cause is None:
            return None
        key, limit = waiting.unit.key, self._farm.memory
        self._failures[key] += 1
        return retry_of(
            ended.cause,
            failures=self._failures[key],
            was_alone=waiting.alone,
            over_own_limit=limit is not None and (ended.peak_memory_bytes or 0) > limit,
            retries=self._farm.retries,
            chance=random.random(),
        )

    def _landed(self, unit: Unit) -> tuple[Waiting, Admitted]:
        self._fill_at = 0.0
        self._admission.release(unit.key)
        return self._flying.pop(unit.key)

    def _defer(self, waiting: Waiting, reason: str, pause: float = 0.0) -> None:
        self._queue.defer(waiting)
        self._on_event(UnitDeferred(waiting.unit, reason, pause, waiting.alone))

    def _finish(self, unit: Unit, result: UnitResult) -> None:
        self.results[unit.key] = result
        with warned(f"what became of {result.bucket_name} could not be recorded"):
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


@contextmanager
def warned(what: str) -> Iterator[None]:
    """Let a store that refuses a record cost a warning, not the run: the artifacts are what counts."""
    try:
        yield
    except NeffbuildError as error:
        _log.warning(what, extra={"fields": {"cause": error.message}})
