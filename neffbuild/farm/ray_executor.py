"""Run units on the nodes of a Ray cluster, one task for each.

Ray places tasks, and starts those again whose node was lost; what a task does on its node is in
`neffbuild.farm.ray_node`. Artifacts go from there straight to a store that driver and nodes share, so
what has been committed outlives this process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from neffbuild import __version__
from neffbuild.cache.catalog import Hit, read_entry
from neffbuild.cache.store import Store
from neffbuild.config.build import FarmConfig
from neffbuild.config.errors import ConfigError, MissingExtra, StoreError
from neffbuild.farm.outcomes import (
    CANCELLED,
    Cause,
    CauseKind,
    Outcome,
    UnitDeferred,
    UnitResult,
    UnitStarted,
    lost_worker,
)
from neffbuild.farm.ray_node import Ended, Order, Watcher, run_unit
from neffbuild.farm.ray_rules import asked, living_nodes, shortfall, task_options
from neffbuild.farm.worker import Busy, Job
from neffbuild.toolchain.base import Toolchain

RESTARTS = 3
"""How often Ray starts a unit again whose node, or whose Ray worker process, was lost."""
_NODES_SECONDS = 1.0
_PROBE_SECONDS = 10.0
_FORCE_SECONDS = 10.0
"""Between asking cancelled tasks to end and ending their processes."""
_NODE_VARIABLES = {"RAY_kill_child_processes_on_worker_exit": "false"}
"""A server that outlives its Ray worker ends what runs under it and removes its folder; killed by Ray
at that moment, it could not."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Flight:
    """A unit that Ray has. `node` is where it runs (None: it waits for a place), `short_since` since
    when no living node could hold it."""

    job: Job
    resources: dict[str, float]
    node: str | None = None
    starts: int = 0
    short_since: float | None = field(default=None)


class RayExecutor:
    """Units of `toolchain` on the cluster at `farm.address`, published to `store`, which every node
    must reach by the same URL.

    A unit that no living node could hold even when idle is not waited for longer than
    `farm.node_wait` seconds. Leaving the context ends whatever still runs.
    """

    def __init__(self, toolchain: Toolchain, store: Store, farm: FarmConfig) -> None:
        self._toolchain = toolchain
        self._store = store
        self._farm = _without_client(farm)
        self._ray = _import_ray()
        self._flights: dict[Any, _Flight] = {}
        self._events: list[UnitStarted | UnitDeferred] = []
        self._hosts: dict[str, str] = {}
        self._nodes_seen = 0.0
        self._cancelled_at: float | None = None
        self._task: Any = None
        self._watcher: Any = None
        self._taking: Any = None

    def __enter__(self) -> Self:
        ray = self._ray
        self._connect()
        here = ray.get_runtime_context().get_node_id()
        beside = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(here, soft=False)
        self._watcher = ray.remote(Watcher).options(num_cpus=0, scheduling_strategy=beside).remote()
        self._taking = self._watcher.take.remote()
        self._task = ray.remote(run_unit)
        return self

    def __exit__(self, *exception: object) -> None:
        for ref in self._flights:
            self._ray.cancel(ref, force=True)
        self._ray.shutdown()

    @property
    def running(self) -> int:
        """Units handed to Ray and not yet finished."""
        return len(self._flights)

    def start(self, job: Job) -> None:
        """Hand a unit to Ray; how it ends comes from `finished`."""
        resources = asked(
            cpus=self._farm.cpus,
            needs_device=self._toolchain.capabilities.needs_device,
            memory=job.reserved or job.memory,
            own=self._farm.resources,
        )
        # The driver's environment, which may hold credentials, is none of a node's business.
        order = Order(replace(job, environment={}), self._toolchain.name, self._store.url)
        ref = self._task.options(
            name=job.unit.shape.bucket_name,
            max_retries=RESTARTS,
            retry_exceptions=False,
            **task_options(resources),
        ).remote(__version__, pickle.dumps(order), job.unit.key, self._watcher)
        self._flights[ref] = _Flight(job, resources)

    def seen(self) -> Sequence[UnitStarted | UnitDeferred]:
        """Units that a node has taken up since the last call, and those that lost theirs."""
        ready, _ = self._ray.wait([self._taking], timeout=0)
        if ready:
            by_key = {flight.job.unit.key: flight for flight in self._flights.values()}
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
        if (
            self._cancelled_at is not None
            and time.monotonic() > self._cancelled_at + _FORCE_SECONDS
        ):
            self._cancelled_at = None
            for ref in self._flights:
                self._ray.cancel(ref, force=True)
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
        for ref in self._flights:
            self._ray.cancel(ref)
        self._cancelled_at = time.monotonic()

    def _connect(self) -> None:
        # Its commentary on lost nodes and scarce resources would go to stdout, among results; what it
        # comes to is said in outcomes and events.
        self._ray._private.worker._worker_logs_enabled = False
        # Ray reads them when it is connected: nothing is reported to its makers, and a unit that was
        # ended for the memory it took is for the farm to try again, with more memory asked for.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_task_oom_retries", "0")
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        address = self._farm.address
        try:
            _probe(os.environ.get("RAY_ADDRESS", address) if address == "auto" else address)
            self._ray.init(
                address,
                log_to_driver=False,
                logging_level="ERROR",
                runtime_env={"env_vars": _NODE_VARIABLES},
            )
        except (OSError, RuntimeError, ValueError) as error:
            text = " ".join(str(error).split())
            raise ConfigError(
                f"cannot join the Ray cluster at {address!r}: {text}",
                field="farm.address",
                value=address,
                hint="run this on a node of the cluster (`ray status` shows it there), or start one: "
                "ray start --head",
            ) from error
        # Ray ends the process on SIGTERM; what runs is to be ended first.
        for number, handler in handlers.items():
            with contextlib.suppress(
                ValueError
            ):  # not in the main thread, where Ray sets none either
                signal.signal(number, handler)

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
            flight.short_since = flight.short_since or now
            if now - flight.short_since >= self._farm.node_wait:
                self._ray.cancel(ref)
                ended.append((self._flights.pop(ref).job, _failed(flight, _no_node(reason))))
        return ended

    def _answer(self, ref: Any, flight: _Flight) -> UnitResult | Busy:
        unit, errors = flight.job.unit, self._ray.exceptions
        if not flight.starts:
            self._events.append(UnitStarted(unit))
        try:
            answer = self._ray.get(ref)
        except errors.TaskCancelledError:
            return UnitResult.of(unit, Outcome.CANCELLED, cause=CANCELLED)
        except errors.OutOfMemoryError:
            return _failed(flight, _OUT_OF_MEMORY)
        except errors.RayTaskError as error:
            return _failed(flight, _refused(f"a node failed before the compile: {_last(error)}"))
        except errors.RayError as error:
            if self._cancelled_at is not None:
                return UnitResult.of(unit, Outcome.CANCELLED, cause=CANCELLED)
            return _failed(flight, _lost_machine(flight, error))
        if isinstance(answer, str):
            return _failed(flight, _refused(answer))
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
                return _failed(flight, _not_shared(self._store.url))
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


def _probe(address: str) -> None:
    """Raise `OSError` where nobody listens at HOST:PORT: Ray would wait for minutes."""
    host, _, port = address.rpartition(":")
    if port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), _PROBE_SECONDS).close()


def _without_client(farm: FarmConfig) -> FarmConfig:
    if "://" in farm.address:
        raise ConfigError(
            f"farm.address {farm.address!r} is not HOST:PORT or auto",
            field="farm.address",
            value=farm.address,
            hint="through Ray Client the driver would not be on a node: run `neffbuild compile` on one, "
            "or hand it to `ray job submit`",
        )
    return farm


def _import_ray() -> Any:
    try:
        import ray
        import ray.exceptions
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise MissingExtra(
            f"the executor ray needs Ray, which cannot be imported: {error}",
            field="farm.executor",
            value="ray",
            hint="pip install 'neffbuild[ray]', here and on every node",
        ) from error
    return ray


_OUT_OF_MEMORY = Cause(
    CauseKind.OUT_OF_MEMORY,
    "Ray ended the unit because its node ran out of memory",
    "use nodes with more memory, or set `farm.memory` so that fewer units share one",
)


def _failed(flight: _Flight, cause: Cause) -> UnitResult:
    return UnitResult.of(flight.job.unit, Outcome.FAILED, cause=cause)


def _no_node(reason: str) -> Cause:
    return Cause(
        CauseKind.REFUSED,
        f"no node of the Ray cluster can take the unit: {reason}",
        "add such a node, or lower `farm.memory` or `farm.resources`; where nodes join when they are "
        "asked for, set `farm.node_wait`",
    )


def _refused(text: str) -> Cause:
    return Cause(
        CauseKind.REFUSED, text, "install the driver's neffbuild and toolchain on every node"
    )


def _lost_machine(flight: _Flight, error: Exception) -> Cause:
    kind = type(error).__name__
    return lost_worker(f"lost machine: started {flight.starts} times and lost each time ({kind})")


def _not_shared(url: str) -> Cause:
    return Cause(
        CauseKind.STORE,
        f"a node has stored the unit in {url}, but it is not there as seen from here",
        "name a store that every node reaches by the same URL: s3://BUCKET/PREFIX, or a folder of a "
        "file system that all of them mount",
    )


def _last(error: BaseException) -> str:
    """The last line of what Ray makes of an exception: the exception itself, below its traceback."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
