"""What one process does for one unit: lock, look again, capture, compile, commit.

It knows nothing of the farm around it: time and memory limits, the end of the farm and what is left
behind by a compiler are its supervisor's business (`neffbuild.farm.supervisor`).
"""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from neffbuild.cache.catalog import commit_entry, record_files
from neffbuild.cache.entry import Entry
from neffbuild.cache.once import build_once
from neffbuild.cache.recipe import graph_recipe, recipe_key
from neffbuild.cache.store import Store
from neffbuild.config.errors import LockTimeout, NeffbuildError
from neffbuild.farm import processes
from neffbuild.farm.beside import lay_out_beside
from neffbuild.farm.causes import cause_of_exception
from neffbuild.farm.outcomes import Cause, Outcome
from neffbuild.farm.scratch import used_bytes
from neffbuild.toolchain.base import OtherArtifact, Toolchain, Unit


@dataclass(frozen=True, slots=True)
class Job:
    """One unit and everything a worker needs for it, whichever machine it runs on.

    `platform` and `options` are what the graph key is made of beside the graph; `environment` is the
    worker's whole environment but TMPDIR. `scratch` is a folder of the unit's own, not there yet, and
    `shared` one for all units of the farm; `log` is where the output stays if the unit fails. Times are
    in seconds, `memory` in bytes; None is no limit. `reserved` is the memory, in bytes, that is set aside
    for the unit where it is placed: its expected peak, where that is known. `alone`: nothing else shall run
    on its host.
    """

    unit: Unit
    store: Store
    platform: Mapping[str, Any]
    options: Mapping[str, Any]
    environment: Mapping[str, str]
    scratch: Path
    shared: Path
    log: Path
    lock_wait: float
    timeout: float | None
    memory: int | None
    reserved: int | None = None
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Compiling:
    """The worker holds the unit's lock and has found no entry: the compile begins."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """The artifact is there; answered with the unit's peak memory so far, in bytes."""


@dataclass(frozen=True, slots=True)
class Busy:
    """Another process of this host holds the unit's lock."""

    reason: str


@dataclass(frozen=True, slots=True)
class Report:
    """How the worker ended: with the entry that is now stored, or with a cause."""

    outcome: Outcome
    cause: Cause | None = None
    entry: Entry | None = None


def run(job: Job, toolchain: Toolchain, channel: Connection, log: int, supervisor: int) -> NoReturn:
    """Be the worker: never returns. `log` is the descriptor that output goes to; `supervisor` the
    process that forked this one."""
    try:
        processes.die_with_parent(supervisor)
        channel.send(_entered(job, log) or _build(job, toolchain, channel))
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        # Not through the interpreter's end: a thread the toolchain left behind would hold it up.
        os._exit(0)


def _entered(job: Job, log: int) -> Report | None:
    """`_enter`; the report of a unit that has no place to be (a scratch disk without room for a folder)."""
    try:
        _enter(job, log)
    except OSError as error:
        return Report(Outcome.FAILED, cause_of_exception(error))
    return None


def _enter(job: Job, log: int) -> None:
    """Make the process the unit's own: session, output, environment, folder."""
    os.setsid()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Where memory runs out, the kernel shall end a compile and not the farm.
    Path("/proc/self/oom_score_adj").write_text("500")
    temporary = job.scratch / "tmp"
    temporary.mkdir(parents=True)
    os.environ.clear()
    os.environ.update(job.environment, TMPDIR=str(temporary))
    tempfile.tempdir = None
    os.chdir(job.scratch)


def _build(job: Job, toolchain: Toolchain, channel: Connection) -> Report | Busy:
    try:
        entry, built = build_once(
            job.store,
            job.unit.key,
            lambda: _compile(job, toolchain, channel),
            wait=job.lock_wait,
        )
    except LockTimeout as error:
        return Busy(error.message)
    except BaseException as error:  # SystemExit too: a compiler driver may call sys.exit
        traceback.print_exc()
        cause = cause_of_exception(error)
        # Causes are kept in stores, where no absolute path belongs.
        text = cause.text.replace(f"{job.scratch}{os.sep}", "")
        return Report(Outcome.FAILED, replace(cause, text=text))
    return Report(Outcome.BUILT if built else Outcome.CACHED, entry=entry)


def _compile(
    job: Job, toolchain: Toolchain, channel: Connection
) -> tuple[Entry, Mapping[str, Path]]:
    channel.send(Compiling())
    started = time.monotonic()
    lay_out_beside(toolchain, job.unit, job.store, job.shared)
    captured = toolchain.capture(job.unit)
    artifact = toolchain.compile(job.unit, captured, job.scratch, shared=job.shared)
    seconds = time.monotonic() - started
    if not artifact.files:
        raise NeffbuildError("the compile ended without leaving an artifact")
    channel.send(Compiled())
    cpu, largest = _own_use()
    units = 1 + len(artifact.others)
    took = {
        # One compile made them all.
        "compile_seconds": seconds / units,
        "cpu_seconds": cpu / units,
        "peak_memory_bytes": max(channel.recv(), largest),
        "scratch_bytes": used_bytes(job.scratch),
    }
    own = OtherArtifact(
        job.unit.recipe,
        artifact.files,
        artifact.statistics,
        artifact.graph_digest or captured.graph_digest,
    )
    for other in artifact.others:
        try:
            commit_entry(job.store, _entry(job, other, took), other.files)
        except NeffbuildError as error:
            sys.stdout.write(f"neffbuild: what else was made is not stored: {error.message}\n")
    return _entry(job, own, took), artifact.files


def _entry(job: Job, made: OtherArtifact, took: Mapping[str, float]) -> Entry:
    graph = graph_recipe(made.graph_digest, job.platform, job.options)
    return Entry(
        recipe=made.recipe,
        files=record_files(made.files),
        graph_digest=made.graph_digest,
        graph_key=recipe_key(graph),
        statistics={**made.statistics, **took},
    )


def _own_use() -> tuple[float, int]:
    """CPU seconds of this process and its ended children; resident bytes of the largest of them."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu = sum(usage.ru_utime + usage.ru_stime for usage in used)
    return cpu, max(usage.ru_maxrss for usage in used) * 1024
