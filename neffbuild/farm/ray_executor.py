"""Run units on the nodes of a Ray cluster, one task for each.

Ray places tasks, and starts those again whose node was lost; what a task does on its node is in
`neffbuild.farm.ray_node`. Artifacts go from there straight to a store that driver and nodes share, so
what has been committed outlives this process.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Self

from neffbuild import __version__
from neffbuild.cache.catalog import Hit, read_entry
from neffbuild.cache.store import Store
from neffbuild.config.build import FarmConfig
from neffbuild.config.errors import ConfigError, StoreError
from neffbuild.farm.outcomes import (
    CANCELLED,
    Cause,
    Outcome,
    UnitDeferred,
    UnitResult,
    UnitStarted,
)
from neffbuild.farm.ray_causes import (
    NODE_OUT_OF_MEMORY,
    lost_machines,
    no_node,
    node_fails,
    node_refuses,
    not_shared,
)
from neffbuild.farm.ray_connection import connected, import_ray
from neffbuild.farm.ray_node import Ended, Order, Watcher, run_unit
from neffbuild.farm.ray_rules import alone_on, asked, living_nodes, shortfall, task_options
from neffbuild.farm.worker import Busy, Job
from neffbuild.toolchain.base import Toolchain

RESTARTS = 3
"""How often Ray starts a unit again whose node, or whose Ray worker process, was lost."""
_NODES_SECONDS = 1.0
_FORCE_SECONDS = 10.0
"""Between asking cancelled tasks to end and ending their processes."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Flight:
    """A unit that Ray has. `node` is where it runs (None: it waits for a place), `short_since` since
    when no living node could hold it."""

    job: Job
    resources: dict[str, float]
    node: str | None = None
    starts: int = 0
    short_since: float | None = None


class RayExecutor:
    """Units of `toolchain` on the cluster at `farm.address`, published to `store`, which every node
    must reach by the same URL.

    A unit that no living node could hold even when idle is not waited for longer than
    `farm.node_wait` seconds. Leaving the context ends whatever still runs.
    """

    def __init__(self, toolchain: Toolchain, store: Store, farm: FarmConfig) -> None:
        self._toolchain = toolchain
        self._store = store
        self._farm = farm
        self._ray = import_ray()
        self._connection = ExitStack()
        self._flights: dict[Any, _Flight] = {}
        self._events: list[UnitStarted | UnitDeferred] = []
        self._hosts: dict[str, str] = {}
        self._waited_for: set[str] = set()
        self._nodes_seen = 0.0
        self._cancelling = False
        self._force_at = float("inf")
        self._task: Any = None
        self._watcher: Any = None
        self._taking: Any = None

    def __enter__(self) -> Self:
        ray = self._ray
        self._connection.enter_context(connected(ray, self._farm.address))
        here = ray.get_runtime_context().get_node_id()
        beside = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(here, soft=False)
        self._watcher = (
            ray.remote(Watcher)
            .options(num_cpus=0, max_restarts=-1, scheduling_strategy=beside)
            .remote()
        )
        self._taking = self._watcher.take.remote()
        self._task = ray.remote(run_unit)
        return self

    def __exit__(self, *exception: object) -> None:
        self._cancel(force=True)
        self._connection.close()

    @property
    def running(self) -> int:
        """Units handed to Ray and not yet finished."""
        return len(self._flights)

    def start(self, job: Job) -> None:
        """Hand a unit to Ray; how it ends comes from `finished`."""
        unit, device_for = job.unit, self._toolchain.capabilities.device_for
        resources = asked(
            cpus=self._farm.cpus,
            needs_device=device_for(unit.config, unit.shape) is not None,
            memory=job.reserved or job.memory,
            own=self._farm.resources,
        )
        if job.alone:
            resources = alone_on(resources, living_nodes(self._ray.nodes()))
        # The driver's environment, which may hold credentials, is none of a node's business.
        order = Order(replace(job, environment={}), self._toolchain.name, self._store.url)
        try:
            ref = self._task.options(
                name=job.unit.bucket_name,
                max_retries=RESTARTS,
                retry_exceptions=False,
                **task_options(resources),
            ).remote(__version__, pickle.dumps(order), job.unit.key, self._watcher)
        except ValueError as error:
            raise ConfigError(
                f"Ray does not take what each unit would ask for: {error}",
                field="farm.resources",
                value=self._farm.resources,
                hint="amounts above 1 are whole numbers, and names are those that `ray status` shows",
            ) from error
        self._flights[ref] = _Flight(job, resources)

    def seen(self) -> Sequence[UnitStarted | UnitDeferred]:
        """Units that a node has taken up since the last call, and those that lost theirs."""
        ready, _ = self._ray.wait([self._taking], timeout=0)
        if ready:
            by_key = {flight.job.unit.key: flight for flight in self._flights.values()}
            # A watcher that is lost costs progress only: Ray starts another.
            with contextlib.suppress(self._ray.exceptions.RayError):
                for key, node in self._ray.get(self._taking):
                    if key in by_key:
                        self._began(by_key[key], node)
            self._taking = self._watcher.take.remote()
        events, self._events = self._events, []
        return events

    def finished(self, timeout: float) -> Sequence[tuple[Job, UnitResult | Busy]]:
        """What has ended since the last call, waiting up to `timeout` seconds for something to end, and
        what cannot be placed."""
        ended = self._unplaceable()
        if time.monotonic() > self._force_at:
            self._force_at = float("inf")
            self._cancel(force=True)
        if not self._flights:
            return ended
        refs = list(self._flights)
        self._ray.wait(refs, num_returns=1, timeout=0 if ended else timeout)
        ready, _ = self._ray.wait(refs, num_returns=len(refs), timeout=0)
        for ref in ready:
            flight = self._flights.pop(ref)
            ended.append((flight.job, self._answer(ref, flight)))
        return ended

    def withdraw(self) -> Sequence[Job]:
        """Take back the units that still wait for a place."""
        self._events = list(self.seen())
        waiting = [ref for ref, flight in self._flights.items() if flight.node is None]
        for ref in waiting:
            self._ray.cancel(ref)
        return [self._flights.pop(ref).job for ref in waiting]

    def cancel(self) -> None:
        """Ask every unit to end now; those that do not are ended with their Ray workers."""
        self._cancelling = True
        self._force_at = time.monotonic() + _FORCE_SECONDS
        self._cancel(force=False)

    def _cancel(self, *, force: bool) -> None:
        for ref in self._flights:
            self._ray.cancel(ref, force=force)

    def _began(self, flight: _Flight, node: str) -> None:
        if flight.node is not None:
            self._lost(flight)
        flight.node, flight.short_since = node, None
        flight.starts += 1
        self._events.append(UnitStarted(flight.job.unit))

    def _lost(self, flight: _Flight) -> None:
        host = self._hosts.get(str(flight.node), flight.node)
        flight.node = None
        reason = f"lost machine {host}: Ray starts the unit on another"
        self._events.append(UnitDeferred(flight.job.unit, reason))

    def _unplaceable(self) -> list[tuple[Job, UnitResult | Busy]]:
        """Looks, once a second, for units whose node is gone and for those no living node could hold."""
        now = time.monotonic()
        if now < self._nodes_seen + _NODES_SECONDS:
            return []
        self._nodes_seen = now
        nodes = living_nodes(self._ray.nodes())
        alive = {node.id: node.host for node in nodes}
        self._hosts.update(alive)
        ended: list[tuple[Job, UnitResult | Busy]] = []
        for ref, flight in list(self._flights.items()):
            if flight.node is not None and flight.node not in alive:
                self._lost(flight)
            if flight.node is not None:
                continue
            reason = shortfall(flight.resources, nodes)
            if reason is None:
                flight.short_since = None
                continue
            if flight.short_since is None:
                flight.short_since = now
                self._warn_once(reason)
            if now - flight.short_since >= self._farm.node_wait:
                self._ray.cancel(ref)
                ended.append((self._flights.pop(ref).job, _failed(flight, no_node(reason))))
        return ended

    def _warn_once(self, shortfall: str) -> None:
        if self._farm.node_wait and shortfall not in self._waited_for:
            self._waited_for.add(shortfall)
            wait = f"waits up to {self._farm.node_wait:g} s for a node that holds it"
            _log.warning("a unit %s: %s", wait, shortfall)

    def _answer(self, ref: Any, flight: _Flight) -> UnitResult | Busy:
        unit, errors = flight.job.unit, self._ray.exceptions
        if not flight.starts:
            self._events.append(UnitStarted(unit))
        try:
            answer = self._ray.get(ref)
        except errors.TaskCancelledError:
            return UnitResult.of(unit, Outcome.CANCELLED, cause=CANCELLED)
        except errors.OutOfMemoryError:
            return _failed(flight, NODE_OUT_OF_MEMORY)
        except errors.RayTaskError as error:
            return _failed(flight, node_fails(error))
        except errors.RayError as error:
            if self._cancelling:
                return UnitResult.of(unit, Outcome.CANCELLED, cause=CANCELLED)
            return _failed(flight, lost_machines(flight.starts, error))
        if isinstance(answer, str):
            return _failed(flight, node_refuses(answer))
        ended: Ended = pickle.loads(answer)
        return self._checked(flight, ended)

    def _checked(self, flight: _Flight, ended: Ended) -> UnitResult | Busy:
        result, job = ended.result, flight.job
        if isinstance(result, Busy):
            return result
        if result.outcome in (Outcome.BUILT, Outcome.CACHED):
            with contextlib.suppress(OSError):
                job.log.unlink()  # an earlier failure's
            if not self._sees(job.unit.key):
                return _failed(flight, not_shared(self._store.url))
        elif ended.log is not None:
            with contextlib.suppress(OSError):
                job.log.parent.mkdir(parents=True, exist_ok=True)
                job.log.write_bytes(ended.log)
                return replace(result, log=job.log)
        return result

    def _sees(self, key: str) -> bool:
        """Whether what a node says it has stored is in the store as seen from here. Where the store does
        not answer, the node's word is taken."""
        try:
            return isinstance(read_entry(self._store, key), Hit)
        except StoreError as error:
            _log.warning("what nodes store cannot be seen: %s", error.message)
            return True


def _failed(flight: _Flight, cause: Cause) -> UnitResult:
    return UnitResult.of(flight.job.unit, Outcome.FAILED, cause=cause)
