"""What another neffbuild directory holds that an import may take, each document checked by itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from neffbuild.cache.attestation import attestation_problem, read_attestation
from neffbuild.cache.canonical import digest_bytes, is_digest, parse_json
from neffbuild.cache.catalog import entry_key, entry_name, manifest_name
from neffbuild.cache.entry import Entry
from neffbuild.cache.manifest import Manifest
from neffbuild.cache.problem import Problem, ProblemKind
from neffbuild.cache.store import Document, Store
from neffbuild.cache.tag import Trust
from neffbuild.config.errors import IntegrityError

_RUN_NAME = re.compile(r"runs/\d{8}T\d{6}Z-[0-9a-f]{8}\.json")
_RUN_SCHEMA = "neffbuild.run/1"
_MOST_SECONDS = 1e9
_Parsed = TypeVar("_Parsed")


@dataclass(frozen=True, slots=True)
class Contents:
    """`entries` by key, `manifests` by digest with their `documents` as stored and when they were `written`
    (epoch seconds), `pointers` from a serve config (digest) to a manifest (digest) as they are stored there,
    `runs` the run records by document name. `unsigned` entries are left out where signatures are required."""

    entries: Mapping[str, Entry]
    manifests: Mapping[str, Manifest]
    documents: Mapping[str, bytes]
    written: Mapping[str, float]
    pointers: Mapping[str, str]
    runs: Mapping[str, bytes]
    unsigned: int
    problems: tuple[Problem, ...]

    def pointers_to(self, manifests: Mapping[str, Manifest]) -> dict[str, str]:
        """config → the one of these manifests that belongs to it: the one the source's own pointer leads to.
        A directory that was pushed to has no pointers: there it is the most complete one, of those the last
        written."""
        best: dict[str, str] = {}
        for digest in sorted(manifests, key=lambda one: self._rank(one, manifests[one])):
            best[manifests[digest].config] = digest
        stated = {
            config: digest
            for config, digest in self.pointers.items()
            if digest in manifests and manifests[digest].config == config
        }
        return {**best, **stated}

    def _rank(self, digest: str, manifest: Manifest) -> tuple[int, float, str]:
        return -len(manifest.missing), self.written[digest], digest


def read_contents(store: Store, trust: Trust) -> Contents:
    """Everything in a store that can be imported, by `trust`. Raises `StoreError` when it cannot be read."""
    return _Reading(store, trust).contents()


class _Reading:
    """One reading under way: what is wrong so far."""

    def __init__(self, store: Store, trust: Trust) -> None:
        self._store = store
        self._trust = trust
        self._problems: list[Problem] = []

    def contents(self) -> Contents:
        stored = self._manifests()
        manifests = {digest: manifest for digest, (manifest, _, _) in stored.items()}
        entries = {
            key: entry for manifest in manifests.values() for key, entry in manifest.entries.items()
        }
        unsigned = 0
        runs = {}
        if self._trust.require_signature:
            # An entry filed by itself carries no signature, and neither does a run record.
            filed = {entry_key(one.name) for one in self._store.list("entries/")}
            unsigned = len(filed - entries.keys())
        else:
            entries.update(self._entries())
            runs = self._runs()
        pointers = self._pointers()
        return Contents(
            entries=entries,
            manifests=manifests,
            documents={digest: data for digest, (_, data, _) in stored.items()},
            written={digest: modified for digest, (_, _, modified) in stored.items()},
            pointers=pointers,
            runs=runs,
            unsigned=unsigned,
            problems=tuple(self._problems),
        )

    def _manifests(self) -> dict[str, tuple[Manifest, bytes, float]]:
        manifests = {}
        for digest, document, modified in self._documents("manifests/", manifest_name):
            if digest_bytes(document.data) != digest:
                self._problem(
                    ProblemKind.BAD_DIGEST, digest, "manifest is not what its digest says"
                )
                continue
            manifest = self._parsed(digest, partial(Manifest.from_json, document.data))
            if manifest is None:
                continue
            provenance = read_attestation(self._store, digest, self._trust)
            problem = attestation_problem(digest, manifest, provenance, self._trust)
            if problem is not None:
                self._problems.append(problem)
                continue
            manifests[digest] = manifest, document.data, modified
        return manifests

    def _entries(self) -> dict[str, Entry]:
        entries = {}
        for key, document, _ in self._documents("entries/", entry_name):
            entry = self._parsed(key, partial(Entry.from_json, document.data, expected_key=key))
            if entry is not None:
                entries[key] = entry
        return entries

    def _pointers(self) -> dict[str, str]:
        pointers = {}
        there = {one.name for one in self._store.list("manifests/")}
        for config, document, _ in self._documents(
            "configs/", lambda digest: f"configs/{digest}.json"
        ):
            digest = self._parsed(config, partial(_pointed, document.data))
            if digest is None:
                continue
            pointers[config] = digest
            if manifest_name(digest) not in there:
                detail = f"{manifest_name(digest)} is gone, but configs/{config}.json names it"
                self._problem(ProblemKind.MISSING_BLOB, digest, detail)
        return pointers

    def _runs(self) -> dict[str, bytes]:
        runs = {}
        for name in sorted(one.name for one in self._store.list("runs/")):
            document = self._store.read(name)
            if document is None:
                continue
            run = entry_key(name)
            if _RUN_NAME.fullmatch(name) is None:
                self._problem(ProblemKind.BAD_ENTRY, run, f"{name} is not the name of a run record")
            elif self._parsed(run, partial(_require_run, document.data)):
                runs[name] = document.data
        return runs

    def _documents(
        self, prefix: str, name_of: Callable[[str], str]
    ) -> Iterator[tuple[str, Document, float]]:
        """(key or digest, document, when it was written) of what is filed below a folder."""
        modified = {}
        for one in sorted(self._store.list(prefix), key=lambda one: one.name):
            key = entry_key(one.name)
            if is_digest(key) and name_of(key) == one.name:
                modified[one.name] = one.modified
            else:
                self._problem(ProblemKind.BAD_ENTRY, key, f"{one.name} is not a name of the layout")
        for name, document in self._store.read_many(modified):
            yield entry_key(name), document, modified[name]

    def _parsed(self, key: str, parse: Callable[[], _Parsed]) -> _Parsed | None:
        try:
            return parse()
        except IntegrityError as error:
            self._problem(ProblemKind.BAD_ENTRY, key, error.message)
            return None

    def _problem(self, kind: ProblemKind, key: str, detail: str) -> None:
        self._problems.append(Problem(kind, key, detail))


def _pointed(data: bytes) -> str:
    """The manifest that a config's pointer leads to. Raises `IntegrityError`."""
    pointer = parse_json(data, "pointer")
    digest = pointer.get("manifest") if isinstance(pointer, dict) else None
    if not is_digest(digest):
        raise IntegrityError("the config's pointer names no manifest")
    return digest


def _require_run(data: bytes) -> bool:
    """Whether this is a run record, as far as schedules and reports read it. Raises `IntegrityError`."""
    run = parse_json(data, "run record")
    try:
        good = run["schema"] == _RUN_SCHEMA and _is_seconds(run["wall_seconds"])
        for unit in run["units"]:
            seconds = unit["compile_seconds"]
            good &= seconds is None or _is_seconds(seconds)
            good &= unit["key"] is None or is_digest(unit["key"])
            good &= isinstance(unit["outcome"], str)
    except (KeyError, TypeError) as error:
        raise IntegrityError(f"run record is malformed: {error!r:.200}") from error
    if not good:
        raise IntegrityError("run record is malformed")
    return True


def _is_seconds(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < _MOST_SECONDS
