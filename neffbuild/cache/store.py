"""The one narrow protocol between the cache and the places artifacts are kept.

A store keeps two kinds of things: *documents* (small JSON files with a name and a version) and
*blobs* (files of any size named by the SHA-256 of their raw bytes). What the documents mean is not
its business: `neffbuild.cache.catalog` knows that, once, for every store. Policies (tiers, fault
injection, counting) wrap a store and are stores themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from neffbuild.cache.problem import ProblemKind


@dataclass(frozen=True, slots=True)
class Document:
    """A document as read, with the version token that `replace` compares against. The token is the
    store's own (an ETag, a digest); only equality means anything."""

    data: bytes
    version: str


@dataclass(frozen=True, slots=True)
class Listed:
    """One line of a listing: `name` as handed to `read`, `size` in bytes, `modified` in epoch seconds."""

    name: str
    size: int
    modified: float


LeftoverKind = Literal["temporary", "upload", "loaded", "quarantined"]


@dataclass(frozen=True, slots=True)
class Leftover:
    """Something in a store that is neither a document nor a blob: an unfinished write, an upload in
    parts that was never completed, an entry laid out for loading, what was damaged. `name` is the
    store's own name for it, `size` in bytes (0 where it is not known), `modified` in epoch seconds,
    `of` the key or digest it belongs to, where it says so."""

    kind: LeftoverKind
    name: str
    size: int
    modified: float
    of: str | None = None


class BlobSource(Protocol):
    """Where blobs are copied from: a store, or an archive that is being read."""

    def fetch_blob(self, digest: str, size: int, destination: Path) -> None:
        """Write the blob's raw bytes to `destination`, checking size and digest on the way.

        Raises `IntegrityError` when what is stored is missing or not the bytes the digest names;
        nothing is left at `destination` then.
        """
        ...


class Store(BlobSource, Protocol):
    """Every method raises `StoreError` when the place cannot be reached or refuses.

    Document names are relative POSIX paths below the layout version (`entries/ab/<key>.json`).
    A store nobody has written to yet reads as empty. All methods may be called from several threads.
    """

    @property
    def url(self) -> str:
        """How a user names this store."""
        ...

    @property
    def identity(self) -> str:
        """Which place this is, the same however it is spelled and reached, for what is remembered of
        it: the real path of a directory; of S3 the endpoint in force, the bucket and the prefix. Two
        names of one host are two places. Sends no request."""
        ...

    def read(self, name: str) -> Document | None:
        """The document, or None when there is none."""
        ...

    def read_many(self, names: Iterable[str]) -> Iterator[tuple[str, Document]]:
        """(name, document) of those among `names` that exist, in no particular order.

        Names that do not exist cost no request each. Documents arrive one by one, so that
        thousands of them are never in memory at once.
        """
        ...

    def present_documents(self, names: Iterable[str]) -> set[str]:
        """Which of these documents there are, without reading them: few requests for many names."""
        ...

    def create(self, name: str, data: bytes) -> bool:
        """Write a document that must not exist yet. False when it does: somebody else's stands."""
        ...

    def replace(self, name: str, data: bytes, version: str) -> bool:
        """Write over the document read as `version`. False when it has changed or gone since."""
        ...

    def delete(self, name: str) -> None:
        """Remove a document; one that is gone already is no error."""
        ...

    def list(self, prefix: str) -> Iterator[Listed]:
        """Every document whose name starts with `prefix`, in no particular order."""
        ...

    def present_blobs(self, sizes: Mapping[str, int]) -> set[str]:
        """Which of these blobs (digest → raw size in bytes) are here, by what can be seen without
        reading them: a directory compares sizes, a store that compresses sees only that they exist."""
        ...

    def put_blob(self, digest: str, source: Path) -> None:
        """Store the file's bytes under `digest`, atomically. A whole blob already here is left alone.

        Raises `IntegrityError`, and stores nothing, when the bytes are not those of `digest`.
        """
        ...

    def check_blob(self, digest: str, size: int) -> ProblemKind | None:
        """Read the whole blob and say what is wrong with it: `MISSING_BLOB`, `BAD_SIZE`,
        `BAD_DIGEST`, or None."""
        ...

    def quarantine(
        self, label: str, documents: Mapping[str, str], blobs: Mapping[str, int]
    ) -> None:
        """Take damaged things out of service, so that the next build or push writes them anew.

        `documents` (name → version) go only if they are still what was read, `blobs`
        (digest → size) only if they are still damaged. `label` names them for who looks later.
        """
        ...


class ManagedStore(Store, Protocol):
    """A store as whoever looks after it needs it. Removing what is gone already is no error."""

    def effective(self) -> Mapping[str, str | bool | float | None]:
        """The settings in force, for a person; never a secret. Raises `StoreError`."""
        ...

    def list_blobs(self) -> Iterator[Listed]:
        """Every blob: `name` is the digest, `size` that of what is stored (compressed, on S3)."""
        ...

    def list_leftovers(self) -> Iterator[Leftover]: ...

    def delete_many(self, names: Sequence[str]) -> None:
        """Remove documents."""
        ...

    def delete_blobs(self, digests: Sequence[str]) -> None: ...

    def delete_leftover(self, leftover: Leftover) -> None: ...
