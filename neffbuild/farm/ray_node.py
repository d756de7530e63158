"""What a Ray node does for one unit: the same server, supervisor and worker as a farm of that host.

The Ray worker process itself runs no compiler and holds no memory to speak of: it starts the server,
waits, and hands back how the unit ended. When it dies, with its node, by Ray's hand or for want of a
driver, the server and the supervisors see their connections close and end what they watch over.
"""

from __future__ import annotations

import atexit
import os
import pickle
import socket
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from neffbuild import __version__
from neffbuild.cache.open import open_store
from neffbuild.config.errors import NeffbuildError, UnitsIncomplete
from neffbuild.farm.environment import worker_environment
from neffbuild.farm.local import LocalExecutor
from neffbuild.farm.outcomes import Outcome, UnitResult, lost_worker
from neffbuild.farm.scratch import farm_folder
from neffbuild.farm.worker import Busy, Job
from neffbuild.toolchain.base import Unit
from neffbuild.toolchain.registry import load_toolchain

_LOOK_SECONDS = 0.2
_MUST_AGREE = ("toolchain", "route", "engine", "target", "versions", "source_digest")


@dataclass(frozen=True, slots=True)
class Order:
    """A unit as the driver hands it out. Of `job`, the store, the environment and the folders are the
    driver's and mean nothing on a node."""

    job: Job
    toolchain: str
    store_url: str


@dataclass(frozen=True, slots=True)
class Ended:
    """How it ended, with the log of a unit that failed."""

    result: UnitResult | Busy
    log: bytes | None = None


class Watcher:
    """An actor beside the driver that nodes tell which units they have taken up."""

    def __init__(self) -> None:
        self._began: list[tuple[str, str]] = []

    def began(self, key: str, node: str) -> None:
        self._began.append((key, node))

    def take(self) -> list[tuple[str, str]]:
        """(key, node id) of every start since the last call."""
        began, self._began = self._began, []
        return began


def run_unit(version: str, order: bytes, key: str, watcher: Any) -> bytes | str:
    """The task: a pickled `Ended`, or in words why this node must not compile the unit.

    `version` is the driver's: nothing is unpickled that another version may have written. The results
    of a first and a second start of one unit are the same, because the first entry committed stands.
    """
    if version != __version__:
        return f"{_here()} has neffbuild {__version__}, the driver has {version}"
    return _run(pickle.loads(order), key, watcher)


def _run(order: Order, key: str, watcher: Any) -> bytes | str:
    import ray

    watcher.began.remote(key, ray.get_runtime_context().get_node_id())
    try:
        if reason := refusal(order.job.unit, order.toolchain):
            return f"{_here()} is not what the plan was made for: {reason}"
        job = replace(order.job, store=open_store(order.store_url), environment=_environment(order))
        return pickle.dumps(_farm(order.toolchain, job).run(job))
    except UnitsIncomplete as error:
        cause = lost_worker(f"{_here()}: {error.message}")
        result = UnitResult.of(order.job.unit, Outcome.FAILED, cause=cause)
        return pickle.dumps(Ended(result))
    except NeffbuildError as error:
        return f"{_here()} cannot compile: {error.message}"


def refusal(unit: Unit, toolchain_name: str) -> str | None:
    """What differs between the toolchain the unit's recipe names and this host's, or None."""
    toolchain = load_toolchain(toolchain_name)
    if reason := toolchain.host_refusal(unit.config):
        return reason
    planned, here = unit.recipe["toolchain"], toolchain.identity(unit.config).document()
    differing = [name for name in _MUST_AGREE if planned.get(name) != here[name]]
    return (
        "; ".join(f"{name} {planned.get(name)!r}, here {here[name]!r}" for name in differing)
        or None
    )


class _NodeFarm:
    """The local executor that one Ray worker process keeps from task to task, so that the toolchain is
    imported, and what units share is made, once."""

    def __init__(self, toolchain: str, job: Job) -> None:
        self.toolchain = toolchain
        self._stack = ExitStack()
        self._folder = self._stack.enter_context(farm_folder())
        # Each worker connects to the store for itself; what it needs for that takes long to import.
        modules = [type(job.store).__module__]
        self._executor = self._stack.enter_context(
            LocalExecutor(toolchain, job.environment, self._folder, modules)
        )

    def run(self, job: Job) -> Ended:
        key = job.unit.key
        job = replace(
            job,
            scratch=self._folder / key[:16],
            shared=self._folder / "shared",
            log=self._folder / f"{key}.kept",
        )
        try:
            self._executor.start(job)
            while True:
                for _, result in self._executor.finished(_LOOK_SECONDS):
                    return _ended(result)
        except BaseException:
            # Cancelled by the driver, most often. What was heard of the unit so far is lost with this
            # exception, so the executor is of no further use.
            _close()
            raise

    def close(self) -> None:
        self._stack.close()


_kept: _NodeFarm | None = None


def _farm(toolchain: str, job: Job) -> _NodeFarm:
    global _kept
    if _kept is None or _kept.toolchain != toolchain:
        _close()
        _kept = _NodeFarm(toolchain, job)
    return _kept


def _close() -> None:
    global _kept
    farm, _kept = _kept, None
    if farm is not None:
        farm.close()


atexit.register(_close)


def _environment(order: Order) -> dict[str, str]:
    """The worker's environment: this node's, with the keyed variables of the plan. Credentials are the
    node's own, never the driver's."""
    keyed = order.job.unit.recipe["toolchain"].get("environment", {})
    return worker_environment(os.environ, keyed, order.store_url)


def _ended(result: UnitResult | Busy) -> Ended:
    if isinstance(result, Busy) or result.log is None:
        return Ended(result)
    log = result.log.read_bytes()
    result.log.unlink()
    return Ended(replace(result, log=None), log)


def _here() -> str:
    return f"node {socket.gethostname()}"
