from __future__ import annotations

import random
from statistics import mean

from hypothesis import given
from hypothesis import strategies as st

from neffbuild.cache.s3.retry import FIRST_CEILING, HIGHEST_CEILING, Pauses


class Time:
    """A clock that only moves when somebody waits."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def pauses_through(patience: float, seed: int, attempt_seconds: float) -> list[float]:
    """The pauses of a request that never succeeds."""
    clock = Time()
    pauses = Pauses(clock, random.Random(seed).uniform)
    taken = []
    while (pause := pauses.next(patience)) is not None:
        taken.append(pause)
        clock.now += pause + attempt_seconds
    assert pauses.taken == len(taken)
    return taken


@given(st.floats(0, 300), st.integers(), st.floats(0.001, 5))
def test_pauses_are_bounded_each_and_together(
    patience: float, seed: int, attempt_seconds: float
) -> None:
    taken = pauses_through(patience, seed, attempt_seconds)
    for number, pause in enumerate(taken):
        assert 0 <= pause <= min(HIGHEST_CEILING, FIRST_CEILING * 2**number)
    assert sum(taken) <= patience + 1e-9


@given(st.integers(0, 10_000))
def test_a_storm_of_half_a_minute_is_outlasted_with_few_requests(seed: int) -> None:
    clock = Time()
    pauses = Pauses(clock, random.Random(seed).uniform)
    attempts = 1
    while clock.now < 30:
        pause = pauses.next(120)
        assert pause is not None
        clock.now += pause + 0.02
        attempts += 1
    assert attempts < 60


def test_the_whole_range_is_used_so_that_a_fleet_spreads_out() -> None:
    tenth = [pauses_through(1000, seed, 0)[9] for seed in range(2000)]
    assert min(tenth) < 0.1
    assert max(tenth) > 7.9
    assert 3.8 < mean(tenth) < 4.2


def test_no_patience_is_no_second_attempt() -> None:
    assert Pauses().next(0) is None
