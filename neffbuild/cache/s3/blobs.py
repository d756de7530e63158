"""Blobs as objects: compressed with zstd on the way up, checked against digest and size on the way
down, never whole in memory."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self, cast

import zstandard

from neffbuild.cache import files
from neffbuild.cache.problem import ProblemKind
from neffbuild.cache.s3.connection import Refusal, S3Connection
from neffbuild.cache.s3.errors import REQUEST_ERRORS, Expected, error_in_body
from neffbuild.cache.s3.writes import checksum
from neffbuild.config.errors import IntegrityError, StoreError

PART_BYTES = 8 << 20
"""A blob that compresses to more is uploaded in parts of this size, or larger ones where S3's limit
of 10,000 parts asks for it."""

LEVEL = 1
LARGEST_WINDOW = 1 << 23
"""Bytes of history a compressed blob may make its reader keep; zstd's levels up to 19 stay within."""

_MOST_PARTS = 10_000
_PARTS_AT_ONCE = 4
_CHUNK = 1 << 20
_CONTENT_TYPE = "application/zstd"
_RAW_SIZE = "raw-size"
_ENDED = {Expected.MISSING, Expected.PRECONDITION}


@dataclass(frozen=True, slots=True)
class Examined:
    """What reading a blob found: the fault, if any, and the ETag of what was read."""

    fault: ProblemKind | None
    etag: str | None = None


def is_stored(s3: S3Connection, key: str, size: int) -> bool:
    """Whether a blob of this raw size was uploaded whole under the key, by what the server keeps beside
    it. Whoever may write but not look is told no."""
    answer = s3.call("HeadObject", key, expect={Expected.MISSING, Expected.FORBIDDEN})
    if isinstance(answer, Refusal):
        return False
    stated: object = answer["Metadata"].get(_RAW_SIZE)
    return stated == str(size) and answer["ContentLength"] > 0


def upload(s3: S3Connection, key: str, source: Path, digest: str) -> None:
    """Store a file. Raises `IntegrityError`, and stores nothing, when its bytes are not those of
    `digest`."""
    with files.refusals("read", source), source.open("rb") as file:
        size = source.stat().st_size
        part_bytes = max(PART_BYTES, -(-size // (_MOST_PARTS - 1)))
        content = hashlib.sha256()

        def check() -> None:
            if content.hexdigest() != digest:
                raise IntegrityError(
                    f"{source} is not the blob {digest} it was recorded as",
                    hint="something wrote to the file while it was being stored",
                )

        parts = _compressed(file, size, part_bytes, content, source)
        first = next(parts)
        second = next(parts, None)
        if second is not None:
            _upload_parts(s3, key, itertools.chain((first, second), parts), size, check)
            return
        check()
        s3.done(
            "PutObject",
            key,
            Body=first,
            ContentType=_CONTENT_TYPE,
            Metadata={_RAW_SIZE: str(size)},
            **checksum(s3, first),
        )
        s3.statistics.count_sent(len(first))


def examine(
    s3: S3Connection, key: str, digest: str, size: int, copy: IO[bytes] | None = None
) -> Examined:
    """Read a blob to its end and say what is wrong with it; its raw bytes are written to `copy`.

    Not more than `size` bytes are ever unpacked. What looks damaged is read once more before that is
    believed: something on the way may have cut it short.
    """
    examined = _examine(s3, key, digest, size, copy)
    if examined.fault in (None, ProblemKind.MISSING_BLOB):
        return examined
    s3.statistics.count_retry(f"blob:{examined.fault}")
    if copy is not None:
        copy.seek(0)
        copy.truncate()
    return _examine(s3, key, digest, size, copy)


def _examine(
    s3: S3Connection, key: str, digest: str, size: int, copy: IO[bytes] | None
) -> Examined:
    content = hashlib.sha256()
    seen = 0
    with _Body(s3, key) as body:
        try:
            for chunk in _decompressed(body):
                seen += len(chunk)
                if seen > size:
                    break
                content.update(chunk)
                if copy is not None:
                    copy.write(chunk)
        except zstandard.ZstdError:
            return Examined(ProblemKind.BAD_DIGEST, body.etag)
    if body.etag is None:
        return Examined(ProblemKind.MISSING_BLOB)
    if seen != size:
        return Examined(ProblemKind.BAD_SIZE, body.etag)
    fault = None if content.hexdigest() == digest else ProblemKind.BAD_DIGEST
    return Examined(fault, body.etag)


def _compressed(
    file: IO[bytes], size: int, part_bytes: int, content: Any, source: Path
) -> Iterator[bytes]:
    """A file's zstd frame in parts of one size, the last one smaller; `content` hashes raw bytes."""
    chunker: Any = zstandard.ZstdCompressor(level=LEVEL).chunker(size=size, chunk_size=part_bytes)
    try:
        while chunk := file.read(_CHUNK):
            content.update(chunk)
            yield from chunker.compress(chunk)
        yield from chunker.finish()
    except zstandard.ZstdError as error:
        raise IntegrityError(
            f"{source} does not have the {size} bytes it had when it was opened",
            hint="something wrote to the file while it was being stored",
        ) from error


def _decompressed(body: _Body) -> Iterator[bytes]:
    unpacker = zstandard.ZstdDecompressor(max_window_size=LARGEST_WINDOW)
    # Reading across frames makes anything behind the first one count, or fail to parse.
    reader = unpacker.stream_reader(cast("Any", body), read_size=_CHUNK, read_across_frames=True)
    while chunk := reader.read(_CHUNK):
        yield chunk


def _upload_parts(
    s3: S3Connection, key: str, parts: Iterator[bytes], size: int, check: Callable[[], None]
) -> None:
    """A multipart upload, a few parts at a time. `check` is asked before it is made visible."""
    algorithm = {} if s3.options.checksums == "when_required" else {"ChecksumAlgorithm": "CRC32"}
    upload_id = s3.done(
        "CreateMultipartUpload",
        key,
        ContentType=_CONTENT_TYPE,
        Metadata={_RAW_SIZE: str(size)},
        **algorithm,
    )["UploadId"]

    def send(number: int, part: bytes) -> dict[str, Any]:
        checked = checksum(s3, part)
        answer = s3.done(
            "UploadPart", key, UploadId=upload_id, PartNumber=number, Body=part, **checked
        )
        s3.statistics.count_sent(len(part))
        return {"PartNumber": number, "ETag": answer["ETag"], **checked}

    try:
        with ThreadPoolExecutor(_PARTS_AT_ONCE, thread_name_prefix="s3-part") as pool:
            sent: list[dict[str, Any]] = []
            under_way: deque[Future[dict[str, Any]]] = deque()
            for number, part in enumerate(parts, 1):
                if len(under_way) == _PARTS_AT_ONCE:
                    sent.append(under_way.popleft().result())
                under_way.append(pool.submit(send, number, part))
            sent.extend(future.result() for future in under_way)
        check()
        completed = s3.call(
            "CompleteMultipartUpload",
            key,
            expect={Expected.NO_UPLOAD},
            UploadId=upload_id,
            MultipartUpload={"Parts": sent},
        )
        # An upload that is gone may have been completed by an attempt whose answer was lost.
        if isinstance(completed, Refusal) and not is_stored(s3, key, size):
            raise StoreError(
                f"cannot write s3://{s3.options.bucket}/{key}: its multipart upload was removed",
                value=s3.options.url,
                hint="a lifecycle rule or a collector ends uploads too early; push again",
            )
    except BaseException:
        with contextlib.suppress(*REQUEST_ERRORS):
            s3.send("AbortMultipartUpload", key, UploadId=upload_id)
        raise


class _Body:
    """An object's bytes as a stream that survives broken connections: it goes on where it stopped, as
    long as the object is still the same, and ends early when it is not."""

    def __init__(self, s3: S3Connection, key: str) -> None:
        self.etag: str | None = None
        self._s3 = s3
        self._key = key
        self._offset = 0
        self._stream: Any = None
        self._attempts = s3.attempts("GetObject", key)

    def read(self, size: int) -> bytes:
        while True:
            try:
                if self._stream is None:
                    self._open()
                chunk: bytes = self._stream.read(size)
                if self._offset == 0 and (error := error_in_body(chunk, "GetObject")):
                    raise error
                break
            except REQUEST_ERRORS as error:
                self.close()
                if self._attempts.failed(error, _ENDED) is not None:
                    return b""
        if chunk:
            self._offset += len(chunk)
            self._s3.statistics.count_received(len(chunk))
            self._attempts = self._s3.attempts("GetObject", self._key)
        return chunk

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> None:
        conditions = {}
        if self._offset:
            conditions = {"Range": f"bytes={self._offset}-", "IfMatch": self.etag}
        response = self._s3.send("GetObject", self._key, **conditions)
        self._stream, self.etag = response["Body"], response["ETag"]
        if self._offset and "ContentRange" not in response:
            self._skip(self._offset)  # a server that knows no ranges has started anew

    def _skip(self, size: int) -> None:
        while size and (skipped := self._stream.read(min(size, _CHUNK))):
            size -= len(skipped)
