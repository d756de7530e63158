"""Process trees of one Linux host: who descends from whom, what they use, how they end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Set
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PAGE = os.sysconf("SC_PAGE_SIZE")
_KILL_SECONDS = 10.0
_LISTS_CHILDREN = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").exists()
_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Make every descendant whose parent dies a child of this process, not of init: nothing that is
    started below it can get out of its sight by forking twice or leaving the process group."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent`, the process that forked it, dies."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the kernel was told
        os._exit(1)


def require_descriptors(count: int) -> None:
    """Raise `OSError` unless this process may open so many more files: what is opened later then finds
    room, as long as nobody else here opens any."""
    opened: list[int] = []
    try:
        for _ in range(count):
            opened.append(os.open(os.devnull, os.O_RDONLY))
    finally:
        for descriptor in opened:
            os.close(descriptor)


def descendants(pid: int) -> list[int]:
    """All living descendants of a process, parents before children."""
    found = _children(pid)
    for child in found:  # the list grows while it is walked
        found += _children(child)
    return found


def resident_bytes(pids: list[int]) -> int:
    """Resident memory of the processes together. Pages that several share count for each."""
    return sum(_resident(pid) for pid in pids) * _PAGE


def reap() -> dict[int, int]:
    """Wait for every child that has ended already: pid → wait status."""
    ended: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = found[1]
    return ended


def end_descendants(grace: float, spared: Set[int] = frozenset()) -> dict[int, int]:
    """End every descendant of this process: SIGTERM, and after `grace` seconds SIGKILL.

    Direct children in `spared` and what descends from them are left alone. Returns what was reaped
    meanwhile. Gives up on what the kernel itself cannot end (a process stuck in a dead file system).
    """
    ended: dict[int, int] = {}
    if grace:
        for pid in _own_descendants(spared):
            _signal(pid, signal.SIGTERM)
    kill_from = time.monotonic() + grace
    give_up = kill_from + _KILL_SECONDS
    delay = 0.001
    while time.monotonic() < give_up:
        ended |= reap()
        living = _own_descendants(spared)
        if not living:
            break
        if time.monotonic() >= kill_from:
            # Parents first, so that nobody is left to start another; what was started between the
            # listing and the signal is found in the next round.
            for pid in living:
                _signal(pid, signal.SIGKILL)
        time.sleep(delay)
        delay = min(2 * delay, 0.05)
    return ended


def end_users_of(folder: Path) -> None:
    """SIGKILL every other process of ours whose temporary files go below `folder`, however it got
    there: it inherited that from a farm's worker."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            temporary = Path(process.environ().get("TMPDIR", os.sep))
            if temporary.is_relative_to(folder) and process.pid != os.getpid():
                process.kill()


def _own_descendants(spared: Set[int]) -> list[int]:
    found = [child for child in _children(os.getpid()) if child not in spared]
    for child in found:
        found += _children(child)
    return found


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _children(pid: int) -> list[int]:
    # The kernel lists children by the thread that forked them. Reading these few files is cheap on
    # hosts with thousands of processes, where a scan of all of /proc is not.
    found: list[int] = []
    if not _LISTS_CHILDREN:  # some sandboxes' kernels
        with contextlib.suppress(psutil.Error):
            found += [child.pid for child in psutil.Process(pid).children()]
        return found
    with contextlib.suppress(OSError):
        for thread in os.scandir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                found += map(int, Path(thread.path, "children").read_bytes().split())
    return found


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_bytes().split()[1])
    except (OSError, IndexError):
        return 0
