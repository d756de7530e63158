"""`Store` over an S3 bucket. What each method promises is said once, in `neffbuild.cache.store`."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path

from neffbuild.cache import files
from neffbuild.cache.canonical import is_digest, require_digest
from neffbuild.cache.names import LAYOUT, NOT_DOCUMENTS, is_name, valid_name, valid_prefix
from neffbuild.cache.problem import ProblemKind
from neffbuild.cache.s3.blobs import Examined, examine, is_stored, upload
from neffbuild.cache.s3.connection import S3Connection
from neffbuild.cache.s3.listing import FEW, existing, folders, objects
from neffbuild.cache.s3.options import S3Options
from neffbuild.cache.s3.statistics import S3Statistics
from neffbuild.cache.s3.sweep import abort_upload, delete_objects, unfinished_uploads
from neffbuild.cache.s3.writes import DocumentWrites, choose_writes, delete, get
from neffbuild.cache.store import Document, Leftover, Listed
from neffbuild.config.errors import IntegrityError

READERS = 16
"""Documents read at once."""

_UPLOAD_MARK = "?uploadId="
_log = logging.getLogger(__name__)


class S3Store:
    """Documents as objects of their names below `PREFIX/v1/`, blobs compressed with zstd under
    `PREFIX/v1/blobs/sha256/<aa>/<digest>`, objects of a moment's use in `PREFIX/v1/tmp/`.

    Connects with the first request. Every object it touches is under the prefix.
    """

    def __init__(self, options: S3Options) -> None:
        self.options = options
        self._s3 = S3Connection(options)
        self._base = f"{options.base}{LAYOUT}/"
        # What a listing has shown to be absent is not asked for again, one by one, before it is sent.
        self._seen_absent: set[str] = set()
        self._choosing = threading.Lock()
        self._chosen: DocumentWrites | None = None

    def __reduce__(self) -> tuple[object, ...]:
        # A worker of a farm connects for itself.
        return S3Store, (self.options,)

    @property
    def url(self) -> str:
        return self.options.url

    @property
    def identity(self) -> str:
        return self._s3.identity

    @property
    def statistics(self) -> S3Statistics:
        """Requests, retries and errors so far."""
        return self._s3.statistics

    def effective(self) -> dict[str, str | bool | float | None]:
        """What is in force once URL, environment and AWS configuration are taken together. Sends no
        request, but may ask for credentials. Raises `StoreError`."""
        writes = self._chosen.name if self._chosen else self.options.conditional_writes
        return {**self._s3.effective(), "conditional_writes": writes}

    def read(self, name: str) -> Document | None:
        return get(self._s3, self._key(name))

    def read_many(self, names: Iterable[str]) -> Iterator[tuple[str, Document]]:
        wanted = list(dict.fromkeys(map(valid_name, names)))
        if len(wanted) > FEW:
            wanted = sorted(self.present_documents(wanted))
        with ThreadPoolExecutor(READERS, thread_name_prefix="s3-read") as pool:
            # A window, so that documents nobody has taken yet do not pile up.
            left = iter(wanted)
            window: deque[tuple[str, Future[Document | None]]] = deque()
            while True:
                for name in islice(left, 2 * READERS - len(window)):
                    window.append((name, pool.submit(self.read, name)))
                if not window:
                    return
                name, reading = window.popleft()
                document = reading.result()
                if document is not None:
                    yield name, document

    def present_documents(self, names: Iterable[str]) -> set[str]:
        keys = {self._key(name): name for name in names}
        return {keys[key] for key in existing(self._s3, self._base, keys)}

    def create(self, name: str, data: bytes) -> bool:
        return self._writes().create(self._key(name), data)

    def replace(self, name: str, data: bytes, version: str) -> bool:
        return self._writes().replace(self._key(name), data, version)

    def delete(self, name: str) -> None:
        delete(self._s3, self._key(name))

    def list(self, prefix: str) -> Iterator[Listed]:
        if "/" in valid_prefix(prefix):
            starts = [self._base + prefix]
        else:
            # Blobs may be many more than documents: not even their pages are asked for.
            aside = {f"{self._base}{folder}/" for folder in NOT_DOCUMENTS}
            starts = [f for f in folders(self._s3, self._base + prefix) if f not in aside]
        for start in starts:
            for item in objects(self._s3, start):
                name = item.key.removeprefix(self._base)
                if is_name(name):
                    yield Listed(name, item.size, item.modified)

    def present_blobs(self, sizes: Mapping[str, int]) -> set[str]:
        keys = {self._blob_key(digest): digest for digest in sizes}
        present = {keys[key] for key in existing(self._s3, self._base, keys)}
        self._seen_absent.update(sizes.keys() - present)
        return present

    def put_blob(self, digest: str, source: Path) -> None:
        key = self._blob_key(digest)
        with files.refusals("read", source):
            size = source.stat().st_size
        if digest in self._seen_absent or not is_stored(self._s3, key, size):
            upload(self._s3, key, source, digest)
            self._seen_absent.discard(digest)

    def fetch_blob(self, digest: str, size: int, destination: Path) -> None:
        key = self._blob_key(digest)
        try:
            with files.refusals("write", destination), destination.open("wb") as file:
                fault = examine(self._s3, key, digest, size, file).fault
            if fault is not None:
                raise IntegrityError(
                    f"blob {digest} in {self.url} is damaged or gone ({fault.value})",
                    hint="`neffbuild verify URL --repair`, then push it again from where it was built",
                )
        except BaseException:
            with contextlib.suppress(OSError):
                destination.unlink()
            raise

    def check_blob(self, digest: str, size: int) -> ProblemKind | None:
        return self._examined(digest, size).fault

    def quarantine(
        self, label: str, documents: Mapping[str, str], blobs: Mapping[str, int]
    ) -> None:
        for name, version in documents.items():
            if self._writes().remove(self._key(name), version):
                _log.warning("%s: removed the damaged %s of %s", self.url, name, label)
        for digest, size in blobs.items():
            examined = self._examined(digest, size)
            if examined.fault is None or examined.etag is None:
                continue
            if self._writes().remove(self._blob_key(digest), examined.etag):
                _log.warning("%s: removed the damaged blob %s of %s", self.url, digest, label)

    def list_blobs(self) -> Iterator[Listed]:
        for item in objects(self._s3, f"{self._base}blobs/sha256/"):
            digest = item.key.rpartition("/")[2]
            if is_digest(digest) and item.key == self._blob_key(digest):
                yield Listed(digest, item.size, item.modified)

    def list_leftovers(self) -> Iterator[Leftover]:
        for item in objects(self._s3, f"{self._base}tmp/"):
            yield Leftover("temporary", item.key, item.size, item.modified)
        for begun in unfinished_uploads(self._s3, self._base):
            digest = begun.key.rpartition("/")[2]
            name = f"{begun.key}{_UPLOAD_MARK}{begun.id}"
            yield Leftover("upload", name, 0, begun.begun, digest)

    def delete_many(self, names: Sequence[str]) -> None:
        delete_objects(self._s3, [self._key(name) for name in names])

    def delete_blobs(self, digests: Sequence[str]) -> None:
        delete_objects(self._s3, [self._blob_key(digest) for digest in digests])

    def delete_leftover(self, leftover: Leftover) -> None:
        key, _, upload_id = leftover.name.partition(_UPLOAD_MARK)
        if leftover.kind == "upload":
            abort_upload(self._s3, key, upload_id)
        else:
            delete(self._s3, key)

    def _examined(self, digest: str, size: int) -> Examined:
        return examine(self._s3, self._blob_key(digest), digest, size)

    def _writes(self) -> DocumentWrites:
        if self._chosen is None:
            with self._choosing:
                if self._chosen is None:
                    self._chosen = choose_writes(self._s3, f"{self._base}tmp/")
                    _log.debug("%s: conditional writes: %s", self.url, self._chosen.name)
        return self._chosen

    def _key(self, name: str) -> str:
        return self._base + valid_name(name)

    def _blob_key(self, digest: str) -> str:
        return f"{self._base}blobs/sha256/{require_digest(digest)[:2]}/{digest}"
