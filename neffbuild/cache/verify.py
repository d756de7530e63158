"""Verification: read everything, believe nothing, and say what is wrong in fixed words.

Verifying changes nothing. `repair` then takes what was found damaged out of service, so that the next
compile, pull or push writes it anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TypeVar

from neffbuild.cache.attestation import attestation_name, attestation_problem
from neffbuild.cache.canonical import digest_bytes
from neffbuild.cache.catalog import (
    entry_key,
    entry_name,
    index_name,
    manifest_name,
    quarantine_entry,
)
from neffbuild.cache.entry import FileRecord, entry_files
from neffbuild.cache.envelope import Envelope
from neffbuild.cache.index import Index
from neffbuild.cache.manifest import Manifest
from neffbuild.cache.problem import Problem, ProblemKind
from neffbuild.cache.records import pointer_name, read_pointer
from neffbuild.cache.store import Store
from neffbuild.cache.tag import TagRef, TagStatement, Trust, tag_problem
from neffbuild.config.errors import ConfigError, IntegrityError, StoreError

WORKERS = 4
"""Blobs hashed at once."""

_ANYONE = Trust()
_Parsed = TypeVar("_Parsed")


@dataclass(frozen=True, slots=True)
class Verified:
    """What was found. `broken` are the entries concerned: key → digest → size of their blobs. `files` are
    those of every entry that was checked: more than once where documents differ on it. `unusable` are
    keys of entries whose files have the right digests and are no good."""

    problems: tuple[Problem, ...]
    entries_checked: int
    blobs_checked: int
    broken: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    files: Mapping[str, Sequence[Mapping[str, FileRecord]]] = field(default_factory=dict)
    unusable: frozenset[str] = frozenset()

    @property
    def ok(self) -> bool:
        return not self.problems


def verify_keys(store: Store, keys: Iterable[str], *, workers: int = WORKERS) -> Verified:
    """Check the entries of these keys, all of which should be stored, and every blob of theirs."""
    check = _Check(store)
    check.entries(keys)
    return check.result(workers)


def verify_config(
    store: Store, config: str, keys: Iterable[str], *, workers: int = WORKERS
) -> Verified:
    """`verify_keys`, and that the manifest which `replay` and a serving process take for this config
    (its digest) can be read, where one is remembered."""
    check = _Check(store)
    check.pointer(config)
    check.entries(keys)
    return check.result(workers)


def verify_manifest(store: Store, manifest: Manifest, *, workers: int = WORKERS) -> Verified:
    """Check every blob that a manifest names, and that no unit of its plan is missing."""
    check = _Check(store)
    check.manifest(manifest)
    return check.result(workers)


def verify_tag(
    store: Store, ref: TagRef, trust: Trust, *, last_seen: int = 0, workers: int = WORKERS
) -> Verified:
    """Check a tag and everything it leads to. Raises `StoreError` when there is no such tag."""
    document = store.read(ref.document_name)
    if document is None:
        raise StoreError(f"{store.url} has no tag {ref}", field="tag", value=str(ref))
    check = _Check(store, trust)
    check.tag(ref, document.data, last_seen)
    return check.result(workers)


def verify_store(
    store: Store,
    trust: Trust,
    *,
    last_seen: Callable[[TagRef], int] = lambda _: 0,
    workers: int = WORKERS,
) -> Verified:
    """Check everything in a store: all tags, indexes, manifests and entries, and what they name.

    `trust.min_sequence` is asked of every tag.
    """
    check = _Check(store, trust)
    for name in _listed(store, "tags/"):
        document = store.read(name)
        if document is None:
            continue
        try:
            folder, _, leaf = name.removeprefix("tags/").rpartition("/")
            ref = TagRef(folder, leaf.removesuffix(".json"))
        except ConfigError as error:
            check.problem(ProblemKind.BAD_ENTRY, name, error.message)
            continue
        check.tag(ref, document.data, last_seen(ref))
    for name in _listed(store, "indexes/"):
        check.index(entry_key(name), "it is listed")
    for name in _listed(store, "manifests/"):
        check.manifest_of(entry_key(name), "it is listed")
    check.entries(entry_key(name) for name in _listed(store, "entries/"))
    return check.result(workers)


def repair(store: Store, verified: Verified) -> None:
    """Quarantine what was found damaged. Their keys are misses afterwards."""
    for key, blobs in verified.broken.items():
        quarantine_entry(store, key, blobs)
    for key in verified.unusable:
        document = store.read(entry_name(key))
        if document is not None:
            store.quarantine(key, {entry_name(key): document.version}, {})


class _Check:
    """One verification under way: what was seen, what is wrong, which blobs are left to read."""

    def __init__(self, store: Store, trust: Trust = _ANYONE) -> None:
        self._store = store
        self._trust = trust
        self._problems: dict[Problem, None] = {}
        self._addressed: set[str] = set()
        self._entries: dict[str, list[Mapping[str, FileRecord]]] = {}

    def problem(self, kind: ProblemKind, key: str, detail: str) -> None:
        self._problems[Problem(kind, key, detail)] = None

    def tag(self, ref: TagRef, data: bytes, last_seen: int) -> None:
        now = datetime.now(UTC)
        problem = tag_problem(ref, data, self._trust, last_seen=last_seen, now=now)
        if problem is not None:
            self._problems[problem] = None
        try:
            statement = TagStatement.from_envelope(Envelope.from_json(data))
        except IntegrityError:
            return
        self.index(statement.index, f"tag {ref} names it")

    def index(self, digest: str, why: str) -> None:
        index = self._parse(index_name, digest, why, Index.from_json)
        for one in index.manifests if index else ():
            self.manifest_of(one.manifest, f"index {digest} names it")

    def manifest_of(self, digest: str, why: str) -> None:
        manifest = self._parse(manifest_name, digest, why, Manifest.from_json)
        if manifest is None:
            return
        self.manifest(manifest)
        # Also where nobody's signature is asked for: what is damaged is damaged.
        document = self._store.read(attestation_name(digest))
        data = None if document is None else document.data
        problem = attestation_problem(digest, manifest, data, self._trust)
        if problem is not None:
            self._problems[problem] = None

    def pointer(self, config: str) -> None:
        try:
            digest = read_pointer(self._store, config)
        except IntegrityError as error:
            self.problem(ProblemKind.BAD_ENTRY, config, error.message)
            return
        if digest is not None:
            why = f"{pointer_name(config)} names it"
            self._parse(manifest_name, digest, why, Manifest.from_json)

    def manifest(self, manifest: Manifest) -> None:
        for unit in manifest.missing:
            name = unit.bucket_name
            self.problem(ProblemKind.MISSING_UNIT, unit.key or name, f"{name} is not stored")
        for key, entry in manifest.entries.items():
            self._add(key, entry.files)

    def entries(self, keys: Iterable[str]) -> None:
        names: dict[str, str] = {}
        for key in keys:
            try:
                names[entry_name(key)] = key
            except IntegrityError as error:
                self.problem(ProblemKind.BAD_ENTRY, key, error.message)
        for name, document in self._store.read_many(names):
            key = names.pop(name)
            try:
                self._add(key, entry_files(document.data, expected_key=key))
            except IntegrityError as error:
                self._add(key, {})
                self.problem(ProblemKind.BAD_ENTRY, key, error.message)
        for key in names.values():
            self.problem(ProblemKind.MISSING_UNIT, key, f"no entry {key} is stored")

    def result(self, workers: int) -> Verified:
        blobs = {
            key: {(file.digest, file.size) for files in many for file in files.values()}
            for key, many in self._entries.items()
        }
        wanted = sorted(set().union(*blobs.values()))
        with ThreadPoolExecutor(workers, thread_name_prefix="verify") as pool:
            faults = dict(
                zip(wanted, pool.map(lambda b: self._store.check_blob(*b), wanted), strict=True)
            )
        broken: dict[str, dict[str, int]] = {}
        for key, of_entry in blobs.items():
            for digest, size in of_entry:
                fault = faults[digest, size]
                if fault is not None:
                    self.problem(fault, key, f"blob {digest} of {size} bytes: {fault.value}")
                    broken.setdefault(key, {})[digest] = size
        for problem in self._problems:
            if problem.kind is ProblemKind.BAD_ENTRY and problem.key in self._entries:
                broken.setdefault(problem.key, {})
        return Verified(
            tuple(self._problems),
            len(self._entries),
            len({blob for blob, _ in wanted}),
            broken,
            self._entries,
        )

    def _add(self, key: str, files: Mapping[str, FileRecord]) -> None:
        self._entries.setdefault(key, []).append(files)

    def _parse(
        self,
        name_of: Callable[[str], str],
        digest: str,
        why: str,
        parse: Callable[[bytes], _Parsed],
    ) -> _Parsed | None:
        """A content-addressed document, once; None when it was seen before or is not to be used."""
        try:
            name = name_of(digest)
        except IntegrityError as error:
            self.problem(ProblemKind.BAD_ENTRY, digest, error.message)
            return None
        if name in self._addressed:
            return None
        self._addressed.add(name)
        document = self._store.read(name)
        if document is None:
            self.problem(ProblemKind.MISSING_BLOB, digest, f"{name} is gone, but {why}")
        elif digest_bytes(document.data) != digest:
            self.problem(ProblemKind.BAD_DIGEST, digest, f"{name} is not what its digest says")
        else:
            try:
                return parse(document.data)
            except IntegrityError as error:
                self.problem(ProblemKind.BAD_ENTRY, digest, f"{name}: {error.message}")
        return None


def _listed(store: Store, prefix: str) -> list[str]:
    return sorted(listed.name for listed in store.list(prefix))
