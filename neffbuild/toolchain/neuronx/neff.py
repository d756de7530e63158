"""The NEFF container: what its header says, whether its payload is whole, what is in it.

1024 bytes of header, little-endian, then a tar: raw with its SHA-256 in the header (`pkg_version` 1), or
gzipped with the MD5 of the compressed bytes in the first half of that field (2). There is no magic number,
and nothing protects the rest of the header: versions, build version, UUID, name, core counts, feature bits
and LNC size are what somebody wrote there.

Source: AWS Neuron's "Work with NEFF files"; offsets from published samples. Where neither says anything,
nothing is refused: the compiler may write what nobody here has seen.
"""

from __future__ import annotations

import hashlib
import io
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from neffbuild.toolchain.neuronx.neff_payload import (
    HEADER_BYTES,
    NeffError,
    NeffMember,
    read_payload,
)

RAW, GZIP = 1, 2
"""Values of `pkg_version`."""
__all__ = [
    "Neff",
    "NeffError",
    "NeffHeader",
    "NeffMember",
    "neff_fault",
    "parse_neff",
    "read_neff",
    "read_neff_file",
]

_LAYOUT = struct.Struct("<QQQQQ128sI32s16s256sI64sQI468s")
_HASH_OFFSET = 0xAC
_GZIP_MAGIC = b"\x1f\x8b"
_HIGHEST_MAJOR = 2
"""Loaders are said to refuse a higher one."""
# What follows the MD5; the samples have the digit.
_PADDINGS = (b"0" * 16, bytes(16))
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class NeffHeader:
    """The header as it stands. Sizes are in bytes; `digest` is that of the payload as the header has it,
    in hex: SHA-256 for `pkg_version` 1, MD5 for 2."""

    pkg_version: int
    data_size: int
    neff_version: tuple[int, int]
    build_version: str
    digest: str
    uuid: str
    name: str
    num_tpb: int
    requested_tpb_count: int
    feature_bits: int
    lnc_size: int

    def document(self) -> dict[str, Any]:
        """JSON form, without what differs between two builds of one graph (UUID) or is a path (name)."""
        return {
            "pkg_version": self.pkg_version,
            "data_size": self.data_size,
            "neff_version": "{}.{}".format(*self.neff_version),
            "build_version": self.build_version,
            "digest": self.digest,
            "num_tpb": self.num_tpb,
            "requested_tpb_count": self.requested_tpb_count,
            "feature_bits": self.feature_bits,
            "lnc_size": self.lnc_size,
        }


@dataclass(frozen=True, slots=True)
class Neff:
    """A whole NEFF. `info` is what its `info.json` holds, None where it has none."""

    header: NeffHeader
    members: tuple[NeffMember, ...]
    info: dict[str, Any] | None

    @property
    def payload_bytes(self) -> int:
        """Bytes of all members as they are when unpacked."""
        return sum(member.size for member in self.members)


def read_neff_file(path: Path) -> Neff:
    """`read_neff` of a file. Raises `OSError` where it cannot be read."""
    with path.open("rb") as file:
        return read_neff(file, path.stat().st_size)


def neff_fault(path: Path) -> str | None:
    """Why a file is no whole NEFF, or None. Raises `OSError` where it cannot be read."""
    try:
        read_neff_file(path)
    except NeffError as error:
        return f"no whole NEFF: {error.message}"
    return None


def parse_neff(data: bytes) -> Neff:
    """`read_neff` of bytes."""
    return read_neff(io.BytesIO(data), len(data))


def read_neff(file: BinaryIO, size: int) -> Neff:
    """Check a container of `size` bytes from its start and list what is in it; nothing is extracted, and
    memory is bounded whatever it holds.

    Raises `NeffError` for anything but a whole NEFF: a header that does not fit the file, a payload that
    is not what the digest says, an archive or an `info.json` that cannot be read or that holds what is no
    plain file of its own folder.
    """
    header = _header(file, size)
    _check_digest(file, header)
    file.seek(HEADER_BYTES)
    members, info = read_payload(_payload(file, header.data_size), header.pkg_version == GZIP)
    return Neff(header, members, info)


def _header(file: BinaryIO, size: int) -> NeffHeader:
    block = file.read(HEADER_BYTES)
    if len(block) < HEADER_BYTES:
        raise NeffError(
            f"a NEFF starts with a header of {HEADER_BYTES} bytes, this file has {size}",
            field="header",
            value=size,
            offset=len(block),
        )
    (pkg_version, header_size, data_size, major, minor, build, tpbs, digest, uuid, name, requested,
     _per_node, features, lnc, _pad) = _LAYOUT.unpack(block)  # fmt: skip
    _expect("header_size", header_size, header_size == HEADER_BYTES, str(HEADER_BYTES), 0x08)
    _expect("pkg_version", pkg_version, pkg_version in (RAW, GZIP), "1 (tar) or 2 (gzip)", 0x00)
    whole = HEADER_BYTES + data_size == size
    _expect("data_size", data_size, whole, f"{size - HEADER_BYTES}, what the file has", 0x10)
    _expect("neff_version_major", major, major <= _HIGHEST_MAJOR, f"at most {_HIGHEST_MAJOR}", 0x18)
    if pkg_version == GZIP:
        rest = digest[16:]
        _expect("hash", rest.hex(), rest in _PADDINGS, "zeros after the MD5", _HASH_OFFSET + 16)
        digest = digest[:16]
    return NeffHeader(
        pkg_version=pkg_version,
        data_size=data_size,
        neff_version=(major, minor),
        build_version=_text(build),
        digest=digest.hex(),
        uuid=uuid.hex(),
        name=_text(name),
        num_tpb=tpbs,
        requested_tpb_count=requested,
        feature_bits=features,
        lnc_size=lnc,
    )


def _expect(field: str, value: object, holds: bool, allowed: str, offset: int) -> None:
    if not holds:
        raise NeffError(
            f"{field} at offset {offset:#x} of the header is {value}; allowed: {allowed}",
            field=field,
            value=value,
            offset=offset,
        )


def _check_digest(file: BinaryIO, header: NeffHeader) -> None:
    name = "MD5" if header.pkg_version == GZIP else "SHA-256"
    digest = hashlib.md5(usedforsecurity=False) if header.pkg_version == GZIP else hashlib.sha256()
    start = b""
    for chunk in _payload(file, header.data_size):
        start = start or chunk[: len(_GZIP_MAGIC)]
        digest.update(chunk)
    if header.pkg_version == GZIP and start != _GZIP_MAGIC:
        raise NeffError(
            f"pkg_version 2 has a gzipped payload, this one starts with {start.hex() or 'nothing'}",
            field="payload",
            value=start.hex(),
            offset=HEADER_BYTES,
        )
    if digest.hexdigest() != header.digest:
        raise NeffError(
            f"the payload's {name} is {digest.hexdigest()}, the header says {header.digest}",
            field="hash",
            value=header.digest,
            hint="the file was changed or written in part after the compiler made it",
            offset=_HASH_OFFSET,
        )


def _payload(file: BinaryIO, size: int) -> Iterator[bytes]:
    """The payload in pieces. Raises `NeffError` where the file became shorter while it was read."""
    left = size
    while left:
        chunk = file.read(min(left, _CHUNK))
        if not chunk:
            raise NeffError(
                f"the payload ends {left} bytes early",
                field="payload",
                value=size - left,
                offset=HEADER_BYTES + size - left,
            )
        left -= len(chunk)
        yield chunk


def _text(field: bytes) -> str:
    """A text up to its first NUL, whatever is in it made printable."""
    text = field.partition(b"\0")[0].decode("utf-8", "backslashreplace")
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)
