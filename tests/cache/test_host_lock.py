from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cache_samples import in_children, start_child, wait_for

from neffbuild.cache.lock import host_lock, runtime_directory
from neffbuild.config.errors import LockTimeout, StoreError


def hold_until_killed(ready: int, seconds: float = 60) -> int:
    with host_lock("unit x", wait=10):
        os.write(ready, b"!")
        time.sleep(seconds)
    return 0


@pytest.fixture
def pipe() -> tuple[int, int]:
    return os.pipe()


def test_only_one_process_holds_a_lock_at_a_time(tmp_path: Path) -> None:
    counter = tmp_path / "counter"
    counter.write_text("0")

    def add(_: int) -> int:
        for _ in range(5):
            with host_lock("counter", wait=60):
                value = int(counter.read_text())
                time.sleep(0.001)
                counter.write_text(str(value + 1))
        return 0

    assert in_children(16, add) == [0] * 16
    assert counter.read_text() == "80"


def test_locks_of_different_names_do_not_meet() -> None:
    with host_lock("a", wait=0), host_lock("b", wait=0):
        pass


def test_a_lock_is_not_held_twice_by_two_threads_of_one_process() -> None:
    with host_lock("a", wait=0), pytest.raises(LockTimeout), host_lock("a", wait=0):
        pass


def test_killed_holder_releases_at_once(pipe: tuple[int, int]) -> None:
    holder = start_child(lambda: hold_until_killed(pipe[1]))
    os.read(pipe[0], 1)
    os.kill(holder, signal.SIGKILL)
    wait_for(holder)
    with host_lock("unit x", wait=0):
        pass


def test_stopped_holder_is_named_after_a_bounded_wait(pipe: tuple[int, int]) -> None:
    holder = start_child(lambda: hold_until_killed(pipe[1]))
    os.read(pipe[0], 1)
    os.kill(holder, signal.SIGSTOP)
    try:
        # Losers come and go; none may erase what the holder wrote about itself.
        for wait in (0, 0, 0.3):
            started = time.monotonic()
            with pytest.raises(LockTimeout) as caught, host_lock("unit x", wait=wait):
                pass
            assert wait <= time.monotonic() - started < wait + 2
        message = str(caught.value)
        assert re.search(rf"unit x is locked by process {holder} on \S+, since \d+ s", message)
        assert "gave up after 0.3 s" in message
        assert str(holder) in str(caught.value.hint)
        assert caught.value.exit_status == 3
    finally:
        os.kill(holder, signal.SIGKILL)
        wait_for(holder)


def test_a_forked_child_does_not_keep_the_lock(pipe: tuple[int, int]) -> None:
    with host_lock("unit x", wait=0):
        child = start_child(lambda: len(os.read(pipe[0], 1)))
    try:
        with host_lock("unit x", wait=2):  # the child needs a moment to run its fork handlers
            pass
    finally:
        os.write(pipe[1], b"!")
        wait_for(child)


def test_a_program_started_under_the_lock_does_not_keep_it() -> None:
    with host_lock("unit x", wait=0):
        program = subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False
        )
    try:
        with host_lock("unit x", wait=2):
            pass
    finally:
        program.communicate(b"\n")


def test_a_child_leaving_the_with_block_closes_no_strange_descriptor() -> None:
    def leave() -> int:
        status = 1
        with host_lock("unit y", wait=0):
            if not (child := os.fork()):
                # The lock's number is free in the child and now means this file.
                reused = os.open("/dev/null", os.O_RDONLY)
            else:
                return wait_for(child)
        os.fstat(reused)
        status = 0
        os._exit(status)

    assert wait_for(start_child(leave)) == 0


def test_lock_file_removed_between_opening_and_locking_splits_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A cleaner of old temporary files may come at the worst moment."""
    flock = fcntl.flock

    def cleaned_before(descriptor: int, operation: int) -> None:
        monkeypatch.undo()
        for path in folder.iterdir():
            path.unlink()
        flock(descriptor, operation)

    folder = runtime_directory()
    monkeypatch.setattr(fcntl, "flock", cleaned_before)
    with host_lock("unit x", wait=0), pytest.raises(LockTimeout), host_lock("unit x", wait=0):
        pass


def test_runtime_directory_is_private_and_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path / "run"
    base.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    folder = runtime_directory()
    assert folder == base / "neffbuild"
    assert folder.stat().st_mode & 0o777 == 0o700

    folder.chmod(0o777)
    with pytest.raises(StoreError, match="only you"):
        runtime_directory()
    folder.rmdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    folder.symlink_to(elsewhere)
    with pytest.raises(StoreError, match="only you"):
        runtime_directory()
    folder.unlink()
    folder.touch(mode=0o600)
    with pytest.raises(StoreError, match="only you"):
        runtime_directory()


@pytest.mark.parametrize("value", ["", "/nowhere/at/all"])
def test_unusable_xdg_runtime_dir_leaves_the_folder_of_the_user(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", value)
    monkeypatch.setenv("TMPDIR", "/nowhere/else")
    assert runtime_directory() == Path(f"/tmp/neffbuild-{os.getuid()}")


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to own a folder as somebody else")
def test_runtime_folder_of_somebody_else_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path / "run"
    base.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    folder = runtime_directory()
    os.chown(folder, 65534, 65534)
    with pytest.raises(StoreError, match="uid 65534"):
        runtime_directory()
    os.chown(base, 65534, 65534)
    assert runtime_directory() == Path(f"/tmp/neffbuild-{os.getuid()}")
