"""What the live view of a farm says of it, by the events alone."""

from __future__ import annotations

import io
import json
import os
import pty
import time
from typing import Any, cast

import pytest
from cli_samples import Project, order
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from neffbuild.cli.live import FarmState, Running, rendered
from neffbuild.cli.progress import Lines
from neffbuild.farm.outcomes import (
    FarmStarted,
    FarmStopping,
    FewerWorkers,
    Outcome,
    UnitDeferred,
    UnitFinished,
    UnitMemory,
    UnitResult,
    UnitStarted,
)
from neffbuild.grid.shapes import DecodeShape, Family
from neffbuild.toolchain.base import Unit


def unit(number: int) -> Unit:
    shape = DecodeShape(Family.TARGET, 1, 1, 128 * number)
    return Unit(cast(Any, None), shape, {}, f"{number:064x}")


def finished(number: int, outcome: Outcome = Outcome.BUILT) -> UnitFinished:
    return UnitFinished(unit(number), UnitResult.of(unit(number), outcome))


def started(number: int, expected: float = 10.0) -> UnitStarted:
    return UnitStarted(unit(number), expected_seconds=expected, reserved_bytes=1 << 30)


@pytest.fixture
def state() -> FarmState:
    """Four units of ten seconds each, two at once."""
    state = FarmState()
    state.see(FarmStarted(4, 2, {unit(number).key: 10.0 for number in range(1, 5)}), 0.0)
    return state


def test_time_left_is_what_is_expected_at_the_pace_so_far(state: FarmState) -> None:
    assert state.seconds_left(0.0) == 20.0
    state.see(started(1), 0.0)
    state.see(started(2), 0.0)
    assert state.seconds_left(4.0) == 16.0
    # Twice as slow as expected: so are the others.
    state.see(finished(1), 20.0)
    assert state.seconds_left(20.0) == pytest.approx((2 * 20.0 + 0.0) / 2)
    state.see(finished(2), 20.0)
    state.see(started(3), 20.0)
    state.see(started(4), 20.0)
    assert state.seconds_left(25.0) == 15.0
    assert (len(state.running), state.waiting) == (2, 0)


def test_the_last_unit_is_not_divided_among_workers(state: FarmState) -> None:
    for number in (1, 2, 3):
        state.see(started(number), 0.0)
        state.see(finished(number), 10.0)
    state.see(started(4), 10.0)
    assert state.seconds_left(10.0) == 10.0


def test_nothing_expected_nothing_said() -> None:
    state = FarmState()
    state.see(FarmStarted(2, 1), 0.0)
    state.see(started(1, expected=0.0), 0.0)
    assert state.seconds_left(5.0) is None
    state.see(finished(1), 9.0)
    assert state.seconds_left(9.0) is None


def test_a_deferred_unit_waits_again(state: FarmState) -> None:
    state.see(started(1), 0.0)
    state.see(UnitMemory(unit(1), 5 << 20), 1.0)
    assert state.running[unit(1).key].resident == 5 << 20
    state.see(UnitDeferred(unit(1), "out of memory", pause=2.0, alone=True), 2.0)
    state.see(UnitMemory(unit(1), 5 << 20), 2.0)
    assert (len(state.running), state.waiting) == (0, 4)
    state.see(finished(1, Outcome.FAILED), 3.0)
    assert (state.counts[Outcome.FAILED], state.waiting) == (1, 3)


@given(
    names=st.lists(st.text("abc_0123", min_size=1, max_size=90), max_size=5, unique=True),
    elapsed=st.floats(0, 1e5),
    expected=st.floats(0, 1e5),
    width=st.integers(40, 160),
)
def test_no_line_is_longer_than_the_terminal_is_wide(
    names: list[str], elapsed: float, expected: float, width: int
) -> None:
    state = FarmState()
    state.see(FarmStarted(144, 8, {unit(9).key: 1000.0}), 0.0)
    state.running = {
        name: Running(name, 0.0, expected, 12 << 30, resident=10 << 30) for name in names
    }
    out = io.StringIO()
    Console(file=out, width=width).print(rendered(state, elapsed, width))
    lines = out.getvalue().splitlines()
    assert len(lines) == len(names) + 1
    assert all(len(line) <= width for line in lines)
    for name, line in zip(names, lines, strict=False):
        # The first and the last letters are there however narrow it is.
        shown = line.split(" ")[0]
        assert shown[0] == name[0]
        assert shown[-1] in (name[-1], "…")
        if width >= 70 + len(name):
            assert name in line
    assert lines[-1].startswith("0 of 144 units, about ")


def test_lines_say_each_thing_once() -> None:
    lines = Lines()
    assert lines(FarmStarted(1, 1)) == "1 unit, 1 at once"
    assert lines(FewerWorkers(64, 2, "memory for 2")) == "memory for 2"
    assert lines(started(1)) is None
    assert lines(UnitMemory(unit(1), 1)) is None
    assert lines(UnitStarted(unit(1), warning="larger than the host")) == (
        "decode_b1_ctx128: larger than the host"
    )
    assert lines(UnitDeferred(unit(1), "out of memory", pause=2.0, alone=True)) == (
        "decode_b1_ctx128 deferred: out of memory; tried again in 2.0 s, with nothing beside it"
    )
    assert lines(finished(1)) == "[1/1] built decode_b1_ctx128"
    assert lines(FarmStopping(False, failed="decode_b1_ctx128")) == (
        "decode_b1_ctx128 failed: no more units are started"
    )


def test_a_terminal_that_closes_ends_the_run_in_good_order(project: Project) -> None:
    config = project.write(control=order(project.root, seconds=60))
    terminal, side = pty.openpty()
    compiling = project.start(
        "compile",
        config,
        prefix=["setsid", "--ctty", "--wait"],
        env={"TERM": "xterm"},
        stdin=side,
        stdout=side,
        stderr=side,
    )
    os.close(side)
    with compiling:
        shown = b""
        while b"1 running" not in shown and b"2 running" not in shown:
            shown += os.read(terminal, 1 << 16)
        while not (project.root / "journal").exists():
            time.sleep(0.02)
        os.close(terminal)
        assert compiling.wait(30) != 0
    (recorded,) = (project.cache / "v1/runs").glob("*.json")
    outcomes = {unit["outcome"] for unit in json.loads(recorded.read_text())["units"]}
    assert outcomes == {"cancelled"}
    assert not list((project.root / "tmp").glob("neffbuild-farms-*/*/*"))
