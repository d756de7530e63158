"""Creating and replacing documents without ever claiming a success that another's write has undone.

Two ways: conditional writes where the server honours them, and claims where it does not. Which one is
found out by trying, on an object of our own that nobody else touches.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import random
import time
import zlib
from collections.abc import Collection, Iterator
from typing import Protocol

from neffbuild.cache.s3.connection import Refusal, Response, S3Connection
from neffbuild.cache.s3.errors import Expected
from neffbuild.cache.s3.listing import Object, objects
from neffbuild.cache.store import Document
from neffbuild.config.errors import StoreError

LARGEST_DOCUMENT = 1 << 28
"""Bytes of a document that are read; the rest of a larger one is cut off, which shows as damage."""

CLAIM_EXPIRES = 120.0
"""Seconds after which a claim is taken for that of a dead process, by the server's clock."""

_CLAIM_USABLE = 30.0
_CLAIM_WAIT = 300.0
_LONGEST_PAUSE = 2.0
_ATTEMPTS = 20
_LOST = {Expected.PRECONDITION, Expected.CONFLICT, Expected.MISSING}
_TRIED = {*_LOST, Expected.UNSUPPORTED}
_NO_ETAG = f'"{"0" * 32}"'


class DocumentWrites(Protocol):
    """`create`, `replace` and `remove` return whether they wrote: False means that another's write
    stands. Keys are whole object keys, versions are ETags."""

    name: str

    def create(self, key: str, data: bytes) -> bool: ...

    def replace(self, key: str, data: bytes, version: str) -> bool: ...

    def remove(self, key: str, version: str) -> bool: ...


def choose_writes(s3: S3Connection, scratch: str) -> DocumentWrites:
    """The way to write documents that is safe on this server. `scratch` is where our own objects may
    lie for a moment."""
    if s3.options.conditional_writes == "off":
        return ClaimedWrites(s3, scratch, "off: claims")
    if s3.is_aws:
        return ConditionalWrites(s3, "auto: honoured by S3")
    refused = _why_not_conditional(s3, f"{scratch}probe-{os.urandom(16).hex()}")
    if refused is None:
        return ConditionalWrites(s3, "auto: honoured by the server")
    return ClaimedWrites(s3, scratch, f"auto: {refused} by the server, claims instead")


class ConditionalWrites:
    """`If-None-Match: *` and `If-Match`: the server decides, in one step."""

    def __init__(self, s3: S3Connection, name: str) -> None:
        self.name = name
        self._s3 = s3

    def create(self, key: str, data: bytes) -> bool:
        for attempt in range(_ATTEMPTS):
            answer = put(self._s3, key, data, _LOST, IfNoneMatch="*")
            if not isinstance(answer, Refusal):
                return True
            if answer.why is Expected.PRECONDITION and not answer.repeated:
                return False
            # Another write is under way, or an attempt of ours succeeded and its answer was lost.
            current = get(self._s3, key)
            if current is not None:
                return answer.repeated and current.data == data
            _pause(self._s3, attempt)
        raise _unsettled(self._s3, key)

    def replace(self, key: str, data: bytes, version: str) -> bool:
        for attempt in range(_ATTEMPTS):
            answer = put(self._s3, key, data, _LOST, IfMatch=version)
            if not isinstance(answer, Refusal):
                return True
            if answer.why is not Expected.CONFLICT and not answer.repeated:
                return False
            current = get(self._s3, key)
            if current is None or current.version != version:
                return answer.repeated and current is not None and current.data == data
            _pause(self._s3, attempt)
        raise _unsettled(self._s3, key)

    def remove(self, key: str, version: str) -> bool:
        if _etag(self._s3, key) != version:
            return False
        # Not every server compares on deletion; one that does closes the gap since we looked.
        answer = self._s3.call("DeleteObject", key, expect=_TRIED, IfMatch=version)
        if isinstance(answer, Refusal) and answer.why is Expected.UNSUPPORTED:
            delete(self._s3, key)
        return not isinstance(answer, Refusal) or answer.why is Expected.UNSUPPORTED


class ClaimedWrites:
    """Reading, writing and reading back, while holding a claim on the key.

    A claim is an object of our own in a folder of the key's. Whoever sees no other claim there after
    writing theirs may go on: of two, the one that wrote later sees the other's. Of several that see
    each other the first by name waits and the others step back. This needs nothing of a server but
    that it lists what was written.
    """

    def __init__(self, s3: S3Connection, scratch: str, name: str) -> None:
        self.name = name
        self._s3 = s3
        self._scratch = scratch

    def create(self, key: str, data: bytes) -> bool:
        if get(self._s3, key) is not None:
            return False
        with self._claim(key):
            return get(self._s3, key) is None and self._write(key, data)

    def replace(self, key: str, data: bytes, version: str) -> bool:
        with self._claim(key):
            return _etag(self._s3, key) == version and self._write(key, data)

    def remove(self, key: str, version: str) -> bool:
        with self._claim(key):
            if _etag(self._s3, key) != version:
                return False
            delete(self._s3, key)
            return True

    def _write(self, key: str, data: bytes) -> bool:
        put(self._s3, key, data)
        current = get(self._s3, key)
        return current is not None and current.data == data

    @contextlib.contextmanager
    def _claim(self, key: str) -> Iterator[None]:
        folder = f"{self._scratch}claims/{hashlib.sha256(key.encode()).hexdigest()}/"
        deadline = time.monotonic() + _CLAIM_WAIT
        attempt = 0
        while True:
            claim = f"{folder}{os.urandom(16).hex()}"
            claimed_at = time.monotonic()
            put(self._s3, claim, b"{}")
            try:
                while True:
                    held_for = time.monotonic() - claimed_at
                    first = self._first_claim(folder, claim, held_for)
                    if first is not None or held_for > _CLAIM_USABLE:
                        break
                    _pause(self._s3, 0)
                if first == claim and held_for <= _CLAIM_USABLE:
                    yield
                    return
            finally:
                delete(self._s3, claim)
            if time.monotonic() > deadline:
                raise _unsettled(self._s3, key)
            _pause(self._s3, attempt)
            attempt += 1

    def _first_claim(self, folder: str, claim: str, held_for: float) -> str | None:
        """`claim` if nobody else claims the key; another's, when we are to step back; None while those
        are there who will step back for us."""
        claims = list(objects(self._s3, folder))
        written = next((one.modified for one in claims if one.key == claim), None)
        if written is None:
            return ""  # somebody took ours for expired
        now = written + held_for
        others = [one.key for one in claims if one.key != claim and not self._expired(one, now)]
        if not others:
            return claim
        return None if claim < min(others) else min(others)

    def _expired(self, one: Object, now: float) -> bool:
        if now - one.modified <= CLAIM_EXPIRES:
            return False
        delete(self._s3, one.key)
        return True


def get(s3: S3Connection, key: str) -> Document | None:
    """A document by its key, or None."""
    answer = s3.read_whole(key, expect={Expected.MISSING}, largest=LARGEST_DOCUMENT)
    return None if isinstance(answer, Refusal) else Document(*answer)


def put(
    s3: S3Connection,
    key: str,
    data: bytes,
    expect: Collection[Expected] = (),
    **conditions: str,
) -> Response | Refusal:
    """Write a document."""
    return s3.call(
        "PutObject",
        key,
        expect=expect,
        Body=data,
        ContentType="application/json",
        **checksum(s3, data),
        **conditions,
    )


def delete(s3: S3Connection, key: str) -> None:
    """Remove an object; one that is gone already is no error."""
    s3.call("DeleteObject", key, expect={Expected.MISSING})


def checksum(s3: S3Connection, data: bytes) -> dict[str, str]:
    """The checksum of a body, which the server compares and keeps. In a header of its own: bodies in
    chunks with a trailer, as botocore would send them over TLS, are more than many servers take."""
    if s3.options.checksums == "when_required":
        return {}
    return {"ChecksumCRC32": base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()}


def _why_not_conditional(s3: S3Connection, probe: str) -> str | None:
    """Try conditional writes on an object of our own: None, `rejected` or `ignored`."""
    created = put(s3, probe, b"{}", _TRIED, IfNoneMatch="*")
    if isinstance(created, Refusal):
        ours = created.why is Expected.PRECONDITION and created.repeated
        if not ours:
            return "rejected"
    try:
        for condition in ({"IfNoneMatch": "*"}, {"IfMatch": _NO_ETAG}):
            answer = put(s3, probe, b"{}", _TRIED, **condition)
            if not isinstance(answer, Refusal):
                return "ignored"
            if answer.why is Expected.UNSUPPORTED:
                return "rejected"
        return None
    finally:
        # Whoever may not delete leaves it to the collector.
        s3.call("DeleteObject", probe, expect={Expected.MISSING, Expected.FORBIDDEN})


def _etag(s3: S3Connection, key: str) -> str | None:
    answer = s3.call("HeadObject", key, expect={Expected.MISSING})
    return None if isinstance(answer, Refusal) else str(answer["ETag"])


def _pause(s3: S3Connection, attempt: int) -> None:
    s3.pause(random.uniform(0, min(_LONGEST_PAUSE, 0.05 * 2**attempt)))


def _unsettled(s3: S3Connection, key: str) -> StoreError:
    return StoreError(
        f"cannot write s3://{s3.options.bucket}/{key}: others kept writing it",
        value=s3.options.url,
        hint="try again; if nobody else writes there, the server answers conflicts that do not exist",
    )
