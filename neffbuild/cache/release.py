"""What a tag or a digest leads to, read as a whole and checked, without copying any artifact.

Promoting, comparing and re-signing work on this; a pull takes one manifest of it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from neffbuild.cache.attestation import require_attestation
from neffbuild.cache.catalog import (
    index_name,
    manifest_name,
    read_addressed,
    require_addressed,
)
from neffbuild.cache.directory import DirectoryStore
from neffbuild.cache.files import says_unwritable
from neffbuild.cache.filesystem import looks
from neffbuild.cache.index import Index
from neffbuild.cache.manifest import Manifest
from neffbuild.cache.records import note_sequence, seen_sequence
from neffbuild.cache.store import Store
from neffbuild.cache.tag import TagRef, TagStatement, Trust, resolve_tag
from neffbuild.config.errors import StoreError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Release:
    """An index and its manifests (digest → manifest); `statement` is that of the tag it was found by,
    None where it was found by a digest."""

    index: Index
    manifests: Mapping[str, Manifest]
    statement: TagStatement | None

    @property
    def blobs(self) -> dict[str, int]:
        """digest → size of every blob the manifests need, each once."""
        return {
            digest: size
            for manifest in self.manifests.values()
            for digest, size in manifest.blobs.items()
        }


def read_release(
    remote: Store, local: DirectoryStore, source: TagRef | str, trust: Trust
) -> Release:
    """What a tag names, or an index or manifest of this digest. `local` remembers which sequence of
    the tag was seen last.

    Raises `IntegrityError` for whatever does not verify, `StoreError` when there is no such tag or
    digest.
    """
    statement = None
    if isinstance(source, TagRef):
        statement = resolve_remembering(local, remote, source, trust)
        data = require_addressed(remote, index_name(statement.index), f"tag {source}")
        index = Index.from_json(data)
    else:
        index = index_of(remote, source)
    manifests = {}
    for one in index.manifests:
        name = manifest_name(one.manifest)
        data = require_addressed(remote, name, f"the index of {source}")
        manifest = manifests[one.manifest] = Manifest.from_json(data)
        require_attestation(remote, one.manifest, manifest, trust)
    return Release(index, manifests, statement)


def resolve_remembering(
    local: DirectoryStore, remote: Store, ref: TagRef, trust: Trust
) -> TagStatement:
    """As `resolve_tag`, with what `local` remembers. A sequence that a good signature vouches for is
    remembered at once, whatever becomes of the tag afterwards: that it was written is known, and what
    is older is not to be served again because the newer one has expired or what it names is withheld."""
    return resolve_tag(
        remote,
        ref,
        trust,
        last_seen=seen_sequence(local, remote.identity, ref.name, ref.tag),
        vouched=lambda statement: remember_sequence(local, remote, statement),
    )


def remember_sequence(local: DirectoryStore, remote: Store, statement: TagStatement) -> None:
    """Remember the sequence of a tag that was just written or seen. A local cache that can only be read must
    not make what is done look failed."""
    ref = statement.ref
    try:
        note_sequence(local, remote.identity, ref.name, ref.tag, statement.sequence)
    except StoreError as error:
        if not says_unwritable(error):
            raise
        _log.warning(
            "the tag's sequence could not be remembered", extra={"fields": {"cause": error.message}}
        )


def index_of(remote: Store, digest: str) -> Index:
    """The index of this digest, or one of the single manifest that has it. Raises `StoreError` when
    there is neither."""
    for _ in looks():
        data = read_addressed(remote, index_name(digest))
        if data is not None:
            return Index.from_json(data)
        data = read_addressed(remote, manifest_name(digest))
        if data is not None:
            return Index().with_manifest(Manifest.from_json(data).platform, digest)
    raise StoreError(
        f"{remote.url} has no index and no manifest {digest}", field="digest", value=digest
    )
