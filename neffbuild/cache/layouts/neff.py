"""The header of a NEFF, as far as it tells a whole one from a cut one and who built it.

1024 bytes, little-endian, in front of the payload (AWS Neuron documentation, "Working with NEFF files"):
header size at 0x08, payload size at 0x10, build version (128 characters) at 0x28.
"""

from __future__ import annotations

import struct

from neffbuild.cache.layouts.layout import safe_word

HEADER_BYTES = 1024


def neff_fault(header: bytes, size: int) -> str | None:
    """Why a file of `size` bytes that starts with `header` cannot be a whole NEFF; None when it can."""
    if size == 0:
        return "is empty"
    if size < HEADER_BYTES or len(header) < HEADER_BYTES:
        return f"has {size} bytes, fewer than the header of a NEFF"
    header_size, payload = struct.unpack_from("<QQ", header, 8)
    if header_size != HEADER_BYTES:
        return f"is no NEFF (its header states {header_size} bytes for itself, not {HEADER_BYTES})"
    if payload + HEADER_BYTES != size:
        return f"has {size:,} bytes and its header announces {payload + HEADER_BYTES:,}"
    return None


def neff_build_version(header: bytes) -> str | None:
    """The compiler version that a NEFF's header states, where it states one."""
    text = header[0x28 : 0x28 + 128].split(b"\0")[0]
    return safe_word(text.decode("ascii", "replace").strip())
