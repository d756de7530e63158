"""Real commands, killed at random moments: what is visible is whole, and running them again is enough."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from killing import (
    Place,
    Target,
    becomes_empty,
    check_nothing_left,
    check_visible,
    collecting,
    compiling,
    kill,
    pulling,
    pushing,
    wait_for_work,
)

KILLS = 26
"""Of each command on each kind of store: 208 in all."""

KILLS_IN_A_ROW = 4
"""At most, before a command is run to its end."""


@pytest.fixture(params=["directory", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "directory":
        return Place(tmp_path, None)
    server = request.getfixturevalue("seaweed")
    bucket = f"kills-{os.getpid()}-{time.monotonic_ns()}"
    server.client().create_bucket(Bucket=bucket)
    return Place(tmp_path, server, bucket)


@pytest.mark.slow
@pytest.mark.parametrize("command", [pushing, pulling, compiling, collecting])
def test_killed_at_any_moment_and_run_again(
    place: Place, command: Callable[[Place], Callable[[], Target]]
) -> None:
    new_target = command(place)
    target = new_target()
    began, ended = place.times(target)
    target.complete()

    chance = random.Random(f"{command.__name__} {place.server is None}")
    kills = tries = half_done = 0
    while kills < KILLS:
        target = new_target()
        for _ in range(chance.randint(1, KILLS_IN_A_ROW)):
            before = [check_visible(url) for url in target.stores]
            with place.start(target.words) as process:
                # All of its time counts, and that after its start counts twice: there it writes.
                if tries % 2:
                    time.sleep(chance.uniform(0.0, ended))
                else:
                    wait_for_work(process, target)
                    time.sleep(chance.uniform(0.0, ended - began))
                is_killed = process.poll() is None
                if is_killed:
                    kill(process, chance)
            tries += 1
            kills += is_killed
            half_done += is_killed and before != [check_visible(url) for url in target.stores]
        place.run(*target.words)
        target.complete()
        for url in target.stores:
            check_visible(url)
            check_nothing_left(url)
    for url in target.stores:
        place.run("verify", url)
    # What killed farms have left in TMPDIR goes with the next one.
    place.run(*new_target().words)
    assert becomes_empty(place.left_folders)
    assert half_done >= KILLS / 4
