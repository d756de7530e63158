"""Push and pull: moving one manifest and everything it needs between a local store and a remote one.

The order of writes is the guarantee: blobs, entries, manifest, provenance, index, tag. Whatever is visible is
whole, wherever either side is interrupted; a repeated transfer copies only what is still missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from neffbuild.cache.attestation import require_attestation, write_attestation
from neffbuild.cache.catalog import (
    entry_name,
    index_name,
    manifest_name,
    require_addressed,
    write_addressed,
    write_index,
    write_manifest,
)
from neffbuild.cache.copying import WORKERS, Progress, copy_blobs, file_modes, write_entries
from neffbuild.cache.directory import DirectoryStore
from neffbuild.cache.index import HostFit, Index, platform_text
from neffbuild.cache.lease import leased, leased_if_writable
from neffbuild.cache.manifest import Manifest
from neffbuild.cache.records import note_sequence, record_pull, seen_sequence, write_pointer
from neffbuild.cache.release import index_of, remember_sequence, resolve_remembering
from neffbuild.cache.store import Store
from neffbuild.cache.tag import TagRef, TagStatement, Trust
from neffbuild.cache.tag_moving import Signer, check_movable, point_tag
from neffbuild.config.errors import StoreError, UnitsIncomplete


@dataclass(frozen=True, slots=True)
class Pushed:
    """Digests of the index and the manifest now in the remote store, the tag's statement where one
    was given, and what had to be copied."""

    index: str
    manifest: str
    statement: TagStatement | None
    blobs_copied: int
    bytes_copied: int


@dataclass(frozen=True, slots=True)
class Pulled:
    """The manifest, now whole in the local store, its digest, the statement of the tag where one was
    pulled, and what had to be copied."""

    manifest: Manifest
    digest: str
    statement: TagStatement | None
    blobs_copied: int
    bytes_copied: int


def push(
    local: DirectoryStore,
    remote: Store,
    manifest: Manifest,
    ref: TagRef | None,
    *,
    trust: Trust,
    sign: Signer | None = None,
    expires: datetime | None = None,
    allow_partial: bool = False,
    workers: int = WORKERS,
    progress: Progress | None = None,
) -> Pushed:
    """Copy a manifest with all it names to a remote store, then make the tag name it.

    Without a tag the index holds this manifest alone and is found by its digest. `sign` signs the tag
    and the manifest's provenance. Raises `UnitsIncomplete` when the manifest lacks units and
    `allow_partial` is not given, `IntegrityError` for a damaged local blob or a tag that is not to be
    believed, `ConfigError` when the tag has to be signed and there is no key.
    """
    if manifest.missing and not allow_partial:
        names = [unit.bucket_name for unit in manifest.missing]
        raise UnitsIncomplete(
            f"{len(names)} of the plan's units are not stored: {_some(names)}",
            hint="run `neffbuild compile` first, or push what there is with --allow-partial",
        )
    last_seen = seen_sequence(local, remote.identity, ref.name, ref.tag) if ref else 0
    if ref is not None:
        check_movable(remote, ref, trust, last_seen=last_seen, sign=sign)
    sizes = manifest.blobs
    with leased(remote, documents=_documents(manifest), blobs=sizes) as lease:
        absent = {digest: sizes[digest] for digest in sizes.keys() - remote.present_blobs(sizes)}

        def copy(digest: str) -> None:
            remote.put_blob(digest, local.blob_path(digest))

        copy_blobs(absent, copy, workers, progress)
        lease.require()
        write_entries(remote, manifest.entries)
        digest = write_manifest(remote, manifest)
        if sign is not None:
            write_attestation(remote, digest, manifest, sign)
        if ref is None:
            index = write_index(remote, Index().with_manifest(manifest.platform, digest))
            return Pushed(index, digest, None, len(absent), sum(absent.values()))
        lease.require()
        statement = point_tag(
            remote,
            ref,
            manifest.platform,
            digest,
            trust,
            last_seen=last_seen,
            sign=sign,
            expires=expires,
        )
    remember_sequence(local, remote, statement)
    return Pushed(statement.index, digest, statement, len(absent), sum(absent.values()))


def pull(
    remote: Store,
    local: DirectoryStore,
    source: TagRef | str,
    *,
    platform: Mapping[str, Any] | None = None,
    fit: HostFit | None = None,
    trust: Trust,
    allow_partial: bool = False,
    workers: int = WORKERS,
    progress: Progress | None = None,
) -> Pulled:
    """Copy what a tag, or an index or manifest named by its digest, has for a platform.

    The platform is `platform`, or else the one that `fit` likes best; without either the index must
    hold a single one. Everything is verified; nothing is visible in the local store before all of it is
    there. What is there already is not copied again, so a repeated pull goes on where one broke off.

    Raises `IntegrityError` for whatever does not verify, `UnitsIncomplete` for a manifest that lacks
    units where `allow_partial` is not given, `StoreError` naming what there is when the tag, the digest
    or the platform is not.
    """
    statement = None
    if isinstance(source, TagRef):
        statement = resolve_remembering(local, remote, source, trust)
        index = Index.from_json(
            require_addressed(remote, index_name(statement.index), f"tag {source}")
        )
    else:
        index = index_of(remote, source)
    digest = _choose(remote, index, platform, fit)
    data = require_addressed(remote, manifest_name(digest), f"the index of {source}")
    manifest = Manifest.from_json(data)
    require_attestation(remote, digest, manifest, trust)
    if manifest.missing and not allow_partial:
        raise UnitsIncomplete(
            f"manifest {digest} of {remote.url} lacks {len(manifest.missing)} of its plan's units: "
            f"{_some(unit.bucket_name for unit in manifest.missing)}",
            value=digest,
            hint="compile and push the rest, or pull what there is with --allow-partial",
        )
    sizes = manifest.blobs
    modes = file_modes(manifest.entries)
    with leased_if_writable(local, documents=_documents(manifest), blobs=sizes):
        # What is here already is read too: a pull that ends well vouches for all of it.
        absent = {
            blob: size for blob, size in sizes.items() if local.check_blob(blob, size) is not None
        }

        def copy(blob: str) -> None:
            local.receive_blob(blob, absent[blob], modes[blob], remote)

        copy_blobs(absent, copy, workers, progress)
        write_entries(local, manifest.entries)
        write_addressed(local, manifest_name(digest), data)
        write_pointer(local, manifest.config, digest)
        record_pull(local, digest)
    if statement is not None:
        ref = statement.ref
        note_sequence(local, remote.identity, ref.name, ref.tag, statement.sequence)
    return Pulled(manifest, digest, statement, len(absent), sum(absent.values()))


def _choose(
    remote: Store, index: Index, platform: Mapping[str, Any] | None, fit: HostFit | None
) -> str:
    there = "; ".join(platform_text(one.platform) for one in index.manifests) or "none"
    if platform is not None:
        digest = index.manifest_for(platform)
        if digest is None:
            raise StoreError(
                f"{remote.url} has no artifacts for {platform_text(platform)}; it has: {there}",
                hint="compile and push for this platform, or use one of those listed",
            )
        return digest
    if fit is None:
        if len(index.manifests) == 1:
            return index.manifests[0].manifest
        raise StoreError(
            f"{remote.url} has artifacts for several platforms and none was named: {there}",
            hint="name one of them",
        )
    return _best(remote, index, fit)


def _best(remote: Store, index: Index, fit: HostFit) -> str:
    """The manifest whose platform suits the host best."""
    fits = [(one, fit(one.platform)) for one in index.manifests]
    suited = [(one, found.rank) for one, found in fits if found.refusal is None]
    if not suited:
        there = "; ".join(f"{platform_text(one.platform)} ({f.refusal})" for one, f in fits)
        raise StoreError(
            f"{remote.url} has no artifacts that this host can run; it has: {there or 'none'}",
            hint="compile and push for this platform, or name one of those listed with --platform",
        )
    highest = max(rank for _, rank in suited)
    best = [one for one, rank in suited if rank == highest]
    if len(best) > 1:
        there = "; ".join(platform_text(one.platform) for one in best)
        raise StoreError(
            f"{remote.url} has artifacts for several platforms that suit this host: {there}",
            hint="choose with --platform, or pull with the --config they are for",
        )
    return best[0].manifest


def _documents(manifest: Manifest) -> list[str]:
    """The names of the documents that a transfer of the manifest relies on."""
    return [manifest_name(manifest.digest), *map(entry_name, manifest.entries)]


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")
