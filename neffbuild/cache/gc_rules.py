"""What a collector removes: a pure decision from what a store holds and what it is to keep.

Three kinds of documents lead to others: a tag to an index, an index to manifests, a manifest to entries
and blobs. An entry leads to its blobs. Nothing that a kept tag reaches is ever removed, nor what a
writer holds a lease on; a document that is kept keeps everything it leads to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from neffbuild.cache.store import Leftover, Listed

DAY = 86400.0
QUARANTINE_KEPT = 7 * DAY
"""How long what was damaged is kept for whoever looks, in seconds."""

BEING_WRITTEN = 3600.0
"""For so many seconds after its last change, an unfinished write is taken to be under way."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What is to go beside what is of no use to anybody.

    `older_than`: what was not used for so many seconds. `max_size`: the least recently used, until all
    blobs together have at most so many bytes. `untagged`: what no tag leads to. `keep_tags`: the other
    tags (as NAME:TAG), and then what none of these leads to. `grace`: how many seconds old an orphan, a
    leftover or something untagged must be.
    """

    older_than: float | None = None
    max_size: int | None = None
    untagged: bool = False
    keep_tags: frozenset[str] | None = None
    grace: float = 3600.0


@dataclass(frozen=True, slots=True)
class Held:
    """An entry or a manifest: the blobs it needs (digests), for a manifest its entries (keys), when it
    was last used (epoch seconds), and its size in bytes."""

    blobs: frozenset[str]
    keys: frozenset[str]
    used: float
    size: int


@dataclass(frozen=True, slots=True)
class HeldIndex:
    """An index: digests of its manifests, when it was last used, its size in bytes."""

    manifests: frozenset[str]
    used: float
    size: int


@dataclass(frozen=True, slots=True)
class Inventory:
    """What a store holds. `tags` maps NAME:TAG to the digest of the index, `pointers` the name of a
    config's pointer to the digest of the manifest; `records` are documents about a manifest, with its
    digest (provenance, pulls); `dated` are documents that only their age can remove (runs, failures);
    `leased_documents` are names, `leased_blobs` digests; `ended_leases` ran out."""

    now: float
    tags: Mapping[str, str]
    indexes: Mapping[str, HeldIndex]
    manifests: Mapping[str, Held]
    entries: Mapping[str, Held]
    blobs: Mapping[str, Listed]
    pointers: Mapping[str, str] = field(default_factory=dict)
    records: Mapping[Listed, str] = field(default_factory=dict)
    dated: Collection[Listed] = ()
    leftovers: Collection[Leftover] = ()
    leased_manifests: frozenset[str] = frozenset()
    leased_keys: frozenset[str] = frozenset()
    leased_blobs: frozenset[str] = frozenset()
    writers: bool = False
    ended_leases: Collection[Listed] = ()


@dataclass(frozen=True, slots=True)
class Removal:
    """One thing to remove. `kind` is `tag`, `index`, `manifest`, `entry`, `blob`, `pointer`, `record`,
    `lease` or a leftover's; `name` its NAME:TAG, digest, key or document name; `size` in bytes."""

    kind: str
    name: str
    size: int
    reason: str


@dataclass(frozen=True, slots=True)
class Decision:
    """What is to be removed, documents before what they lead to, and what stays: entries, blobs and
    their bytes. `over_size` are the bytes above `max_size` that could not be freed."""

    removals: tuple[Removal, ...]
    leftovers: tuple[Leftover, ...]
    entries_kept: int
    blobs_kept: int
    bytes_kept: int
    over_size: int

    @property
    def bytes_freed(self) -> int:
        return sum(one.size for one in self.removals) + sum(one.size for one in self.leftovers)


def decide(inventory: Inventory, policy: Policy) -> Decision:
    """See the module. Raises nothing: what cannot be read was refused before."""
    tags = {
        tag: index
        for tag, index in inventory.tags.items()
        if policy.keep_tags is None or tag in policy.keep_tags
    }
    reached = _reached(inventory, tags.values())
    gone = _by_policy(inventory, policy, reached)
    over_size = _by_size(inventory, policy, reached, gone) if policy.max_size is not None else 0
    _indexes_of_the_gone(inventory, policy, reached, gone)

    removals = [
        Removal("tag", tag, 0, "not one of the tags to keep")
        for tag in inventory.tags
        if tag not in tags
    ]
    removals += [
        Removal("pointer", name, 0, "its manifest is removed")
        for name, digest in inventory.pointers.items()
        if digest in gone.manifests
    ]
    removals += [
        Removal("index", digest, inventory.indexes[digest].size, reason)
        for digest, reason in gone.indexes.items()
    ]
    removals += [
        Removal("record", listed.name, listed.size, "its manifest is gone")
        for listed, digest in inventory.records.items()
        if digest in gone.manifests
        or (digest not in inventory.manifests and _is_old(listed.modified, inventory, policy))
    ]
    removals += [
        Removal("manifest", digest, inventory.manifests[digest].size, reason)
        for digest, reason in gone.manifests.items()
    ]
    removals += [
        Removal("entry", key, inventory.entries[key].size, reason)
        for key, reason in gone.entries.items()
    ]
    removals += [
        Removal("record", listed.name, listed.size, "old")
        for listed in inventory.dated
        if policy.older_than is not None and listed.modified < inventory.now - policy.older_than
    ]
    removals += [
        Removal("lease", listed.name, listed.size, "its holder is gone")
        for listed in inventory.ended_leases
    ]
    kept = _kept_blobs(inventory, gone)
    once_held = _held_blobs([*inventory.entries.values(), *inventory.manifests.values()])
    for digest, listed in inventory.blobs.items():
        if digest in kept:
            continue
        if digest in once_held:
            removals.append(Removal("blob", digest, listed.size, "nothing kept needs it"))
        elif _is_old(listed.modified, inventory, policy):
            removals.append(Removal("blob", digest, listed.size, "no entry names it"))
    leftovers = tuple(one for one in inventory.leftovers if _is_left(one, inventory, policy, gone))
    removed = {one.name for one in removals if one.kind == "blob"}
    staying = [listed for digest, listed in inventory.blobs.items() if digest not in removed]
    return Decision(
        removals=tuple(removals),
        leftovers=leftovers,
        entries_kept=len(inventory.entries) - len(gone.entries),
        blobs_kept=len(staying),
        bytes_kept=sum(listed.size for listed in staying),
        over_size=over_size,
    )


@dataclass(slots=True)
class _Reached:
    """What must stay, whatever the policy."""

    indexes: set[str]
    manifests: set[str]
    keys: set[str]


@dataclass(slots=True)
class _Gone:
    """digest or key → reason."""

    indexes: dict[str, str] = field(default_factory=dict)
    manifests: dict[str, str] = field(default_factory=dict)
    entries: dict[str, str] = field(default_factory=dict)


def _reached(inventory: Inventory, indexes: Iterable[str]) -> _Reached:
    reached = _Reached(set(indexes), set(inventory.leased_manifests), set(inventory.leased_keys))
    for digest in reached.indexes:
        reached.manifests |= inventory.indexes[digest].manifests
    for digest in reached.manifests & inventory.manifests.keys():
        reached.keys |= inventory.manifests[digest].keys
    return reached


def _by_policy(inventory: Inventory, policy: Policy, reached: _Reached) -> _Gone:
    gone = _Gone()
    for items, staying, removed in (
        (inventory.manifests, reached.manifests, gone.manifests),
        (inventory.entries, reached.keys, gone.entries),
    ):
        for name, held in items.items():
            reason = None if name in staying else _reason(held.used, inventory, policy)
            if reason is not None:
                removed[name] = reason
    # A manifest that is kept is kept whole.
    for digest, manifest in inventory.manifests.items():
        if digest not in gone.manifests:
            for key in manifest.keys & gone.entries.keys():
                del gone.entries[key]
    return gone


def _reason(used: float, inventory: Inventory, policy: Policy) -> str | None:
    if policy.older_than is not None and used < inventory.now - policy.older_than:
        return f"not used for {_days(inventory, used)}"
    untagged = policy.untagged or policy.keep_tags is not None
    if untagged and _is_old(used, inventory, policy):
        return "no tag leads to it"
    return None


def _by_size(inventory: Inventory, policy: Policy, reached: _Reached, gone: _Gone) -> int:
    """Add the least recently used to what goes, until the rest fits; how much it is still too large."""
    assert policy.max_size is not None
    users: Counter[str] = Counter()
    manifests_of: dict[str, list[str]] = {}
    for digest, manifest in inventory.manifests.items():
        if digest not in gone.manifests:
            users.update(manifest.blobs)
            for key in manifest.keys:
                manifests_of.setdefault(key, []).append(digest)
    for key, entry in inventory.entries.items():
        if key not in gone.entries:
            users.update(entry.blobs)
    users.update(inventory.leased_blobs)
    total = sum(inventory.blobs[digest].size for digest in users if digest in inventory.blobs)

    def drop(blobs: Iterable[str]) -> int:
        freed = 0
        for digest in blobs:
            users[digest] -= 1
            if not users[digest] and digest in inventory.blobs:
                freed += inventory.blobs[digest].size
        return freed

    for used, key in _by_age(inventory.entries, gone.entries.keys() | reached.keys):
        if total <= policy.max_size:
            return 0
        gone.entries[key] = reason = f"least recently used ({_days(inventory, used)} ago)"
        total -= drop(inventory.entries[key].blobs)
        for digest in manifests_of.get(key, ()):
            # Without one of its entries it would not be whole.
            if digest not in gone.manifests:
                gone.manifests[digest] = reason
                total -= drop(inventory.manifests[digest].blobs)
    # What is left are manifests whose entries are not filed by themselves.
    for used, digest in _by_age(inventory.manifests, gone.manifests.keys() | reached.manifests):
        if total <= policy.max_size:
            return 0
        gone.manifests[digest] = f"least recently used ({_days(inventory, used)} ago)"
        total -= drop(inventory.manifests[digest].blobs)
    return max(0, total - policy.max_size)


def _by_age(items: Mapping[str, Held], aside: Collection[str]) -> list[tuple[float, str]]:
    return sorted((held.used, name) for name, held in items.items() if name not in aside)


def _days(inventory: Inventory, when: float) -> str:
    return f"{max(0.0, inventory.now - when) / DAY:.1f} days"


def _indexes_of_the_gone(
    inventory: Inventory, policy: Policy, reached: _Reached, gone: _Gone
) -> None:
    """An index goes with any of its manifests, and by itself once nothing leads to it. While there are
    writers, only with its manifests: one of them may be about to make a tag name it."""
    for digest, index in inventory.indexes.items():
        if digest in reached.indexes:
            continue
        if index.manifests & gone.manifests.keys():
            gone.indexes[digest] = "its manifest is removed"
        elif not inventory.writers and (reason := _reason(index.used, inventory, policy)):
            gone.indexes[digest] = reason


def _kept_blobs(inventory: Inventory, gone: _Gone) -> set[str]:
    kept = set(inventory.leased_blobs)
    for items, removed in (
        (inventory.manifests, gone.manifests),
        (inventory.entries, gone.entries),
    ):
        kept |= _held_blobs(held for name, held in items.items() if name not in removed)
    return kept


def _held_blobs(items: Iterable[Held]) -> set[str]:
    return set().union(*(held.blobs for held in items))


def _is_old(when: float, inventory: Inventory, policy: Policy) -> bool:
    return when < inventory.now - policy.grace


def _is_left(leftover: Leftover, inventory: Inventory, policy: Policy, gone: _Gone) -> bool:
    match leftover.kind:
        case "quarantined":
            return leftover.modified < inventory.now - QUARANTINE_KEPT
        case "loaded":
            # It shares its space with the blobs of its entry, which would not be freed without it.
            return leftover.of in gone.entries or (
                leftover.of not in inventory.entries
                and _is_old(leftover.modified, inventory, policy)
            )
        case _:
            if leftover.of in inventory.leased_blobs:
                return False
            return leftover.modified < inventory.now - max(policy.grace, BEING_WRITTEN)
