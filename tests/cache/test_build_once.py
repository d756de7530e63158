from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from cache_samples import in_children, make_entry, start_child, wait_for

from neffbuild.cache.catalog import Hit, read_entry
from neffbuild.cache.directory import DirectoryStore
from neffbuild.cache.entry import Entry
from neffbuild.cache.once import build_once
from neffbuild.cache.verify import verify_keys
from neffbuild.config.errors import LockTimeout

Made = tuple[Entry, Mapping[str, Path]]


@pytest.fixture
def key(tmp_path: Path) -> str:
    return make_entry(tmp_path / "sample", 1)[0].key


def builder(folder: Path, log: Path, seconds: float = 0.05) -> Callable[[], Made]:
    """A compile that notes itself in `log` and takes a while."""

    def build() -> Made:
        with log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(seconds)
        return make_entry(folder / str(os.getpid()), 1)

    return build


def builds(log: Path) -> list[int]:
    return [int(line) for line in log.read_text().split()] if log.exists() else []


def test_64_processes_want_one_key_and_one_builds_it(
    store: DirectoryStore, key: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"

    def want(_: int) -> int:
        entry, built = build_once(store, key, builder(tmp_path, log), wait=60)
        assert entry.key == key
        return int(built)

    assert sorted(in_children(64, want)) == [0] * 63 + [1]
    assert len(builds(log)) == 1
    assert verify_keys(store, [key]).ok


def test_killed_builder_is_succeeded_by_exactly_one_waiter(
    store: DirectoryStore, key: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"

    def build_for_ever() -> int:
        build_once(store, key, builder(tmp_path, log, seconds=60), wait=60)
        return 0

    first = start_child(build_for_ever)
    while builds(log) != [first]:
        time.sleep(0.005)

    def want() -> int:
        return int(build_once(store, key, builder(tmp_path, log), wait=60)[1])

    waiters = [start_child(want) for _ in range(16)]
    time.sleep(0.1)
    assert len(builds(log)) == 1
    killed = time.monotonic()
    os.kill(first, signal.SIGKILL)
    assert wait_for(first) == -signal.SIGKILL
    assert sorted(wait_for(waiter) for waiter in waiters) == [0] * 15 + [1]
    assert time.monotonic() - killed < 5
    assert len(builds(log)) == 2


def test_stopped_builder_is_named_and_the_waiters_go_on(
    store: DirectoryStore, key: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"

    def build() -> int:
        build_once(store, key, builder(tmp_path, log, seconds=0.3), wait=60)
        return 0

    first = start_child(build)
    while builds(log) != [first]:
        time.sleep(0.005)
    os.kill(first, signal.SIGSTOP)
    with pytest.raises(LockTimeout, match=f"process {first} ") as caught:
        build_once(store, key, builder(tmp_path, log), wait=0.2)
    assert key in caught.value.message
    os.kill(first, signal.SIGCONT)
    assert wait_for(first) == 0
    assert isinstance(read_entry(store, key), Hit)
    assert build_once(store, key, builder(tmp_path, log), wait=0)[1] is False


def test_failed_build_leaves_nothing_and_the_next_one_tries_again(
    store: DirectoryStore, key: str, tmp_path: Path
) -> None:
    def fail() -> Made:
        raise RuntimeError("exit 70")

    with pytest.raises(RuntimeError, match="exit 70"):
        build_once(store, key, fail, wait=1)
    assert build_once(store, key, builder(tmp_path, tmp_path / "log"), wait=1)[1] is True
