"""A file layer that fails as network file systems do, put in place of the calls a directory store makes.

No server is behind it. What it does was taken from how NFS clients behave: requests repeated after a lost
answer, look-ups and listings remembered for too long, handles that went stale, errors that only closing
reports.
"""

from __future__ import annotations

import errno
import os
import random
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from neffbuild.cache import files, filesystem

REPEATED = {
    "link": errno.EEXIST,
    "rename": errno.ENOENT,
    "mkdir": errno.EEXIST,
    "unlink": errno.ENOENT,
    "rmdir": errno.ENOENT,
    "create": errno.EEXIST,
}
"""What a server answers to a request that it has carried out before."""

PASSING = (errno.ESTALE, errno.EBUSY)
CALLS = (
    *("open", "create", "read", "write", "fsync", "lstat", "stat", "scandir"),
    *("link", "rename", "unlink", "mkdir", "chmod"),
)
"""The calls that can be made to fail; `create` is `open` of a new file."""


@dataclass
class Fault:
    """What happens to the next `times` calls of a name on paths that hold `where`, after `skip` of them.
    With `done` the call is carried out first."""

    call: str
    error: int
    where: str = ""
    times: float = 1
    skip: int = 0
    done: bool = False

    def strikes(self, call: str, path: str) -> bool:
        if call != self.call or self.where not in path or self.times <= 0:
            return False
        if self.skip:
            self.skip -= 1
            return False
        self.times -= 1
        return True


@dataclass
class Hidden:
    """A name that others have created and that is not seen here: until its folder was opened `opens`
    times."""

    opens: float


@dataclass
class FaultyFiles:
    """Stands where `os` stands in the modules that touch a store's disk."""

    faults: list[Fault] = field(default_factory=list)
    hidden: dict[str, Hidden] = field(default_factory=dict)
    remembered: dict[str, os.stat_result] = field(default_factory=dict)
    listings: dict[str, list[Any]] = field(default_factory=dict)
    chance: Callable[[str, str], Fault | None] = lambda call, path: None
    short: bool = False
    pauses: list[float] = field(default_factory=list)
    struck: Counter[str] = field(default_factory=Counter)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def fail(self, call: str, error: int, where: str = "", **how: Any) -> Fault:
        """Have calls fail; see `Fault`."""
        fault = Fault(call, error, where, **how)
        self.faults.append(fault)
        return fault

    def lose_answers(self, call: str, where: str = "", times: float = float("inf")) -> None:
        """Have calls carried out and refused as repeated."""
        self.faults.append(Fault(call, REPEATED[call], where, times, done=True))

    def hide(self, path: Path, opens: float = 1) -> None:
        """Make a name look absent; see `Hidden`."""
        self.hidden[str(path)] = Hidden(opens)

    def remember(self, path: Path) -> None:
        """Go on knowing of a file that others are about to remove, until it is opened."""
        self.remembered[str(path)] = path.lstat()

    def freeze(self, folder: Path, times: int) -> None:
        """List the folder as it is now, the next `times` times."""
        with os.scandir(folder) as scan:
            items = [SimpleNamespace(name=one.name, folder=one.is_dir()) for one in scan]
        self.listings[str(folder)] = [items] * times

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        text = str(path)
        self._see(text, flags)
        call = "create" if flags & os.O_CREAT else "open"
        descriptor: int = self._do(call, text, lambda: os.open(path, flags, mode, dir_fd=dir_fd))
        return descriptor

    def read(self, descriptor: int, size: int) -> bytes:
        if self.short:
            size = min(size, 1000)
        data: bytes = self._do("read", _path(descriptor), lambda: os.read(descriptor, size))
        return data

    def write(self, descriptor: int, data: Any) -> int:
        if self.short:
            data = data[: max(1, len(data) // 2)]
        written: int = self._do("write", _path(descriptor), lambda: os.write(descriptor, data))
        return written

    def fsync(self, descriptor: int) -> None:
        # Not to the disk: what a power failure does is not at stake here, and a disk is slow.
        self._do("fsync", _path(descriptor), lambda: None)

    def close(self, descriptor: int) -> None:
        path = _path(descriptor)
        os.close(descriptor)  # whatever it says, the descriptor is gone
        self._do("close", path, lambda: None)

    def lstat(self, path: Any) -> os.stat_result:
        if str(path) in self.remembered:
            return self.remembered[str(path)]
        self._see(str(path))
        found: os.stat_result = self._do("lstat", str(path), lambda: os.lstat(path))
        return found

    def stat(self, path: Any) -> os.stat_result:
        self._see(str(path))
        found: os.stat_result = self._do("stat", str(path), lambda: Path(path).stat())
        return found

    def link(self, source: Any, target: Any) -> None:
        self._do("link", str(target), lambda: os.link(source, target))

    def rename(self, source: Any, target: Any) -> None:
        self._do("rename", str(target), lambda: Path(source).rename(target))

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._do("unlink", str(path), lambda: os.unlink(path, dir_fd=dir_fd))

    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._do("rmdir", str(path), lambda: os.rmdir(path, dir_fd=dir_fd))

    def mkdir(self, path: Any) -> None:
        self._do("mkdir", str(path), lambda: Path(path).mkdir())

    def chmod(self, path: Any, mode: int) -> None:
        self._do("chmod", str(path), lambda: Path(path).chmod(mode))

    @contextmanager
    def scandir(self, folder: Any) -> Iterator[list[Any]]:
        frozen = self.listings.get(str(folder))
        if frozen:
            yield [_Item(one.name, one.folder) for one in frozen.pop()]
            return
        scan = self._do("scandir", str(folder), lambda: os.scandir(folder))
        with scan:
            items = list(scan)
        yield [one for one in items if f"{folder}/{one.name}" not in self.hidden]
        self._opened(str(folder))

    def _do(self, call: str, path: str, work: Callable[[], Any]) -> Any:
        fault = next((one for one in self.faults if one.strikes(call, path)), None)
        fault = fault or self.chance(call, path)
        if fault is None:
            return work()
        if fault.done:
            result = work()
            if call == "create":
                os.close(result)
        self.struck[call] += 1
        raise OSError(fault.error, os.strerror(fault.error), path)

    def _see(self, path: str, flags: int = 0) -> None:
        """Look a name up as it is remembered here."""
        self.remembered.pop(path, None) if flags else None
        if flags & os.O_DIRECTORY:
            self._opened(path)
        elif path in self.hidden and not flags & os.O_CREAT:
            self.struck["hidden"] += 1
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def _opened(self, folder: str) -> None:
        for path in [path for path in self.hidden if str(Path(path).parent) == folder]:
            self.hidden[path].opens -= 1
            if self.hidden[path].opens <= 0:
                del self.hidden[path]


@dataclass
class _Item:
    name: str
    folder: bool

    def is_dir(self, *, follow_symlinks: bool) -> bool:
        return self.folder


@contextmanager
def faulty_files() -> Iterator[FaultyFiles]:
    """Put a faulty layer, without faults yet, in place of every call of directory stores. Pauses are noted
    and not made."""
    layer = FaultyFiles()
    with pytest.MonkeyPatch.context() as patch:
        for module in (filesystem, files):
            patch.setattr(module, "os", layer)
        patch.setattr(filesystem, "time", SimpleNamespace(sleep=layer.pause))
        yield layer


def random_faults(chance: random.Random, rate: float) -> Callable[[str, str], Fault | None]:
    """Errors that pass and answers that are lost, anywhere, about `rate` of all calls."""

    def choose(call: str, path: str) -> Fault | None:
        if chance.random() > rate or call not in CALLS:
            return None
        if call in REPEATED and chance.random() < 0.5:
            return Fault(call, REPEATED[call], done=True)
        return Fault(call, chance.choice(PASSING), done=call in REPEATED and chance.random() < 0.3)

    return choose


def _path(descriptor: int) -> str:
    path = str(Path(f"/proc/self/fd/{descriptor}").readlink())
    return path if stat.S_ISREG(os.fstat(descriptor).st_mode) else f"{path}/"
