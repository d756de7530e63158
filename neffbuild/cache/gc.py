"""Collecting a store: reading what it holds, deciding what goes, removing it.

Documents go before what they lead to (tags, indexes, manifests, entries, blobs), so a collector killed at
any moment leaves whatever is visible whole, and the next one goes on. Writers and collectors keep out of
each other's way by leases (`neffbuild.cache.lease`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from neffbuild.cache import tag_hints
from neffbuild.cache.canonical import digest_bytes, is_digest, parse_json
from neffbuild.cache.catalog import entry_key, entry_name, index_name, manifest_name
from neffbuild.cache.entry import entry_blobs
from neffbuild.cache.envelope import Envelope
from neffbuild.cache.gc_rules import Decision, Held, HeldIndex, Inventory, Policy, Removal, decide
from neffbuild.cache.index import Index
from neffbuild.cache.lease import Claims, Lease, collecting, read_claims
from neffbuild.cache.manifest import Manifest
from neffbuild.cache.store import Document, Listed, ManagedStore
from neffbuild.cache.tag import TagRef, TagStatement
from neffbuild.config.errors import ConfigError, IntegrityError, StoreError

_BATCH = 1000
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Collected:
    """What was decided, and whether it was carried out."""

    decision: Decision
    deleted: bool


def collect(store: ManagedStore, policy: Policy, *, delete: bool) -> Collected:
    """Decide what of a store is of no use under a policy; with `delete`, remove it.

    Raises `IntegrityError` when what a tag leads to cannot be read (then nothing can be told to be of no
    use), `ConfigError` for a tag to keep that is not there, `StoreError` when another collector is at
    work or the store refuses.
    """
    if not delete:
        return Collected(decide(read_inventory(store, read_claims(store), policy), policy), False)
    with collecting(store) as (lease, claims):
        decision = decide(read_inventory(store, claims, policy), policy)
        _carry_out(store, decision, lease)
    return Collected(decision, True)


def read_inventory(store: ManagedStore, claims: Claims, policy: Policy) -> Inventory:
    """What a store holds. Raises as `collect` does."""
    tags = _tags(store)
    for tag in sorted(policy.keep_tags or ()):
        if tag not in tags:
            raise ConfigError(
                f"{store.url} has no tag {tag}; it has: {', '.join(sorted(tags)) or 'none'}",
                field="--keep-tag",
                value=tag,
            )
    rooted = {
        index: tag
        for tag, index in tags.items()
        if policy.keep_tags is None or tag in policy.keep_tags
    }
    pointers, pulls = _pointers(store), list(store.list("pulls/"))
    used = {entry_key(one.name): one.modified for one in pulls}
    for listed, digest in pointers.items():
        used[digest] = max(used.get(digest, 0.0), listed.modified)

    indexes = _indexes(store, rooted)
    tagged = {digest: tag for index, tag in rooted.items() for digest in indexes[index].manifests}
    manifests = _manifests(store, tagged, used)
    runs = list(store.list("runs/"))
    ran = _last_runs(store, runs)
    for manifest in manifests.values():
        for key in manifest.keys:
            ran[key] = max(ran.get(key, 0.0), manifest.used)
    indexes = {
        digest: replace(
            index,
            used=max([index.used, *(manifests[m].used for m in index.manifests if m in manifests)]),
        )
        for digest, index in indexes.items()
    }
    records = {one: entry_key(one.name) for one in (*pulls, *store.list("attestations/"))}
    return Inventory(
        now=claims.now,
        tags=tags,
        indexes=indexes,
        manifests=manifests,
        entries=_entries(store, ran),
        blobs={listed.name: listed for listed in store.list_blobs()},
        pointers={listed.name: digest for listed, digest in pointers.items()},
        records=records,
        dated=[*runs, *store.list("failures/")],
        leftovers=list(store.list_leftovers()),
        leased_manifests=_leased(claims, "manifests/"),
        leased_keys=_leased(claims, "entries/"),
        leased_blobs=claims.blobs,
        writers=claims.writers,
        ended_leases=claims.ended,
    )


def _read(store: ManagedStore, listed: Sequence[str]) -> Iterator[tuple[str, Document]]:
    """(name, document) of what was listed. A second look may miss some on a network file system, and
    what a missed one leads to would seem to be of no use: those are asked for by name."""
    left = set(listed)
    for name, document in store.read_many(listed):
        left.discard(name)
        yield name, document
    for name in left:
        if (lost := store.read(name)) is not None:
            yield name, lost


def _tags(store: ManagedStore) -> dict[str, str]:
    tags = {}
    for listed in store.list("tags/"):
        document = store.read(listed.name)
        if document is None:
            continue
        try:
            name, _, leaf = listed.name.removeprefix("tags/").partition("/")
            ref = TagRef(name, leaf.removesuffix(".json"))
            # Who signed it and whether it has expired is not asked: it may be renewed.
            statement = TagStatement.from_envelope(Envelope.from_json(document.data))
        except (ConfigError, IntegrityError) as error:
            raise IntegrityError(
                f"cannot tell what {listed.name} of {store.url} leads to: {error.message}",
                value=listed.name,
                hint=f"nothing was removed; {tag_hints.UNREADABLE}",
            ) from error
        tags[str(ref)] = statement.index
    return tags


def _indexes(store: ManagedStore, rooted: dict[str, str]) -> dict[str, HeldIndex]:
    listed = {entry_key(one.name): one for one in store.list("indexes/")}
    indexes = {}
    for name, document in _read(store, [index_name(digest) for digest in _digests(listed)]):
        digest = entry_key(name)
        try:
            index = Index.from_json(_addressed(name, document))
            manifests = frozenset(one.manifest for one in index.manifests)
        except IntegrityError:
            if digest in rooted:
                continue
            manifests = frozenset()
        one = listed[digest]
        indexes[digest] = HeldIndex(manifests, one.modified, one.size)
    _require(store, rooted, indexes, "index")
    return indexes


def _manifests(
    store: ManagedStore, tagged: dict[str, str], used: dict[str, float]
) -> dict[str, Held]:
    listed = {entry_key(one.name): one for one in store.list("manifests/")}
    manifests = {}
    for name, document in _read(store, [manifest_name(digest) for digest in _digests(listed)]):
        digest = entry_key(name)
        try:
            manifest = Manifest.from_json(_addressed(name, document))
            blobs, keys = frozenset(manifest.blobs), frozenset(manifest.entries)
        except IntegrityError:
            if digest in tagged:
                continue
            blobs = keys = frozenset()
        one = listed[digest]
        manifests[digest] = Held(blobs, keys, max(one.modified, used.get(digest, 0.0)), one.size)
    _require(store, tagged, manifests, "manifest")
    return manifests


def _require(store: ManagedStore, wanted: dict[str, str], found: Iterable[str], what: str) -> None:
    for digest in sorted(wanted.keys() - set(found)):
        raise IntegrityError(
            f"{what} {digest}, which tag {wanted[digest]} of {store.url} leads to, is damaged or gone",
            value=digest,
            hint="push to the tag again, or remove its document; nothing was removed",
        )


def _addressed(name: str, document: Document) -> bytes:
    if digest_bytes(document.data) != entry_key(name):
        raise IntegrityError(f"{name} does not have the digest it is named by")
    return document.data


def _entries(store: ManagedStore, used: dict[str, float]) -> dict[str, Held]:
    listed = {entry_key(one.name): one for one in store.list("entries/")}
    entries = {}
    for name, document in _read(store, [entry_name(key) for key in _digests(listed)]):
        key = entry_key(name)
        try:
            blobs = frozenset(entry_blobs(document.data, expected_key=key))
        except IntegrityError:
            blobs = frozenset()  # for `verify` and the next build to heal
        one = listed[key]
        entries[key] = Held(blobs, frozenset(), max(one.modified, used.get(key, 0.0)), one.size)
    return entries


def _pointers(store: ManagedStore) -> dict[Listed, str]:
    """The pointers of configs that can be read, and the manifests they lead to."""
    listed = {one.name: one for one in store.list("configs/")}
    pointers = {}
    for name, document in store.read_many(listed):
        try:
            digest = parse_json(document.data, name)["manifest"]
        except (IntegrityError, KeyError, TypeError):
            continue
        if is_digest(digest):
            pointers[listed[name]] = digest
    return pointers


def _last_runs(store: ManagedStore, runs: Sequence[Listed]) -> dict[str, float]:
    """key → when it was last part of a run."""
    when = {one.name: one.modified for one in runs}
    last: dict[str, float] = {}
    for name, document in store.read_many(when):
        try:
            keys = [unit["key"] for unit in parse_json(document.data, name)["units"]]
        except (IntegrityError, KeyError, TypeError):
            continue
        for key in keys:
            if isinstance(key, str):
                last[key] = max(last.get(key, 0.0), when[name])
    return last


def _digests(listed: Iterable[str]) -> list[str]:
    return [digest for digest in listed if is_digest(digest)]


def _leased(claims: Claims, folder: str) -> frozenset[str]:
    return frozenset(entry_key(name) for name in claims.documents if name.startswith(folder))


def _carry_out(store: ManagedStore, decision: Decision, lease: Lease) -> None:
    documents = [_document(one) for one in decision.removals if one.kind != "blob"]
    blobs = [one.name for one in decision.removals if one.kind == "blob"]
    for start in range(0, len(documents), _BATCH):
        lease.require()
        store.delete_many(documents[start : start + _BATCH])
    for start in range(0, len(blobs), _BATCH):
        lease.require()
        store.delete_blobs(blobs[start : start + _BATCH])
    for leftover in decision.leftovers:
        lease.require()
        try:
            store.delete_leftover(leftover)
        except StoreError as error:
            # Another's unfinished write may be impossible to remove; the rest is worth going on for.
            _log.warning("%s could not be removed: %s", leftover.name, error.message)


def _document(removal: Removal) -> str:
    match removal.kind:
        case "tag":
            return TagRef.parse(removal.name).document_name
        case "index":
            return index_name(removal.name)
        case "manifest":
            return manifest_name(removal.name)
        case "entry":
            return entry_name(removal.name)
        case _:
            return removal.name
