"""Farms whose processes are killed: only whole entries, nothing left, and the next run completes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import farmtools
import psutil
import pytest

from neffbuild.cache.directory import DirectoryStore
from neffbuild.farm.local import LocalExecutor
from neffbuild.farm.outcomes import CauseKind, FarmStarted, UnitDeferred, UnitFinished, UnitResult
from neffbuild.farm.worker import Busy, Job
from neffbuild.toolchain.registry import load_toolchain


def wait_for(farm: subprocess.Popen[str], event: str) -> None:
    assert farm.stderr is not None
    while farm.stderr.readline() != f"{event}\n":
        assert farm.poll() is None


def kill_main(farm: subprocess.Popen[str]) -> None:
    os.kill(farm.pid, signal.SIGKILL)


def kill_group(farm: subprocess.Popen[str]) -> None:
    os.killpg(farm.pid, signal.SIGKILL)


def kill_everything(farm: subprocess.Popen[str]) -> None:
    for process in [psutil.Process(farm.pid), *psutil.Process(farm.pid).children(recursive=True)]:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


@pytest.mark.parametrize(
    ("kill", "rounds"), [(kill_main, 8), (kill_group, 8), (kill_everything, 6)]
)
def test_a_farm_killed_at_any_moment_leaves_whole_entries_only(
    folder: Path, kill: Callable[[subprocess.Popen[str]], None], rounds: int
) -> None:
    count = 80
    farmtools.order(folder, seconds=0.06)
    chance = random.Random(rounds)
    for number in range(rounds):
        with farmtools.start(folder, count) as farm:
            # Some rounds hit a farm that is just starting, the others one at work.
            wait_for(farm, "FarmStarted" if number % 4 == 0 else "UnitFinished")
            time.sleep(chance.uniform(0.0, 0.25))
            assert farm.poll() is None
            kill(farm)
        assert farmtools.becomes_empty(farmtools.left_processes, 5)
        farmtools.check_store(folder)
        if kill is not kill_everything:  # there nobody is left who could
            assert farmtools.becomes_empty(farmtools.left_folders, 5)
    built = farmtools.check_store(folder)
    assert 0 < built < count
    result = farmtools.run(folder, count)
    assert result.counts["cached"] == built
    assert result.counts["built"] == count - built
    assert farmtools.check_store(folder) == count


def wait_for_compilers(folder: Path, count: int) -> tuple[list[psutil.Process], psutil.Process]:
    """The programs that `count` workers have started and wait for, and one of the workers."""
    deadline = time.monotonic() + 20
    while len(found := [p for p in farmtools.left_processes() if p.name() == "sleep"]) < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found, psutil.Process(farmtools.journal(folder)[-1][1])


def test_a_farm_that_is_killed_takes_long_compiles_with_it(folder: Path) -> None:
    farmtools.order(folder, seconds=300)
    with farmtools.start(folder, 2) as farm:
        wait_for_compilers(folder, 2)
        farm.kill()
    assert farmtools.becomes_empty(farmtools.left_processes, 5)
    assert farmtools.becomes_empty(farmtools.left_folders, 5)


def kill_together(*processes: psutil.Process) -> None:
    """None of them has time to notice that another is gone."""
    for process in processes:
        process.suspend()
    for process in processes:
        process.kill()


def test_a_farm_killed_but_for_its_worker_and_compiler(folder: Path) -> None:
    farmtools.order(folder, seconds=300)
    with farmtools.start(folder, 1) as farm:
        (compiler,), worker = wait_for_compilers(folder, 1)
        supervisor = worker.parent()
        assert supervisor is not None
        server = supervisor.parent()
        assert server is not None
        kill_together(psutil.Process(farm.pid), server, supervisor)
    assert farmtools.becomes_empty(lambda: [worker] if worker.is_running() else [], 5)
    # Nobody is left to end the compiler but the next farm.
    assert compiler.is_running()
    farmtools.order(folder)
    assert farmtools.run(folder, 1).counts["built"] == 1
    assert not farmtools.left_processes()


@pytest.mark.parametrize("with_server", [False, True])
def test_a_supervisor_killed_costs_its_unit_and_leaves_nothing(
    folder: Path, with_server: bool
) -> None:
    # One process that `hang` starts leaves its group and its parent: the server alone can find it.
    farmtools.order(folder, seconds=300, **({} if with_server else {"b1": "hang"}))
    count = 1 if with_server else 3

    def kill() -> None:
        _, worker = wait_for_compilers(folder, count)
        supervisor = worker.parent()
        assert supervisor is not None
        server = supervisor.parent()
        assert server is not None
        if with_server:
            server.kill()
        supervisor.kill()

    killer = threading.Thread(target=kill, daemon=True)

    def on_event(event: object) -> None:
        if isinstance(event, FarmStarted):
            killer.start()

    (unit,) = farmtools.run(folder, 1, on_event=on_event).units
    assert unit.cause is not None
    assert unit.cause.kind is CauseKind.LOST_WORKER
    assert not farmtools.left_processes()


def test_workers_supervisors_and_the_server_killed_at_random_cost_their_own_units(
    folder: Path,
) -> None:
    count, kills = 100, 30
    farmtools.order(folder, seconds=0.02)
    chance = random.Random(7)
    killed: list[int] = []

    def kill_at_random() -> None:
        while len(killed) < kills:
            time.sleep(chance.uniform(0.01, 0.06))
            # The server, the supervisors, the workers and what they have started; not a server
            # that is still starting: one that never comes up is a farm that cannot work.
            below = psutil.Process().children(recursive=True)
            if len(below) > 2:
                victim = chance.choice(below)
                try:
                    victim.kill()
                except psutil.NoSuchProcess:  # it has just ended
                    continue
                killed.append(victim.pid)

    killer = threading.Thread(target=kill_at_random, daemon=True)

    def on_event(event: object) -> None:
        if isinstance(event, FarmStarted):
            killer.start()

    result = farmtools.run(folder, count, on_event=on_event)
    assert len(killed) == kills
    assert result.counts["built"] + result.counts["failed"] == count
    assert 0 < result.counts["failed"] <= kills + 5
    assert farmtools.check_store(folder) >= result.counts["built"]
    assert farmtools.run(folder, count).counts["failed"] == 0
    assert farmtools.check_store(folder) == count


def interrupted(
    folder: Path, count: int, *signals: signal.Signals, seconds: float
) -> tuple[Counter[str], float]:
    """Outcomes of a farm sent these signals while its first units run, and how long it took to end."""
    farmtools.order(folder, seconds=seconds)
    with farmtools.start(folder, count) as farm:
        wait_for(farm, "UnitStarted")
        while not (folder / "journal").exists():
            time.sleep(0.01)
        began = time.monotonic()
        for number in signals:
            # As a terminal does: to the whole foreground process group.
            os.killpg(farm.pid, number)
            time.sleep(0.3)
        output, errors = farm.communicate(timeout=20)
    assert "Traceback" not in errors
    document = json.loads(output)
    assert document["interrupted"]
    return Counter(unit["outcome"] for unit in document["units"]), time.monotonic() - began


def test_one_interrupt_finishes_what_runs(folder: Path) -> None:
    outcomes, _ = interrupted(folder, 12, signal.SIGINT, seconds=1)
    assert outcomes == {"built": 2, "cancelled": 10}
    assert farmtools.check_store(folder) == 2


@pytest.mark.parametrize(
    "signals", [(signal.SIGINT, signal.SIGINT), (signal.SIGTERM,), (signal.SIGHUP,)]
)
def test_two_interrupts_a_sigterm_or_a_sighup_end_what_runs(
    folder: Path, signals: tuple[signal.Signals, ...]
) -> None:
    outcomes, took = interrupted(folder, 6, *signals, seconds=30)
    assert took < 5
    assert outcomes == {"cancelled": 6}
    assert farmtools.check_store(folder) == 0


def test_under_nohup_a_sighup_is_nothing(folder: Path) -> None:
    farmtools.order(folder, seconds=0.5)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        farm = farmtools.start(folder, 2)
    finally:
        signal.signal(signal.SIGHUP, before)
    with farm:
        wait_for(farm, "UnitStarted")
        os.killpg(farm.pid, signal.SIGHUP)
        document = json.loads(farm.communicate(timeout=20)[0])
    assert document["counts"]["built"] == 2


def test_64_processes_want_one_key(folder: Path) -> None:
    farmtools.order(folder, seconds=0.3)
    ended, _ = race(folder, kill_winner=False)
    assert Counter(result.outcome for result in ended) == {"built": 1, "cached": 63}
    assert len(farmtools.journal(folder)) == 1


def test_64_processes_want_one_key_and_the_winner_is_killed(folder: Path) -> None:
    farmtools.order(folder, seconds=0.6)
    ended, _ = race(folder, kill_winner=True)
    assert Counter(result.outcome for result in ended) == {"failed": 1, "built": 1, "cached": 62}
    assert len(farmtools.journal(folder)) == 2


def race(folder: Path, *, kill_winner: bool) -> tuple[list[UnitResult], float]:
    """64 workers of one unit at once, in a farm that does not defer."""
    (unit,) = farmtools.make_units(folder, 1)
    farm = folder / "farm"
    farm.mkdir()
    environment = {name: os.environ[name] for name in ("PATH", "XDG_RUNTIME_DIR")}
    identity = load_toolchain("hostile").identity(unit.config)
    ended: list[UnitResult] = []
    began = time.monotonic()
    with LocalExecutor("hostile", environment, farm) as executor:
        for number in range(64):
            executor.start(
                Job(
                    unit=unit,
                    store=DirectoryStore(folder / "store"),
                    platform=identity.platform,
                    options={},
                    environment=environment,
                    scratch=farm / str(number),
                    shared=farm / "shared",
                    log=folder / "logs" / str(number),
                    lock_wait=30,
                    timeout=None,
                    memory=None,
                )
            )
        while executor.running:
            for _, result in executor.finished(0.05):
                assert not isinstance(result, Busy)
                ended.append(result)
            if kill_winner and (folder / "journal").exists():
                os.kill(farmtools.journal(folder)[0][1], signal.SIGKILL)
                kill_winner = False
    return ended, time.monotonic() - began


def test_two_farms_share_a_grid(folder: Path) -> None:
    count = 10
    farmtools.order(folder, seconds=0.5)
    deferred: list[str] = []

    def on_event(event: object) -> None:
        if isinstance(event, UnitDeferred):
            assert "is locked by process" in event.reason
            deferred.append(event.unit.shape.bucket_name)

    with farmtools.start(folder, count) as other:
        wait_for_compilers(folder, 2)
        mine = farmtools.run(folder, count, on_event=on_event)
        theirs = json.loads(other.communicate(timeout=20)[0])
    assert deferred  # it did not wait where there was other work
    assert len(farmtools.journal(folder)) == count  # no unit was compiled twice
    assert mine.counts["built"] + theirs["counts"]["built"] == count
    assert mine.counts["built"] > 0
    assert theirs["counts"]["built"] > 0
    assert mine.counts["failed"] == theirs["counts"]["failed"] == 0


def test_the_folder_of_a_living_farm_is_left_alone(folder: Path) -> None:
    farmtools.order(folder, seconds=0.2)
    names: list[Path] = []

    def on_event(event: object) -> None:
        # A second farm starts, cleans up and ends while this one runs.
        if isinstance(event, UnitFinished) and not names:
            names.extend(farmtools.left_folders())
            with farmtools.start(folder, 1) as other:
                other.communicate(timeout=20)
            assert other.returncode == 0
            assert set(names) <= set(farmtools.left_folders())

    assert farmtools.run(folder, 4, on_event=on_event).counts["failed"] == 0
    assert names
