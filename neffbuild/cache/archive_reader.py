"""The unpacked bytes of a tar, read forward only and within bounds."""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

from neffbuild.cache import files
from neffbuild.cache.names import LAYOUT
from neffbuild.config.errors import IntegrityError, MissingExtra

MOST_EXPANSION = 1000
"""How many times its own size an archive may unpack to, beyond `SLACK` bytes."""

SLACK = files.LARGEST_DOCUMENT

MOST_HEADER_BYTES = 1 << 16
"""Bytes of the headers of one member: long names and extended attributes."""

_LARGEST_WINDOW = 1 << 27  # what the zstd program accepts by default
_CHUNK = 1 << 20
_READ = 1 << 16
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_MAKE_ANEW = f"make it with `tar -C DIR --exclude={LAYOUT}/loaded -cf FILE {LAYOUT}`"


class ArchiveDamaged(IntegrityError):
    """An archive ends too early, or cannot be read on from some point. What came before is whole."""


def refused(path: Path, spelled: str, why: str) -> IntegrityError:
    """The error for a member that is not taken."""
    return IntegrityError(f"{path}: member {spelled!r:.300} {why}", value=spelled, hint=_MAKE_ANEW)


class ArchiveReader:
    """An archive's unpacked bytes, forward only: the file that `tarfile` reads headers from."""

    def __init__(self, path: Path, raw: IO[bytes]) -> None:
        self.member = ""
        self.first = b""
        self.last = b""
        self.header_left = MOST_HEADER_BYTES
        self._path = path
        self._raw = raw
        self._unpacked, self._errors = _unpacked(path, raw)
        self._position = 0

    def tell(self) -> int:
        return self._position

    def seek(self, position: int) -> None:
        if position < self._position:
            raise refused(self._path, self.member, "is followed by a header that leads back")
        if self._unpacked is self._raw:
            self._raw.seek(position)
            self._position = position
        while self._position < position and self._take(min(_CHUNK, position - self._position)):
            pass

    def read(self, size: int) -> bytes:
        """Part of a header: content is read by `content`."""
        if not 0 <= size <= self.header_left:
            raise refused(
                self._path,
                self.member,
                f"is followed by a header that is not of 0 to {MOST_HEADER_BYTES} bytes",
            )
        self.header_left -= size
        self.last = self._take(size)
        self.first = self.first or self.last
        return self.last

    def content(self, size: int) -> Iterator[bytes]:
        while size:
            chunk = self._take(min(size, _CHUNK))
            if not chunk:
                raise self.damaged("its content is cut short")
            size -= len(chunk)
            yield chunk

    def finish(self) -> None:
        """Raise unless the archive ended where a whole one does."""
        if self.last != bytes(tarfile.BLOCKSIZE):
            raise self.damaged("what follows is no header" if self.last else "it has no end mark")
        left = SLACK
        while left > 0 and (chunk := self._take(_CHUNK)):
            left -= len(chunk)
            if chunk.strip(b"\0"):
                raise self.damaged("something follows its end mark")

    def damaged(self, why: str) -> ArchiveDamaged:
        where = f"at or after {self.member!r:.300}" if self.member else "at its start"
        return ArchiveDamaged(
            f"{self._path} is damaged or cut short {where} ({why})",
            value=str(self._path),
            hint="copy the archive again; what was whole is imported, and a repeated import goes on",
        )

    def _take(self, size: int) -> bytes:
        parts = []
        while size:
            try:
                part = self._unpacked.read(size)
            except self._errors as error:
                raise self.damaged(f"{type(error).__name__}: {error}") from error
            if not part:
                break
            parts.append(part)
            size -= len(part)
            self._position += len(part)
            if self._position > MOST_EXPANSION * self._raw.tell() + SLACK:
                raise refused(
                    self._path,
                    self.member,
                    f"unpacks to more than {MOST_EXPANSION} times what is packed: unpack the archive by hand "
                    "and import the directory, if that is meant",
                )
        return b"".join(parts)


def _unpacked(path: Path, raw: IO[bytes]) -> tuple[IO[bytes], tuple[type[Exception], ...]]:
    """The bytes of a tar, and what reading them raises where they are damaged."""
    start = raw.read(4)
    raw.seek(0)
    if start.startswith(_GZIP):
        unpacked = cast("IO[bytes]", gzip.GzipFile(fileobj=raw))
        return unpacked, (gzip.BadGzipFile, EOFError, zlib.error)
    if start != _ZSTD:
        return raw, ()
    try:
        import zstandard
    except ImportError as error:
        raise MissingExtra(
            f"{path} is compressed with zstd, and zstandard is not installed",
            value=str(path),
            hint="pip install 'neffbuild[s3]', or unpack the archive and import the directory",
        ) from error
    unpacker = zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW)
    stream = unpacker.stream_reader(raw, read_size=_READ, read_across_frames=True, closefd=False)
    return cast("IO[bytes]", stream), (zstandard.ZstdError,)
