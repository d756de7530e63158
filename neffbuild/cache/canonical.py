"""Canonical JSON and content digests: the one way anything here is hashed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

_CHUNK = 1 << 20


def canonical_json(document: Any) -> bytes:
    """UTF-8 JSON with sorted keys, no spaces and no NaN: equal documents give equal bytes.

    Raises `ValueError` for NaN and infinities, `TypeError` for what JSON cannot hold.
    """
    return json.dumps(
        document, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()


def digest_bytes(data: bytes) -> str:
    """SHA-256, 64 lower-case hex digits."""
    return hashlib.sha256(data).hexdigest()


def digest_document(document: Any) -> str:
    """SHA-256 of the canonical JSON."""
    return digest_bytes(canonical_json(document))


def digest_file(path: Path) -> str:
    """SHA-256 of a file's raw bytes, read in constant memory."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
