"""Promotion: making a tag name what another tag, or a digest, leads to, after checking it.

Rollback is the same thing: an older index named again, under a sequence that is higher than any before,
so nobody has to be told to accept an old tag.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime

from neffbuild.cache.attestation import write_attestation
from neffbuild.cache.catalog import entry_name, manifest_name, write_manifest
from neffbuild.cache.directory import DirectoryStore
from neffbuild.cache.lease import leased
from neffbuild.cache.records import seen_sequence
from neffbuild.cache.release import Release, read_release, remember_sequence
from neffbuild.cache.store import Store
from neffbuild.cache.tag import TagRef, TagStatement, Trust
from neffbuild.cache.tag_moving import Signer, replace_tag
from neffbuild.config.errors import IntegrityError, UnitsIncomplete


@dataclass(frozen=True, slots=True)
class Promoted:
    """What was promoted, what its new tag says, and what the tag said before, where it was there and
    could be believed."""

    release: Release
    statement: TagStatement
    previous: TagStatement | None


def promote(
    remote: Store,
    local: DirectoryStore,
    source: TagRef | str,
    target: TagRef,
    *,
    trust: Trust,
    sign: Signer | None = None,
    expires: datetime | None = None,
    allow_partial: bool = False,
) -> Promoted:
    """Make `target` name the index that `source`, a tag or a digest, leads to, and nothing else.

    `trust` says which signatures the source needs; `trust.min_sequence` is where the target's sequence
    starts at the least. Whoever signs is asked for the source's signature too, because a tag can be
    moved by anybody who can write to the store; what a digest names cannot, so signing it is vouching
    for it. `sign` signs the target and, beside whoever has done so before, every manifest's provenance.

    Every blob must be there (`verify_tag` reads them too). Raises `IntegrityError` when something is
    missing or not to be believed, `UnitsIncomplete` when a manifest lacks units and `allow_partial` is
    not given, `StoreError` when there is no such source, `ConfigError` when the target has to be
    signed and there is no key.
    """
    signed_source = trust.require_signature or (sign is not None and isinstance(source, TagRef))
    of_source = replace(trust, require_signature=signed_source, min_sequence=0)
    release = read_release(remote, local, source, of_source)
    if not allow_partial:
        _refuse_partial(release)
    sizes = release.blobs
    documents = [
        name
        for digest, manifest in release.manifests.items()
        for name in (manifest_name(digest), *map(entry_name, manifest.entries))
    ]
    with leased(remote, documents=documents, blobs=sizes):
        missing = sizes.keys() - remote.present_blobs(sizes)
        if missing:
            raise IntegrityError(
                f"{len(missing)} of the {len(sizes)} blobs of {source} are not in {remote.url}, "
                f"{min(missing)} among them",
                value=str(source),
                hint="push it again from where it was built",
            )
        for digest, manifest in release.manifests.items():
            write_manifest(remote, manifest)  # should it have been collected since it was read
            if sign is not None:
                write_attestation(remote, digest, manifest, sign)
        statement, previous = replace_tag(
            remote,
            target,
            release.index,
            trust,
            last_seen=seen_sequence(local, remote.identity, target.name, target.tag),
            sign=sign,
            expires=expires,
        )
    remember_sequence(local, remote, statement)
    return Promoted(release, statement, previous)


def _refuse_partial(release: Release) -> None:
    for digest, manifest in release.manifests.items():
        if manifest.missing:
            raise UnitsIncomplete(
                f"manifest {digest} lacks {len(manifest.missing)} of its plan's units, "
                f"{manifest.missing[0].bucket_name} among them",
                value=digest,
                hint="compile and push the rest first, or promote what there is with --allow-partial",
            )
