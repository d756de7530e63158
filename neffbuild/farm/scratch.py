"""The folder of one farm: scratch space of its units and whatever the units share while it runs.

A farm owns its folder for as long as it holds a `flock` on the file beside it; the kernel releases
that when the farm's process dies, however it dies. So a folder whose lock is free belongs to nobody
and is removed by whoever comes next: no run ever needs a clean-up by hand.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import socket
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from neffbuild.config.errors import StoreError
from neffbuild.farm.processes import end_users_of

_LOCK_SUFFIX = ".lock"
_log = logging.getLogger(__name__)


def farms_directory() -> Path:
    """Where this user's farms have their folders on this host, `$TMPDIR/neffbuild-farms-<uid>/<host>`.

    One level per host, because TMPDIR may be shared between hosts that cannot see each other's locks.
    Raises `StoreError` when somebody else owns the folder or may write in it.
    """
    base = Path(tempfile.gettempdir(), f"neffbuild-farms-{os.getuid()}")
    asked = os.environ.get("TMPDIR")
    if asked and Path(asked).absolute() != base.parent.absolute():
        _log.warning("TMPDIR is %s, where no file can be written: scratch goes to %s", asked, base)
    hint = "set TMPDIR to a folder of your own with room for compiler temporaries"
    try:
        with contextlib.suppress(FileExistsError):
            base.mkdir(mode=0o700)
        status = base.lstat()
        folder = base / socket.gethostname()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
            folder.mkdir(exist_ok=True)
    except OSError as error:
        raise StoreError(f"cannot use {base} for scratch: {error.strerror}", hint=hint) from error
    if not folder.is_dir() or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise StoreError(
            f"{base} must be a folder only you (uid {os.getuid()}) can write in; it is "
            f"{stat.filemode(status.st_mode)} of uid {status.st_uid}",
            hint=hint,
        )
    return folder


@contextlib.contextmanager
def farm_folder() -> Iterator[Path]:
    """A new folder, owned by this process until the block ends, then removed."""
    root = farms_directory()
    remove_abandoned(root)
    lock, descriptor = _new_lock(root)
    folder = lock.with_suffix("")
    try:
        folder.mkdir()
        yield folder
    finally:
        # The lock file goes last: without it nobody would look for the folder again.
        remove_tree(folder)
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def remove_abandoned(root: Path) -> None:
    """Remove the folders below `root` of farms that are dead, and end what still works in them: where
    a farm was killed with all that watched over its compilers, they run on."""
    for lock in root.glob(f"*{_LOCK_SUFFIX}"):
        try:
            descriptor = os.open(lock, os.O_RDWR)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        else:
            end_users_of(lock.with_suffix(""))
            remove_tree(lock.with_suffix(""))
            lock.unlink(missing_ok=True)
        finally:
            os.close(descriptor)


def remove_tree(folder: Path) -> None:
    """Remove a folder and all in it, also what a compiler made read-only; gone already is no error."""

    def make_writable(_function: object, path: str, _error: object) -> None:
        with contextlib.suppress(OSError):
            Path(path).parent.chmod(0o700)
            # Never through a link: what it points to is not ours to change.
            if stat.S_ISDIR(os.lstat(path).st_mode):
                Path(path).chmod(0o700)

    for _attempt in range(3):
        # Processes that are just being killed may still add a file behind the walk.
        try:
            shutil.rmtree(folder, onerror=make_writable)
        except RecursionError:
            # Deeper than Python walks. Who could write there could make this fail: nobody's run ends.
            subprocess.run(["rm", "-rf", "--", str(folder)], check=False, capture_output=True)
        if not folder.exists():
            return


def used_bytes(folder: Path) -> int:
    """Bytes that a folder and all in it take on their disk; what vanishes meanwhile counts for nothing."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_blocks * 512  # noqa: PTH118
    return total


def _new_lock(root: Path) -> tuple[Path, int]:
    while True:
        descriptor, name = tempfile.mkstemp(prefix="farm-", suffix=_LOCK_SUFFIX, dir=root)
        lock = Path(name)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), lock.stat()):
                return lock, descriptor
        except (BlockingIOError, FileNotFoundError):
            pass
        # A farm that was cleaning up took the file for an abandoned one before it was locked.
        os.close(descriptor)
