"""How many units run at once, and what becomes of those that fail for lack of room or by chance; seen
through whole farms on small hosts."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import farmtools
from farmtools import SmallHost

from neffbuild.farm.admission import Holding, Resources
from neffbuild.farm.outcomes import (
    CauseKind,
    Event,
    FarmStarted,
    FarmStopping,
    FewerWorkers,
    Outcome,
    UnitDeferred,
    UnitFinished,
    UnitMemory,
    UnitStarted,
)
from neffbuild.farm.reservations import FarmClaims, Reservations
from neffbuild.farm.scratch import farm_folder, farms_directory

MIB = 1 << 20
GIB = 1 << 30


class Watched:
    """The events of a farm, and how many units ran at once."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.running: set[str] = set()
        self.most = 0
        self.beside: dict[tuple[str, int], int] = {}

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, UnitStarted):
            self.beside[event.unit.shape.bucket_name, event.attempt] = len(self.running)
            self.running.add(event.unit.key)
        elif isinstance(event, UnitFinished | UnitDeferred):
            self.running.discard(event.unit.key)
        self.most = max(self.most, len(self.running))

    def reasons(self) -> list[str]:
        return [event.reason for event in self.events if isinstance(event, FewerWorkers)]


def test_64_workers_asked_for_follow_memory_and_say_why(folder: Path) -> None:
    farmtools.order(folder, seconds=0.3)
    seen = Watched()
    # The toolchain says nothing, so 1 GiB and a margin is reserved for each.
    result = farmtools.run(folder, 8, workers=64, host=SmallHost(64, 5 * GIB), on_event=seen)
    assert result.counts["built"] == 8
    assert seen.most == 3
    (reason,) = seen.reasons()
    assert reason == (
        "64 workers asked for; 3 run: decode_b5_ctx128 needs 1.2 GiB of memory, 0.9 GiB of the 4.5 GiB "
        "for compiles are free"
    )
    started = [event for event in seen.events if isinstance(event, UnitStarted)]
    assert {event.reserved_bytes for event in started} == {round(1.2 * GIB)}
    assert all(event.expected_seconds > 0 for event in started)
    # What was measured is known from now on, of units never built as well: a twentieth of that.
    seen = Watched()
    farmtools.run(folder, 16, workers="auto", host=SmallHost(5, 4 * GIB), on_event=seen)
    assert seen.most == 5
    assert not seen.reasons()


def test_64_workers_asked_for_follow_the_cores_and_say_why(folder: Path) -> None:
    farmtools.order(folder, seconds=0.2)
    seen = Watched()
    host = SmallHost(4, 1 << 40)
    result = farmtools.run(folder, 8, workers=64, cpus=2, host=host, on_event=seen)
    assert result.counts["built"] == 8
    assert seen.most == 2
    assert seen.reasons() == [
        "64 workers asked for; 2 run at once: this host has 4 CPU cores, 2 for each"
    ]
    (begun,) = (event for event in seen.events if isinstance(event, FarmStarted))
    assert begun.workers == 2
    assert len(begun.expected_seconds) == 8


def test_two_farms_never_take_more_than_their_host_has(folder: Path) -> None:
    farms, count = [], 6
    host = (16, 400 * MIB)  # three units at 120 MiB each, 96 of which they really take
    for name in ("one", "other"):
        (folder / name).mkdir()
        behaviour = {f"b{number}": "hold_memory" for number in range(1, count + 1)}
        farmtools.order(folder / name, **behaviour)
        farms.append(farmtools.start(folder / name, count, host=host, memory=120 * MIB, workers=8))
    most, both = 0, False
    ended: dict[int, float] = {}
    while len(ended) < 2:
        most = max(most, farmtools.eaten_bytes())
        claims = [_units_claimed(farm) for farm in farms_directory().glob("farm-*")]
        assert sum(claims) <= 3
        both = both or sum(map(bool, claims)) == 2
        ended |= {farm.pid: time.monotonic() for farm in farms if farm.poll() is not None}
        time.sleep(0.02)
    for farm in farms:
        output, errors = farm.communicate()
        assert json.loads(output)["counts"]["built"] == count, errors
    assert 120 * MIB < most < 3 * 90 * MIB  # two eaters at least, three at most
    assert both  # neither waited for the other to end


def _units_claimed(farm: Path) -> int:
    try:
        return len(json.loads((farm / "reservations.json").read_text())["units"])
    except OSError:  # its farm has just ended
        return 0


def test_what_a_dead_farm_had_reserved_is_free(folder: Path) -> None:
    farmtools.order(folder, seconds=300)
    host = (16, 2 * GIB)
    with farmtools.start(folder, 1, host=host, memory=GIB) as farm:
        assert farmtools.becomes_empty(lambda: [] if (folder / "journal").exists() else [0], 20)
        os.kill(farm.pid, signal.SIGKILL)
    farmtools.order(folder)
    began = time.monotonic()
    result = farmtools.run(folder, 1, host=SmallHost(*host), memory=GIB)
    assert result.counts["built"] == 1
    assert time.monotonic() - began < 15


def test_claims_of_other_farms_are_seen_while_they_live(folder: Path) -> None:
    claims = FarmClaims((Holding("a", Resources(1, 2, 3), resident=4),), 1.5, device_since=2.5)
    with farm_folder() as mine:
        with farm_folder() as other:
            Reservations(other).write(claims)
            with Reservations(mine).exclusive() as others:
                assert others == [claims]
                # Whoever looks meanwhile is told to come again rather than to believe something.
                with Reservations(other).exclusive() as locked_out:
                    assert locked_out is None
            assert Reservations(other).others() == [FarmClaims()]
        assert Reservations(mine).others() == []


def test_a_unit_larger_than_the_host_runs_alone_with_a_warning(folder: Path) -> None:
    farmtools.order(folder, seconds=0.1)
    seen = Watched()
    result = farmtools.run(folder, 3, workers=3, host=SmallHost(8, GIB), on_event=seen)
    assert result.counts["built"] == 3
    assert seen.most == 1
    warnings = {event.warning for event in seen.events if isinstance(event, UnitStarted)}
    assert warnings == {
        "expected to need 1.2 GiB of memory; this host has 0.9 GiB to give: started alone"
    }


def test_a_unit_that_eats_the_hosts_memory_is_ended_before_the_kernel_ends_another(
    folder: Path,
) -> None:
    farmtools.order(folder, seconds=0.5, b4="eat_memory", b3="hold_memory")
    seen = Watched()
    result = farmtools.run(
        folder,
        4,
        toolchain="modest",
        workers=4,
        retries=5,
        host=SmallHost(8, 300 * MIB),
        on_event=seen,
    )
    eater = result.units[3]
    assert [unit.outcome for unit in result.units[:3]] == [Outcome.BUILT] * 3
    assert eater.cause is not None
    assert eater.cause.kind is CauseKind.OUT_OF_MEMORY
    assert "this host had only" in eater.cause.text
    assert eater.peak_memory_bytes is not None
    assert eater.peak_memory_bytes > 250 * MIB
    memory = [e.resident_bytes for e in seen.events if isinstance(e, UnitMemory)]
    assert max(memory) > 60 * MIB
    # Tried again once, alone, with all the host has; the next would end as this one.
    assert eater.attempts == 2
    (deferred,) = (event for event in seen.events if isinstance(event, UnitDeferred))
    assert deferred.alone
    assert seen.beside["decode_b4_ctx128", 2] == 0
    again = [e for e in seen.events if isinstance(e, UnitStarted) and e.attempt == 2]
    assert [event.reserved_bytes for event in again] == [int(300 * MIB * 0.9)]


def test_a_unit_over_its_own_limit_is_not_tried_again(folder: Path) -> None:
    farmtools.order(folder, b1="eat_memory")
    result = farmtools.run(folder, 1, memory=100 * MIB, retries=5)
    assert result.units[0].cause is not None
    assert result.units[0].cause.kind is CauseKind.OUT_OF_MEMORY
    assert result.units[0].attempts == 1


def test_a_lost_worker_is_tried_again_after_a_pause_while_others_go_on(folder: Path) -> None:
    farmtools.order(folder, seconds=0.2, b4="kill_its_supervisor_once")
    seen = Watched()
    result = farmtools.run(folder, 4, workers=1, retries=2, on_event=seen)
    assert result.counts["built"] == 4
    assert [unit.attempts for unit in result.units] == [1, 1, 1, 2]
    (deferred,) = (event for event in seen.events if isinstance(event, UnitDeferred))
    assert 0.5 <= deferred.pause <= 1.0
    assert not deferred.alone
    started = [name for name, _ in farmtools.journal(folder)]
    assert started[0] == started[-1] == "decode_b4_ctx128"


def test_after_a_failure_fail_fast_finishes_what_runs_and_starts_nothing(folder: Path) -> None:
    farmtools.order(folder, seconds=1.5, b8="raise")
    seen = Watched()
    result = farmtools.run(folder, 8, workers=2, fail_fast=True, on_event=seen)
    assert result.counts == {"built": 1, "cached": 0, "failed": 1, "cancelled": 6, "skipped": 0}
    assert not result.interrupted
    assert FarmStopping(False, "decode_b8_ctx128") in seen.events
    (text,) = {
        unit.cause.text for unit in result.units if unit.outcome is Outcome.CANCELLED and unit.cause
    }
    assert "another unit failed" in text


def test_a_unit_that_was_to_be_tried_again_has_failed_when_the_run_ends_before(
    folder: Path,
) -> None:
    farmtools.order(folder, b4="kill_itself", b3="raise")
    result = farmtools.run(folder, 4, workers=1, retries=2, fail_fast=True)
    assert [unit.outcome for unit in result.units] == ["cancelled", "cancelled", "failed", "failed"]
    killed = result.units[3]
    assert killed.cause is not None
    assert killed.cause.kind is CauseKind.OUT_OF_MEMORY
    assert killed.log is not None
