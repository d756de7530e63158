"""Importing: everything useful of another neffbuild directory, into the local cache.

What comes over are entries with their blobs, manifests, the pointers from serve configs to manifests, and run
records. The order of writes is that of a pull, so whatever is visible is whole, wherever it is interrupted.
Tags and indexes stay behind: they speak of the store they were pushed to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from neffbuild.cache.catalog import (
    entry_name,
    manifest_name,
    read_hits,
    read_manifest,
    write_addressed,
)
from neffbuild.cache.copying import Progress, file_modes, write_entries
from neffbuild.cache.directory import DirectoryStore
from neffbuild.cache.entry import Entry
from neffbuild.cache.import_contents import Contents, read_contents
from neffbuild.cache.import_source import Fault, Source
from neffbuild.cache.lease import leased_if_writable
from neffbuild.cache.manifest import Manifest
from neffbuild.cache.problem import Problem, ProblemKind
from neffbuild.cache.records import read_pointer, write_pointer
from neffbuild.cache.tag import Trust
from neffbuild.config.errors import ConfigError, IntegrityError

Blob = tuple[str, int]
"""Digest and size in bytes. Where two entries disagree on a blob's size, one of them lies, and the
other must not suffer for it."""


@dataclass(frozen=True, slots=True)
class Count:
    """`whole`: undamaged ones in the source; `imported`: those of them that the cache had not."""

    whole: int
    imported: int

    def document(self) -> dict[str, int]:
        return {"whole": self.whole, "imported": self.imported}


@dataclass(frozen=True, slots=True)
class Imported:
    """What an import found, what it wrote, and what was damaged. `unsigned` entries were left out because
    signatures are required and no signed manifest names them."""

    entries: Count
    manifests: Count
    configs: Count
    runs: Count
    unsigned: int
    blobs_copied: int
    bytes_copied: int
    problems: tuple[Problem, ...]


def import_artifacts(
    source: Source, local: DirectoryStore, *, trust: Trust, progress: Progress | None = None
) -> Imported:
    """Copy what is whole in `source` and missing or damaged in `local`.

    Where `local` has a whole entry under a key already, that one stays. A config's pointer is moved unless
    the manifest it leads to lacks no more units than the imported one. A repeated import goes on where one
    broke off.

    Raises `ConfigError` where there is nothing to import, `IntegrityError` where nothing of it may be
    believed, `StoreError` where either side cannot be used.
    """
    contents = read_contents(source.documents, trust)
    _require_something(source, contents)
    entries, manifests = contents.entries, contents.manifests
    wanted = {blob for one in _all_entries(contents) for blob in one.blobs.items()}
    with leased_if_writable(
        local,
        documents=[*map(entry_name, entries), *map(manifest_name, manifests)],
        blobs={digest for digest, _ in wanted},
    ):
        faults, copied = _copy_blobs(source, local, wanted, _modes(contents), progress)
        whole = {key: entry for key, entry in entries.items() if _is_whole(entry, faults)}
        had = read_hits(local, whole)
        write_entries(local, whole)
        complete = {
            digest: manifest
            for digest, manifest in manifests.items()
            if all(_is_whole(entry, faults) for entry in manifest.entries.values())
        }
        new_manifests = _write_manifests(local, complete, contents.documents)
        pointers = contents.pointers_to(complete)
        new_pointers = _write_pointers(local, pointers, complete)
        new_runs = sum(local.create(name, data) for name, data in contents.runs.items())
    return Imported(
        entries=Count(len(whole), len(whole.keys() - had.keys())),
        manifests=Count(len(complete), new_manifests),
        configs=Count(len(pointers), new_pointers),
        runs=Count(len(contents.runs), new_runs),
        unsigned=contents.unsigned,
        blobs_copied=len(copied),
        bytes_copied=sum(size for _, size in copied),
        problems=(*_damage(source), *contents.problems, *_lost(contents, faults)),
    )


def _require_something(source: Source, contents: Contents) -> None:
    if contents.entries or contents.manifests or contents.runs:
        return
    if source.damage is not None:
        raise IntegrityError(
            source.damage,
            value=source.name,
            hint="copy the archive again; nothing of it could be imported",
        )
    if contents.problems:
        first = contents.problems[0]
        raise IntegrityError(
            f"nothing in {source.name} can be imported: {len(contents.problems)} documents are not to be "
            f"used; the first: {first.kind.value} {first.key}: {first.detail}",
            value=source.name,
            hint="import from another copy, or pull from where it was pushed",
        )
    if contents.unsigned:
        raise IntegrityError(
            f"nothing in {source.name} is signed, and signatures are required: its "
            f"{contents.unsigned} entries are named by no manifest with signed provenance",
            value=source.name,
            hint="push what was compiled to a directory with --key and import that, or pull a signed tag",
        )
    raise ConfigError(
        f"there is nothing to import in {source.name}: it holds no entry, manifest or run record",
        value=source.name,
        hint="expected is a neffbuild cache, or a directory that was pushed to: the folder that holds "
        "`v1/entries` and `v1/blobs`, or a tar of it",
    )


def _all_entries(contents: Contents) -> list[Entry]:
    embedded = [
        one for manifest in contents.manifests.values() for one in manifest.entries.values()
    ]
    return [*contents.entries.values(), *embedded]


def _modes(contents: Contents) -> dict[str, int]:
    modes = file_modes(contents.entries)
    for manifest in contents.manifests.values():
        modes.update(file_modes(manifest.entries))
    return modes


def _copy_blobs(
    source: Source,
    local: DirectoryStore,
    wanted: set[Blob],
    modes: Mapping[str, int],
    progress: Progress | None,
) -> tuple[dict[Blob, Fault], set[Blob]]:
    """What could not be copied, and what was."""
    # What is here already is read too: an import that ends well vouches for all of it.
    pending = {blob for blob in wanted if local.check_blob(*blob) is not None}
    absent = set(pending)
    faults: dict[Blob, Fault] = {}
    while pending:
        sizes = dict(pending)
        failed = source.copy_blobs(local, sizes, modes, progress)
        faults.update(((digest, sizes[digest]), fault) for digest, fault in failed.items())
        pending.difference_update(sizes.items())
    return faults, absent - faults.keys()


def _is_whole(entry: Entry, faults: Mapping[Blob, Fault]) -> bool:
    return faults.keys().isdisjoint(entry.blobs.items())


def _write_manifests(
    local: DirectoryStore, digests: Iterable[str], documents: Mapping[str, bytes]
) -> int:
    absent = [digest for digest in digests if _stored_manifest(local, digest) is None]
    for digest in absent:
        write_addressed(local, manifest_name(digest), documents[digest])
    return len(absent)


def _write_pointers(
    local: DirectoryStore, pointers: Mapping[str, str], manifests: Mapping[str, Manifest]
) -> int:
    moved = 0
    for config, digest in pointers.items():
        current = _pointed_manifest(local, config)
        if current is None or len(current.missing) > len(manifests[digest].missing):
            write_pointer(local, config, digest)
            moved += 1
    return moved


def _pointed_manifest(local: DirectoryStore, config: str) -> Manifest | None:
    """The manifest that belongs to a config in the cache; None where there is none that can be used."""
    try:
        digest = read_pointer(local, config)
    except IntegrityError:
        return None
    return _stored_manifest(local, digest) if digest else None


def _stored_manifest(local: DirectoryStore, digest: str) -> Manifest | None:
    try:
        return read_manifest(local, digest)
    except IntegrityError:
        return None


def _damage(source: Source) -> tuple[Problem, ...]:
    if source.damage is None:
        return ()
    return (Problem(ProblemKind.BAD_ENTRY, source.name, source.damage),)


def _lost(contents: Contents, faults: Mapping[Blob, Fault]) -> list[Problem]:
    """What the blobs that could not be copied leave incomplete, each key and blob once."""
    problems: dict[Problem, None] = {}
    for entry in _all_entries(contents):
        for blob in faults.keys() & set(entry.blobs.items()):
            fault = faults[blob]
            detail = f"blob {blob[0]} of {blob[1]} bytes: {fault.detail}"
            problems[Problem(fault.kind, entry.key, detail)] = None
    return list(problems)
