"""Which unit may start: the rules, over any queue and any host."""

from __future__ import annotations

import heapq
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neffbuild.farm.admission import (
    MOST_PASSES,
    Claim,
    Holding,
    Resources,
    choose,
    free_resources,
    memory_floor,
    must_yield,
    to_be_ended,
)

HOST = Resources(cpus=4, memory=100, scratch=100)

resources = st.builds(Resources, st.integers(1, 3), st.integers(1, 100), st.integers(0, 60))
claims = st.builds(Claim, resources, st.floats(1, 100))
holdings = st.builds(
    Holding, st.uuids().map(str), resources, resident=st.integers(0, 150), ending=st.just(False)
)


def claim(memory: int, seconds: float = 10, cpus: int = 1) -> Claim:
    return Claim(Resources(cpus, memory), seconds)


@given(st.lists(claims, max_size=8), st.lists(claims, max_size=4), st.integers(0, 20))
def test_what_is_chosen_fits_and_the_first_has_precedence(
    waiting: list[Claim], running: list[Claim], passes: int
) -> None:
    free = HOST - sum((one.needs for one in running), Resources())
    place = choose(waiting, free, running, passes)
    if place is not None:
        assert waiting[place].needs.shortage(free) is None
    if waiting and waiting[0].needs.shortage(free) is None:
        assert place == 0
    if passes >= MOST_PASSES and place is not None:
        assert place == 0


def simulate(queue: list[Claim], true_seconds: list[float]) -> tuple[list[int], float, int]:
    """Run a queue on `HOST`: the order units started in, when the last ended, and how many started
    before unit 0 after it had come to be the first."""
    waiting = dict(enumerate(queue))
    running: list[tuple[float, int]] = []
    started: list[int] = []
    now, passes, most_passes, first = 0.0, 0, 0, -1
    while waiting or running:
        places = list(waiting)
        if places and places[0] != first:
            first, passes = places[0], 0
        held = [queue[number].needs for _, number in running]
        free = HOST - sum(held, Resources())
        assert free.shortage(HOST) is None
        assert Resources().shortage(free) is None  # nothing is ever given out twice
        ahead = [replace(queue[number], seconds=max(0.0, end - now)) for end, number in running]
        place = choose(list(waiting.values()), free, ahead, passes)
        if place is None:
            now, _ = heapq.heappop(running)
            continue
        number = places[place]
        del waiting[number]
        heapq.heappush(running, (now + true_seconds[number], number))
        started.append(number)
        if place:
            passes += 1
            most_passes = max(most_passes, passes)
    return started, now, most_passes


@given(st.lists(st.tuples(claims, st.floats(0.1, 10)), max_size=40))
def test_every_unit_that_fits_an_empty_host_starts_and_none_is_passed_by_too_many(
    units: list[tuple[Claim, float]],
) -> None:
    queue = [one for one, _ in units]
    # Expectations are wrong by up to a factor of ten, either way.
    started, _, passes = simulate(queue, [one.seconds * factor for one, factor in units])
    assert sorted(started) == list(range(len(queue)))
    assert passes <= MOST_PASSES


def test_a_large_unit_does_not_starve_behind_a_stream_of_small_ones() -> None:
    # The stream claims to be short and never is: by expectation each would be gone in time.
    queue = [claim(60, 50), claim(90, 50), *[claim(10, 1) for _ in range(200)]]
    started, _, passes = simulate(queue, [50.0, 50.0, *[30.0] * 200])
    assert 0 < passes <= MOST_PASSES
    assert started.index(1) <= 1 + MOST_PASSES


def test_small_units_use_what_a_large_one_cannot_yet() -> None:
    running = [claim(60, seconds=20)]
    free = HOST - running[0].needs
    large = claim(90, seconds=50)
    assert choose([large, claim(10, seconds=20)], free, running, 0) == 1
    # It would still run when the large one could start, and take what that needs.
    assert choose([large, claim(20, seconds=21)], free, running, 0) is None
    # It would still run, but beside it.
    assert choose([large, claim(10, seconds=500)], free, running, 0) == 1


def test_other_farms_memory_does_not_stop_small_units() -> None:
    free = Resources(cpus=2, memory=30, scratch=0)
    assert choose([claim(60), claim(30)], free, [], 0) == 1
    assert choose([claim(60), claim(30)], free, [], MOST_PASSES) is None


def test_the_wait_for_a_device_stops_no_small_unit_but_the_wait_for_memory_does() -> None:
    device = Claim(Resources(1, 60, devices=1), 3600)
    taken, free = Resources(cpus=2, memory=30), Resources(cpus=2, memory=30, devices=1)
    assert choose([device, device, claim(30)], taken, [], MOST_PASSES) == 2
    assert choose([device, device, claim(30)], free, [], MOST_PASSES) is None


@given(st.lists(holdings, max_size=6), st.integers(0, 200), st.integers(0, 200))
def test_what_is_admitted_never_exceeds_the_budget_nor_what_is_available(
    held: list[Holding], available: int, scratch: int
) -> None:
    free = free_resources(HOST, held, available, scratch)
    reserved = sum((one.needs for one in held), Resources())
    assert (free + reserved).shortage(HOST) is None
    growth = sum(max(0, one.needs.memory - one.resident) for one in held)
    assert free.memory + growth <= available
    assert free.scratch + reserved.scratch <= scratch


def test_memory_that_other_programs_take_is_not_given_out() -> None:
    free = free_resources(HOST, [], available_memory=30, free_scratch=100)
    assert free == Resources(cpus=4, memory=30, scratch=100)


@given(st.lists(holdings, min_size=1, max_size=6), st.integers(0, 1 << 30))
def test_the_unit_most_above_its_reservation_is_ended(held: list[Holding], available: int) -> None:
    chosen = to_be_ended(held, available, 10 << 30)
    most = max(one.resident - one.needs.memory for one in held)
    if available >= memory_floor(10 << 30) // (1 if most > 0 else 4):
        assert chosen is None
    else:
        assert chosen in held
        assert chosen.resident - chosen.needs.memory == most
        ending = [replace(one, ending=one == chosen) for one in held]
        assert to_be_ended(ending, available, 10 << 30) is None


@pytest.mark.parametrize(
    ("total", "floor"), [(1 << 30, (1 << 30) // 25), (512 << 30, 1 << 30), (0, 0)]
)
def test_the_floor(total: int, floor: int) -> None:
    assert memory_floor(total) == floor


def test_a_farm_with_units_yields_to_one_that_has_none() -> None:
    assert must_yield(None, [5.0])
    assert not must_yield(None, [None])


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=5, unique=True))
def test_of_the_farms_that_have_none_the_one_that_waits_longest_is_first(
    waits: list[float],
) -> None:
    free = [mine for mine in waits if not must_yield(mine, [o for o in waits if o != mine])]
    assert free == [min(waits)]
