"""The payload of a NEFF: a tar whose members are listed, never extracted."""

from __future__ import annotations

import json
import posixpath
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, Self, cast

from neffbuild.config.errors import IntegrityError

HEADER_BYTES = 1024
"""What lies before the payload."""
MOST_MEMBERS = 100_000
MOST_BYTES = 16 << 30
"""Of a payload when decompressed."""
MOST_INFO_BYTES = 16 << 20
"""Of `info.json`."""
_INFO = "info.json"
_GZIP_WINDOW = 31
_STEP = 1 << 18
_BLOCK = 512
_MOST_HEADER_BYTES = 1 << 20
"""Of what extends the header of a member: long names, pax records."""
_EXTENDED = frozenset(
    {
        tarfile.XHDTYPE,
        tarfile.XGLTYPE,
        tarfile.SOLARIS_XHDTYPE,
        tarfile.GNUTYPE_LONGNAME,
        tarfile.GNUTYPE_LONGLINK,
    }
)


class NeffError(IntegrityError):
    """A file that is no whole NEFF. `field` names the part, `offset` is where in the file it lies."""

    kind = "neff"

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        value: object = None,
        hint: str | None = None,
        offset: int = 0,
    ) -> None:
        super().__init__(message, field=field, value=value, hint=hint)
        self.offset = offset


@dataclass(frozen=True, slots=True)
class NeffMember:
    """A file in the payload; `size` in bytes."""

    name: str
    size: int


def read_payload(
    chunks: Iterator[bytes], gzipped: bool, *, most_bytes: int = MOST_BYTES
) -> tuple[tuple[NeffMember, ...], dict[str, Any] | None]:
    """The members of a payload that comes in `chunks`, and what its `info.json` holds.

    Raises `NeffError` for an archive that cannot be read to its end, that unpacks to more than
    `most_bytes`, or that holds links, devices, names that leave its folder or a name twice.
    """
    stream = _Stream(_gunzipped(chunks) if gzipped else chunks, most_bytes)
    members: list[NeffMember] = []
    paths: set[str] = set()
    info: dict[str, Any] | None = None
    end = 0
    try:
        with tarfile.open(
            fileobj=cast(BinaryIO, stream), mode="r|", bufsize=_STEP, tarinfo=_Member
        ) as archive:
            for number, member in enumerate(archive):
                if number == MOST_MEMBERS:
                    raise _malformed(f"more than {MOST_MEMBERS} members", member.offset)
                path = _check_member(member, paths, most_bytes)
                end = member.offset_data + -(-member.size // _BLOCK) * _BLOCK
                if not member.isfile():
                    continue
                paths.add(path)
                members.append(NeffMember(member.name, member.size))
                if path == _INFO:
                    info = _info(archive, member)
    except (tarfile.TarError, EOFError, ValueError, OverflowError, RecursionError) as error:
        raise _malformed(f"the archive cannot be read: {error}", stream.read_bytes) from error
    stream.drain()
    if stream.last_content > max(end, 1):
        # A header that is none ends an archive in silence.
        raise _malformed("the archive goes on after its last member", end)
    if not members:
        raise _malformed("the archive holds no file", 0)
    return tuple(members), info


def _check_member(member: tarfile.TarInfo, before: set[str], most_bytes: int) -> str:
    """The path below the archive's folder that a member is unpacked to, however it is spelled."""
    name = member.name
    if not (member.isfile() or member.isdir()) or member.issparse():
        raise _malformed(f"member {name!r:.200} is no plain file", member.offset)
    parts = name.removeprefix("./").split("/")
    if name.startswith("/") or ".." in parts or "\0" in name or not name:
        raise _malformed(f"member {name!r:.200} is named outside of the archive", member.offset)
    path = posixpath.normpath(name)
    if path == "." and member.isfile():
        raise _malformed(f"member {name!r:.200} is named as the archive's folder", member.offset)
    if path in before:
        raise _malformed(f"member {name!r:.200} is there twice", member.offset)
    # `tarfile` steps over a member's content piece by piece, long after the archive has ended.
    if not 0 <= member.size <= most_bytes:
        raise _malformed(f"member {name!r:.200} has the size {member.size}", member.offset)
    return path


def _info(archive: tarfile.TarFile, member: tarfile.TarInfo) -> dict[str, Any]:
    if member.size > MOST_INFO_BYTES:
        raise _malformed(
            f"info.json has {member.size} bytes, more than {MOST_INFO_BYTES}", member.offset
        )
    file = archive.extractfile(member)
    content = file.read() if file is not None else b""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _malformed(f"info.json is not JSON: {error}", member.offset) from error
    if not isinstance(document, dict):
        raise _malformed(
            f"info.json holds a {type(document).__name__}, not an object", member.offset
        )
    return document


def _malformed(what: str, offset: int) -> NeffError:
    return NeffError(
        f"the payload is no archive as NEFFs have: {what} (at byte {offset} of it, unpacked)",
        field="payload",
        value=offset,
        offset=HEADER_BYTES,
    )


def _gunzipped(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Raises `NeffError` for what is no gzip, or not whole."""
    inflate = zlib.decompressobj(_GZIP_WINDOW)
    try:
        for chunk in chunks:
            rest = chunk
            while rest:
                if inflate.eof:
                    inflate = zlib.decompressobj(_GZIP_WINDOW)
                if piece := inflate.decompress(rest, _STEP):
                    yield piece
                rest = inflate.unused_data if inflate.eof else inflate.unconsumed_tail
        while piece := inflate.decompress(inflate.unconsumed_tail, _STEP):
            yield piece
    except zlib.error as error:
        raise _malformed(f"it cannot be decompressed: {error}", 0) from error
    if not inflate.eof:
        raise _malformed("the gzip stream is cut off", 0)


class _Member(tarfile.TarInfo):
    """A header; `tarfile` takes one that extends another into memory whole."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        member = super().frombuf(buf, encoding, errors)
        if member.type in _EXTENDED and not 0 <= member.size <= _MOST_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {member.size} bytes")
        return member


class _Stream:
    """What `tarfile` reads from; it knows how much there was and where the last byte that is not zero
    lies."""

    def __init__(self, chunks: Iterator[bytes], most: int) -> None:
        self._chunks = chunks
        self._most = most
        self._held = b""
        self.read_bytes = 0
        self.last_content = 0

    def read(self, size: int) -> bytes:
        while not self._held:
            chunk = next(self._chunks, None)
            if chunk is None:
                return b""
            if content := len(chunk.rstrip(b"\0")):
                self.last_content = self.read_bytes + content
            self.read_bytes += len(chunk)
            if self.read_bytes > self._most:
                raise _malformed(f"it unpacks to more than {self._most} bytes", self._most)
            self._held = chunk
        piece, self._held = self._held[:size], self._held[size:]
        return piece

    def drain(self) -> None:
        while self.read(_STEP):
            pass
