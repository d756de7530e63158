"""Compile units: order them, keep the executor busy, record what became of each."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from neffbuild.cache.records import append_run
from neffbuild.cache.store import Store
from neffbuild.config.build import FarmConfig
from neffbuild.farm.admission import Claim, Resources
from neffbuild.farm.dispatch import Dispatch, warned
from neffbuild.farm.environment import worker_environment
from neffbuild.farm.executor import Admission, Executor, SlotAdmission
from neffbuild.farm.expectations import prior_of
from neffbuild.farm.history import expectations, read_measured, record_document
from neffbuild.farm.host import Host, LinuxHost
from neffbuild.farm.interrupts import Interrupts
from neffbuild.farm.local import LocalExecutor
from neffbuild.farm.local_admission import LocalAdmission
from neffbuild.farm.outcomes import Event, RunResult
from neffbuild.farm.schedule import Waiting, longest_first
from neffbuild.farm.scratch import farm_folder
from neffbuild.farm.worker import Job
from neffbuild.toolchain.base import Expectation, Toolchain, Unit

_LOCK_WAIT_SECONDS = 7200.0
"""How long a unit waits for another farm of this host that is compiling it, where no `farm.timeout`
says how long a compile may take."""
_COMMIT_SECONDS = 60.0


def compile_units(
    units: Sequence[Unit],
    toolchain: Toolchain,
    store: Store,
    farm: FarmConfig,
    *,
    logs: Path,
    on_event: Callable[[Event], None],
    host: Host | None = None,
    shared: Store | None = None,
) -> RunResult:
    """Compile every unit into `store`: longest expected first, as many at once as fit on `host` (this
    one) beside what its other farms run, at most `farm.workers`. With the executor `ray`, on the nodes of
    its cluster and into `shared`, which they all reach (`store`, where it is not given).

    The units are of one serve config, each once. One that fails costs no other: its cause is in its
    result and in the store's failure records, and its log stays in the folder `logs`. On SIGINT what
    runs is finished and nothing more started; on a second one, SIGTERM or SIGHUP what runs is ended. The
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
    expected = _expected(units, toolchain, store)
    with Interrupts() as interrupts, farm_folder() as folder, ExitStack() as stack:

        def job(waiting: Waiting) -> Job:
            unit = waiting.unit
            lock_wait = (farm.timeout or _LOCK_WAIT_SECONDS) + _COMMIT_SECONDS
            return Job(
                unit=unit,
                store=store,
                platform=identity.platform,
                options={"flags": list(identity.flags)},
                environment=environment,
                # Not one that a lost worker has left.
                scratch=folder / f"{unit.key[:16]}-{waiting.attempt}",
                shared=folder / "shared",
                log=logs / f"{unit.bucket_name}-{unit.key[:12]}.log",
                lock_wait=lock_wait if waiting.waits else 0.0,
                timeout=farm.timeout,
                memory=farm.memory,
                reserved=waiting.claim.needs.memory,
                alone=waiting.alone,
            )

        def group_of(unit: Unit) -> str | None:
            return toolchain.capabilities.together(unit.config, unit.shape)

        executor: Executor
        admission: Admission
        if farm.executor == "ray":
            from neffbuild.farm.ray_executor import RayExecutor

            executor = stack.enter_context(RayExecutor(toolchain, shared or store, farm))
            admission = SlotAdmission(_asked(farm, len(units)))
        else:
            local = LocalExecutor(toolchain.name, environment, folder)
            executor = stack.enter_context(local)
            admission = LocalAdmission(host or LinuxHost(), folder, local, farm, len(units))
        seconds = {key: expectation.seconds for key, expectation in expected.items()}
        dispatch = Dispatch(executor, admission, store, farm, job, on_event, group_of)
        dispatch.work_off(
            [
                Waiting(unit, _claim(unit, expected[unit.key], farm, toolchain))
                for unit in longest_first(units, seconds)
            ],
            interrupts,
        )
    result = RunResult(
        units=tuple(dispatch.results[unit.key] for unit in units),
        wall_seconds=time.monotonic() - began,
        interrupted=interrupts.stopping,
    )
    with warned("the run could not be recorded"):
        append_run(store, record_document(result, units))
    return result


def _asked(farm: FarmConfig, units: int) -> int:
    """Workers on a cluster: all units at once where nobody says how many."""
    return min(farm.workers, units) if isinstance(farm.workers, int) else units


def _expected(
    units: Sequence[Unit], toolchain: Toolchain, store: Store
) -> Mapping[str, Expectation]:
    config, prior = units[0].config, prior_of(toolchain)
    return expectations(units, read_measured(store), lambda shape: prior(config, shape))


def _claim(unit: Unit, expectation: Expectation, farm: FarmConfig, toolchain: Toolchain) -> Claim:
    needs = Resources(
        farm.cpus,
        farm.memory or expectation.memory_bytes,
        expectation.scratch_bytes,
        devices=int(toolchain.capabilities.device_for(unit.config, unit.shape) is not None),
    )
    return Claim(needs, expectation.seconds)
