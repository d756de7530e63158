"""Writes NEFF containers as the published format has them. It imports nothing of neffbuild: the stand-in
compiler runs it as a program of its own."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import struct
import tarfile
from collections.abc import Mapping

HEADER_BYTES = 1024
_MEMBERS: Mapping[str, bytes] = {
    "info.json": json.dumps({"name": "module.neff", "version": "2.0", "cores": [0]}).encode(),
    "neff.json": b"{}",
    "kelf-0.json": b'{"graph": []}',
    "sg00/def.json": b"{}",
    "sg00/pe.bin": bytes(range(256)) * 9,
}


def make_tar(members: Mapping[str, bytes] = _MEMBERS) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def make_neff(
    members: Mapping[str, bytes] = _MEMBERS,
    *,
    pkg_version: int = 2,
    build_version: str = "2.28.7631.0",
    lnc: int = 2,
) -> bytes:
    tar = make_tar(members)
    payload = gzip.compress(tar, mtime=0) if pkg_version == 2 else tar
    return make_header(payload, pkg_version, build_version=build_version, lnc=lnc) + payload


def make_header(
    payload: bytes, pkg_version: int, *, build_version: str = "2.28.7631.0", lnc: int = 2
) -> bytes:
    """A header that is right for the payload, whatever that is."""
    header = bytearray(HEADER_BYTES)
    struct.pack_into("<QQQQQ", header, 0, pkg_version, HEADER_BYTES, len(payload), 2, 0)
    struct.pack_into("128s", header, 0x28, build_version.encode())
    struct.pack_into("<I", header, 0xA8, 1)
    if pkg_version == 2:
        digest = hashlib.md5(payload).digest() + b"0" * 16
    else:
        digest = hashlib.sha256(payload).digest()
    struct.pack_into("32s16s", header, 0xAC, digest, bytes(range(16)))
    struct.pack_into("256s", header, 0xDC, b"module.neff")
    struct.pack_into("<I", header, 0x1DC, lnc)
    struct.pack_into("<QI", header, 0x220, 0, lnc)
    return bytes(header)
