"""Canonical JSON and content digests: the one way anything here is hashed, or parsed when it comes
from a store."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

from neffbuild.config.errors import IntegrityError

_CHUNK = 1 << 20
_DIGEST = re.compile(r"[0-9a-f]{64}")


def canonical_json(document: Any) -> bytes:
    """UTF-8 JSON with sorted keys, no spaces and no NaN: equal documents give equal bytes.

    Raises `ValueError` for NaN and infinities, `TypeError` for what JSON cannot hold.
    """
    return json.dumps(
        document, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()


def parse_json(data: bytes, what: str) -> Any:
    """Parse bytes that a store returned; `what` names them in the message.

    Raises `IntegrityError` for anything that could not be canonical JSON again: other encodings,
    NaN, lone surrogates, nesting or numbers beyond what the interpreter takes.
    """
    try:
        document = json.loads(data.decode(), parse_constant=refuse_constant)
        if b"\\u" in data:
            # An escaped lone surrogate parses, and only fails when somebody hashes the result.
            json.dumps(document, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{what} is not valid JSON: {error}") from error
    return document


def is_digest(value: object) -> TypeGuard[str]:
    """Whether `value` is a SHA-256 as written everywhere here: 64 lower-case hex digits."""
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def require_digest(value: object) -> str:
    """`value`, if it is a SHA-256. Raises `IntegrityError` otherwise."""
    if not is_digest(value):
        raise IntegrityError(f"malformed SHA-256 digest {value!r:.100}")
    return value


def require_object(value: object) -> dict[str, Any]:
    """`value`, if it is a JSON object. Raises `IntegrityError` otherwise."""
    if not isinstance(value, dict):
        raise IntegrityError(f"expected a JSON object, got {type(value).__name__}")
    return value


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


def refuse_constant(name: str) -> NoReturn:
    """What a strict parser does with NaN and infinities."""
    raise ValueError(f"{name} is not JSON")
