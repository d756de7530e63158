"""What is in a store, over any store: entries, manifests and indexes, and the order they are written.

The reader's test for a hit is here, once: the entry parses, hashes to its key, and every blob is
there with the right size. What fails it is a miss that the next build heals, never an error.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from neffbuild.cache.canonical import digest_bytes, digest_file, require_digest
from neffbuild.cache.entry import Entry, FileRecord, entry_blobs
from neffbuild.cache.filesystem import looks
from neffbuild.cache.index import Index
from neffbuild.cache.lease import leased
from neffbuild.cache.manifest import Manifest
from neffbuild.cache.problem import ProblemKind
from neffbuild.cache.records import read_failures
from neffbuild.cache.store import Document, Store
from neffbuild.config.errors import IntegrityError, StoreError

_ATTEMPTS = 20
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Hit:
    """A whole entry."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Miss:
    """Nothing is filed under the key."""


@dataclass(frozen=True, slots=True)
class Broken:
    """Something is filed under the key that must not be used: a miss, with its reason. `version` is
    what a healing write replaces."""

    version: str
    kind: ProblemKind
    reason: str


Lookup = Hit | Miss | Broken


def entry_name(key: str) -> str:
    """The name of the document that holds the entry of a key."""
    return f"entries/{require_digest(key)[:2]}/{key}.json"


def entry_key(name: str) -> str:
    """Inverse of `entry_name`."""
    return name.rpartition("/")[2].removesuffix(".json")


def manifest_name(digest: str) -> str:
    """The name of the document that holds a manifest."""
    return f"manifests/{require_digest(digest)}.json"


def index_name(digest: str) -> str:
    """The name of the document that holds an index."""
    return f"indexes/{require_digest(digest)}.json"


def read_entry(store: Store, key: str) -> Lookup:
    """What the store has under a key."""
    # By its name: a listing may be late to show what was just written.
    document = store.read(entry_name(key))
    return Miss() if document is None else _lookups(store, [(entry_name(key), document)])[key]


def read_entries(store: Store, keys: Iterable[str]) -> dict[str, Lookup]:
    """What the store has under each key, in the order asked; few requests for many keys."""
    found: dict[str, Lookup] = dict.fromkeys(keys, Miss())
    return found | _lookups(store, store.read_many(map(entry_name, found)))


def _lookups(store: Store, documents: Iterable[tuple[str, Document]]) -> dict[str, Lookup]:
    found: dict[str, Lookup] = {}
    entries: dict[str, Entry] = {}
    versions: dict[str, str] = {}
    for name, document in documents:
        key = entry_key(name)
        try:
            entries[key] = Entry.from_json(document.data, expected_key=key)
            versions[key] = document.version
        except IntegrityError as error:
            found[key] = Broken(document.version, ProblemKind.BAD_ENTRY, error.message)
    lost = missing_blobs(store, {key: entry.blobs for key, entry in entries.items()})
    for key, entry in entries.items():
        found[key] = (
            Broken(versions[key], ProblemKind.MISSING_BLOB, lost[key])
            if key in lost
            else Hit(entry)
        )
    return found


def read_hits(store: Store, keys: Iterable[str]) -> dict[str, Entry]:
    """key → entry, of the keys that are hits."""
    found = read_entries(store, keys)
    return {key: hit.entry for key, hit in found.items() if isinstance(hit, Hit)}


def stored_keys(store: Store, keys: Iterable[str]) -> dict[str, str | None]:
    """key → None where a whole entry is stored, else why not (it is broken, or its last compile
    failed). A key the store knows nothing of is absent.

    The same test as `read_entries` without building the entries: for plans of thousands of units.
    """
    wanted = list(dict.fromkeys(keys))
    known = whole_keys(store, wanted)
    failures = read_failures(store, [key for key in wanted if key not in known])
    known.update((key, failure.summary) for key, failure in failures.items())
    return known


def whole_keys(store: Store, keys: Iterable[str]) -> dict[str, str | None]:
    """`stored_keys` without the failures, which only a local store remembers."""
    known: dict[str, str | None] = {}
    blobs: dict[str, Mapping[str, int]] = {}
    for name, document in store.read_many(map(entry_name, keys)):
        key = entry_key(name)
        try:
            blobs[key] = entry_blobs(document.data, expected_key=key)
        except IntegrityError as error:
            known[key] = error.message
    lost = missing_blobs(store, blobs)
    known.update((key, lost.get(key)) for key in blobs)
    return known


def record_files(files: Mapping[str, Path]) -> dict[str, FileRecord]:
    """The records of files that are about to be committed: digest, size and permission bits."""
    return {
        name: FileRecord(digest_file(path), path.stat().st_size, path.stat().st_mode & 0o777)
        for name, path in files.items()
    }


def commit_entry(store: Store, entry: Entry, files: Mapping[str, Path]) -> Entry:
    """Store an entry, blobs first; the entry that stands afterwards is returned.

    That is another's where somebody committed a whole one first. A broken one is replaced if it is
    still what was read. `files` maps the names in `entry.files` to where they lie now. Raises
    `IntegrityError` when a file is not what the entry says.
    """
    current = read_entry(store, entry.key)
    if isinstance(current, Hit):
        return current.entry
    with leased(store, documents=[entry_name(entry.key)], blobs=entry.blobs):
        return commit_leased(store, entry, files)


def commit_leased(store: Store, entry: Entry, files: Mapping[str, Path]) -> Entry:
    """`commit_entry` for a caller that holds a lease on the entry and its blobs."""
    key = entry.key
    if set(files) != set(entry.files):
        raise IntegrityError(f"entry {key} and the files handed over name different files")
    data = entry.to_json()
    stored = False
    for _ in range(_ATTEMPTS):
        current = read_entry(store, key)
        if isinstance(current, Hit):
            return current.entry
        if not stored:
            for name, record in entry.files.items():
                store.put_blob(record.digest, files[name])
            stored = True
        if write_over(store, entry_name(key), data, current):
            return entry
    raise StoreError(
        f"entry {key} in {store.url} kept changing while it was written",
        hint="something removes or damages entries there; see `neffbuild verify`",
    )


def write_over(store: Store, name: str, data: bytes, current: Miss | Broken) -> bool:
    """Write an entry document where nothing whole was found. False when that is no longer so."""
    match current:
        case Miss():
            return store.create(name, data)
        case Broken(version=version, reason=reason):
            _log.warning("replacing a broken entry in %s: %s (%s)", store.url, name, reason)
            return store.replace(name, data, version)


def quarantine_entry(store: Store, key: str, blobs: Mapping[str, int]) -> None:
    """Take what is damaged among an entry's blobs (digest → size) out of service, and the entry filed
    under the key with it where that cannot be used any more. The key is then a miss."""
    damaged = {
        digest: size for digest, size in blobs.items() if store.check_blob(digest, size) is not None
    }
    document = store.read(entry_name(key))
    documents = {}
    if document is not None and not _stands_without(document, key, damaged):
        documents[entry_name(key)] = document.version
    store.quarantine(key, documents, damaged)


def write_manifest(store: Store, manifest: Manifest) -> str:
    """Store a manifest; returns its digest."""
    data = manifest.to_json()
    digest = digest_bytes(data)
    write_addressed(store, manifest_name(digest), data)
    return digest


def read_manifest(store: Store, digest: str) -> Manifest | None:
    """A manifest by digest, or None when it is not there. Raises `IntegrityError` when what is there
    is not it."""
    data = _find_addressed(store, manifest_name(digest))
    return None if data is None else Manifest.from_json(data)


def write_index(store: Store, index: Index) -> str:
    """Store an index; returns its digest."""
    data = index.to_json()
    digest = digest_bytes(data)
    write_addressed(store, index_name(digest), data)
    return digest


def read_index(store: Store, digest: str) -> Index | None:
    """An index by digest, or None when it is not there. Raises as `read_manifest` does."""
    data = _find_addressed(store, index_name(digest))
    return None if data is None else Index.from_json(data)


def read_addressed(store: Store, name: str) -> bytes | None:
    """A document named by the digest of its content, or None. Raises as `read_manifest` does."""
    document = store.read(name)
    if document is None:
        return None
    if digest_bytes(document.data) != entry_key(name):
        raise IntegrityError(
            f"{name} in {store.url} does not have the digest it is named by", value=name
        )
    return document.data


def require_addressed(store: Store, name: str, by: str) -> bytes:
    """A document named by the digest of its content, which `by` says is there. Raises `IntegrityError`
    when it is not."""
    data = _find_addressed(store, name)
    if data is None:
        raise IntegrityError(
            f"{name}, which {by} names, is not in {store.url}",
            hint="push again from where it was built; if that was just done from another host, and this "
            "is a network file system, try again in a minute",
        )
    return data


def _find_addressed(store: Store, name: str) -> bytes | None:
    """`read_addressed` for a name that something else has told us: it ought to be there, and may be late
    to show."""
    for _ in looks():
        data = read_addressed(store, name)
        if data is not None:
            return data
    return None


def write_addressed(store: Store, name: str, data: bytes) -> None:
    """Store a document under the digest of its content, replacing a damaged one."""
    for _ in range(_ATTEMPTS):
        if store.create(name, data):
            return
        current = store.read(name)
        if current is None:
            continue
        if current.data == data or store.replace(name, data, current.version):
            return
    raise StoreError(f"{name} in {store.url} kept changing while it was written", value=name)


def _stands_without(document: Document, key: str, damaged: Mapping[str, int]) -> bool:
    try:
        return damaged.keys().isdisjoint(entry_blobs(document.data, expected_key=key))
    except IntegrityError:
        return False


def missing_blobs(store: Store, blobs: Mapping[str, Mapping[str, int]]) -> dict[str, str]:
    """key → what is missing, for the entries that lack a blob. One question for all of them."""
    pending = {blob for of_entry in blobs.values() for blob in of_entry.items()}
    present: set[tuple[str, int]] = set()
    while pending:
        # More than one round only where entries disagree on a blob's size: then one of them lies, and
        # the others must not suffer for it.
        sizes = dict(pending)
        present.update((digest, sizes[digest]) for digest in store.present_blobs(sizes))
        pending.difference_update(sizes.items())
    lost: dict[str, str] = {}
    for key, of_entry in blobs.items():
        for digest, size in of_entry.items():
            if (digest, size) not in present:
                lost[key] = f"blob {digest} is missing or does not have {size} bytes"
    return lost
