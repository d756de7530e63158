"""Reading a tar of a neffbuild directory, member by member, believing nothing of it.

Nothing is ever extracted under a name from the archive: who reads is told what the layout calls a file,
how long it is, and gets its bytes in pieces. What an archive of ours never holds (links, devices, names that
lead elsewhere, one name twice) is refused by name. Memory is bounded whatever the archive says.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from neffbuild.cache import files
from neffbuild.cache.archive_reader import MOST_HEADER_BYTES, ArchiveReader, refused
from neffbuild.cache.names import LAYOUT
from neffbuild.config.errors import ConfigError, IntegrityError, NeffbuildError

MOST_MEMBERS = 250_000
_LATEST = 1 << 33  # epoch seconds
_BESIDE = frozenset({LAYOUT, "logs"})
_KINDS = {
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.LNKTYPE: "a hard link",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a named pipe",
}


@dataclass(frozen=True, slots=True)
class Member:
    """A file of an archive. `name` is relative to the layout's folder (`entries/ab/<key>.json`), `spelled`
    as in the archive, `size` in bytes, `modified` in epoch seconds as the archive says; `chunks` reads its
    content, once, before the next member."""

    archive: Path
    name: str
    spelled: str
    size: int
    modified: float
    chunks: Callable[[], Iterator[bytes]]

    def refused(self, why: str) -> IntegrityError:
        """The error for a member that is not taken."""
        return refused(self.archive, self.spelled, why)


def require_archive(path: Path) -> None:
    """Raise `ConfigError` unless the file is a tar, plain or compressed with gzip or zstd; `MissingExtra`
    where zstd is not installed; `ArchiveDamaged` where it cannot be unpacked from the start."""
    with _opened(path):
        pass


def members(path: Path) -> Iterator[Member]:
    """Every file below the layout's folder in an archive, in its order.

    Raises `IntegrityError` naming the member for what is refused, `ArchiveDamaged` where the archive breaks
    off, and as `require_archive` does.
    """
    with _opened(path) as (tar, reader):
        names = _Names(path)
        while True:
            info = _next(tar, reader, path)
            if info is None:
                break
            cast("Any", tar).members.clear()  # it would keep them all
            name = names.place(info)
            reader.member = info.name
            if name is not None:
                chunks = partial(reader.content, info.size)
                yield Member(path, name, info.name, info.size, _sensible(info.mtime), chunks)
        reader.finish()


class _Names:
    """What members are called, and what of that is refused."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: dict[str, bool] = {}
        self._top: str | None = None

    def place(self, info: tarfile.TarInfo) -> str | None:
        """The name of a file below the layout's folder; None for what is none. Raises `IntegrityError`."""
        fault = _fault(info)
        if fault is not None:
            raise refused(self._path, info.name, fault)
        parts = [part for part in info.name.split("/") if part not in ("", ".")]
        self._once("/".join(parts), info)
        if parts:
            top = "" if parts[0] in _BESIDE else parts.pop(0)
            if self._top not in (None, top):
                raise refused(self._path, info.name, "is not in one folder with the others")
            self._top = top
        if not parts:
            if info.isdir():
                return None
        elif parts[0] in _BESIDE:
            is_ours = parts[0] == LAYOUT and len(parts) > 1 and not info.isdir()
            return "/".join(parts[1:]) if is_ours else None
        raise refused(
            self._path,
            info.name,
            f"is outside the layout: expected `{LAYOUT}/…`, or that below one folder",
        )

    def _once(self, name: str, info: tarfile.TarInfo) -> None:
        was_folder = self._seen.get(name)
        if was_folder is None:
            if len(self._seen) >= MOST_MEMBERS:
                raise refused(
                    self._path, info.name, f"is one more than the {MOST_MEMBERS:,} that are read"
                )
            self._seen[name] = info.isdir()
        elif not (was_folder and info.isdir()):
            raise refused(self._path, info.name, "is there twice")


def _fault(info: tarfile.TarInfo) -> str | None:
    if info.issparse():
        return "is a sparse file, and those are not read"
    if not (info.type in (tarfile.REGTYPE, tarfile.AREGTYPE) or info.isdir()):
        return (
            f"is {_KINDS.get(info.type, 'of an unknown kind')}, and only files and folders are read"
        )
    if info.name.startswith("/"):
        return "has an absolute name"
    if ".." in info.name.split("/"):
        return "leads out of its folder"
    if info.size < 0:
        return "states a negative size"
    return None


def _sensible(modified: float) -> float:
    """A time that a file can have."""
    return modified if 0 <= modified < _LATEST else 0.0


def _next(tar: tarfile.TarFile, reader: ArchiveReader, path: Path) -> tarfile.TarInfo | None:
    reader.header_left = MOST_HEADER_BYTES
    try:
        return tar.next()
    except (NeffbuildError, OSError, MemoryError):
        raise
    except Exception as error:
        # tarfile raises whatever it stumbles over in a header made to trip it.
        raise reader.damaged(f"{type(error).__name__}: {error}") from error


@contextmanager
def _opened(path: Path) -> Iterator[tuple[tarfile.TarFile, ArchiveReader]]:
    with files.refusals("read", path), path.open("rb") as raw:
        reader = ArchiveReader(path, raw)
        try:
            tar = tarfile.TarFile(fileobj=cast("Any", reader), mode="r")
        except tarfile.ReadError as error:
            if reader.first[257:262] == b"ustar":
                raise reader.damaged(str(error)) from error
            raise ConfigError(
                f"{path} is neither a directory nor a tar",
                value=str(path),
                hint="allowed: a neffbuild cache or store directory, a tar of one (.tar, .tar.gz, .tar.zst)",
            ) from error
        except (NeffbuildError, OSError, MemoryError):
            raise
        except Exception as error:
            raise reader.damaged(f"{type(error).__name__}: {error}") from error
        yield tar, reader
