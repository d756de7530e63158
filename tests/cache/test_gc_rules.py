"""What a collector decides, for any contents of a store."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from neffbuild.cache.gc_rules import DAY, Decision, Held, HeldIndex, Inventory, Policy, decide
from neffbuild.cache.store import Leftover, Listed

NOW = 1000 * DAY
BLOBS = [f"b{number}" for number in range(8)]
KEYS = [f"k{number}" for number in range(6)]
MANIFESTS = [f"m{number}" for number in range(4)]
INDEXES = [f"i{number}" for number in range(3)]
AGES = st.sampled_from([0.0, 600.0, 2 * DAY, 40 * DAY, 400 * DAY])


def some(names: list[str]) -> st.SearchStrategy[frozenset[str]]:
    return st.frozensets(st.sampled_from(names))


@st.composite
def inventories(draw: st.DrawFn) -> Inventory:
    entries = {
        key: Held(draw(some(BLOBS)), frozenset(), NOW - draw(AGES), 100) for key in draw(some(KEYS))
    }
    manifests = {}
    for digest in draw(some(MANIFESTS)):
        keys = draw(some(KEYS))
        # A manifest embeds its entries, so their blobs are its own.
        blobs = frozenset().union(*(entries[key].blobs for key in keys if key in entries))
        manifests[digest] = Held(blobs | draw(some(BLOBS)), keys, NOW - draw(AGES), 1000)
    for key, entry in entries.items():
        used = [entry.used, *(one.used for one in manifests.values() if key in one.keys)]
        entries[key] = Held(entry.blobs, frozenset(), max(used), entry.size)
    indexes = {
        digest: HeldIndex(draw(some(list(manifests) or ["m9"])), NOW - draw(AGES), 10)
        for digest in INDEXES
    }
    return Inventory(
        now=NOW,
        tags={
            f"llama:t{n}": draw(st.sampled_from(INDEXES)) for n in range(draw(st.integers(0, 2)))
        },
        indexes=indexes,
        manifests=manifests,
        entries=entries,
        blobs={name: Listed(name, 1000, NOW - draw(AGES)) for name in draw(some(BLOBS))},
        leased_manifests=draw(some(MANIFESTS)),
        leased_keys=draw(some(KEYS)),
        leased_blobs=draw(some(BLOBS)),
        writers=draw(st.booleans()),
    )


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    return Policy(
        older_than=draw(st.none() | st.just(30 * DAY)),
        max_size=draw(st.none() | st.integers(0, 9000)),
        untagged=draw(st.booleans()),
        keep_tags=draw(st.none() | st.just(frozenset({"llama:t0"}))),
    )


def removed(decision: Decision, kind: str) -> set[str]:
    return {one.name for one in decision.removals if one.kind == kind}


@settings(max_examples=150, deadline=None)
@given(inventories(), policies())
def test_what_stays_is_whole_and_what_tags_reach_stays(inv: Inventory, policy: Policy) -> None:
    decision = decide(inv, policy)
    tags = inv.tags.keys() - removed(decision, "tag")
    indexes = inv.indexes.keys() - removed(decision, "index")
    manifests = inv.manifests.keys() - removed(decision, "manifest")
    entries = inv.entries.keys() - removed(decision, "entry")
    gone_blobs = removed(decision, "blob")

    assert removed(decision, "tag") <= inv.tags.keys() - (policy.keep_tags or set())
    assert bool(removed(decision, "tag")) <= (policy.keep_tags is not None)
    for tag in tags:
        assert inv.tags[tag] in indexes
    for index in indexes:
        assert inv.indexes[index].manifests.isdisjoint(removed(decision, "manifest"))
    for manifest in manifests:
        assert inv.manifests[manifest].keys.isdisjoint(removed(decision, "entry"))
        assert inv.manifests[manifest].blobs.isdisjoint(gone_blobs)
    for key in entries:
        assert inv.entries[key].blobs.isdisjoint(gone_blobs)
    assert inv.leased_blobs.isdisjoint(gone_blobs)
    assert inv.leased_keys.isdisjoint(removed(decision, "entry"))
    assert inv.leased_manifests.isdisjoint(removed(decision, "manifest"))


@settings(max_examples=80, deadline=None)
@given(inventories())
def test_without_a_policy_only_old_orphans_go(inv: Inventory) -> None:
    decision = decide(inv, Policy())
    named = set().union(*(one.blobs for one in [*inv.entries.values(), *inv.manifests.values()]))
    assert removed(decision, "blob") == {
        name
        for name, listed in inv.blobs.items()
        if name not in named | inv.leased_blobs and listed.modified < NOW - 3600
    }
    assert {one.kind for one in decision.removals} <= {"blob"}


@settings(max_examples=80, deadline=None)
@given(inventories(), st.integers(0, 9000))
def test_max_size_is_kept_or_told_by_how_much_it_is_not(inv: Inventory, max_size: int) -> None:
    decision = decide(inv, Policy(max_size=max_size, grace=0))
    held = decision.bytes_kept - sum(
        listed.size
        for name, listed in inv.blobs.items()
        if name not in removed(decision, "blob") and listed.modified >= NOW
    )
    assert held <= max_size + decision.over_size
    if decision.over_size:
        kept = inv.entries.keys() - removed(decision, "entry")
        rooted = set(inv.leased_manifests)
        for index in inv.tags.values():
            rooted |= inv.indexes[index].manifests
        keys = set().union(*(inv.manifests[m].keys for m in rooted if m in inv.manifests))
        assert kept <= keys | inv.leased_keys


def test_the_least_recently_used_goes_first_and_takes_its_manifest_along() -> None:
    ages = {"k0": 3.0, "k1": 9.0, "k2": 5.0}
    blobs = {key: f"b{key}" for key in ages}
    inventory = Inventory(
        now=NOW,
        tags={},
        indexes={"i0": HeldIndex(frozenset({"m0"}), NOW, 10)},
        manifests={
            "m0": Held(frozenset({"bk1", "bk0"}), frozenset({"k1", "k0"}), NOW - 9 * DAY, 10)
        },
        entries={
            key: Held(frozenset({blobs[key]}), frozenset(), NOW - age * DAY, 10)
            for key, age in ages.items()
        },
        blobs={name: Listed(name, 1000, 0) for name in blobs.values()},
    )
    decision = decide(inventory, Policy(max_size=2000))
    assert removed(decision, "entry") == {"k1"}
    assert removed(decision, "manifest") == {"m0"}
    assert removed(decision, "index") == {"i0"}
    assert removed(decision, "blob") == {"bk1"}
    [entry] = [one for one in decision.removals if one.kind == "entry"]
    assert entry.reason == "least recently used (9.0 days ago)"


def test_leftovers_go_when_they_are_old_and_nobody_uses_them() -> None:
    entry = Held(frozenset(), frozenset(), NOW, 1)
    leftovers = [
        Leftover("temporary", "tmp/new", 1, NOW - 60),
        Leftover("temporary", "tmp/old", 1, NOW - 7200),
        Leftover("upload", "new", 0, NOW - 60, "b1"),
        Leftover("upload", "old", 0, NOW - 7200, "b1"),
        Leftover("upload", "leased", 0, NOW - 7200, "b2"),
        Leftover("loaded", "loaded/k0", 0, NOW - 9 * DAY, "k0"),
        Leftover("loaded", "loaded/k1", 0, NOW - 9 * DAY, "k1"),
        Leftover("quarantined", "quarantine/new", 1, NOW - DAY),
        Leftover("quarantined", "quarantine/old", 1, NOW - 8 * DAY),
    ]
    inventory = Inventory(
        now=NOW,
        tags={},
        indexes={},
        manifests={},
        entries={"k0": entry},
        blobs={},
        leftovers=leftovers,
        leased_blobs=frozenset({"b2"}),
    )
    names = {one.name for one in decide(inventory, Policy()).leftovers}
    assert names == {"tmp/old", "old", "loaded/k1", "quarantine/old"}


def test_while_somebody_writes_an_index_goes_only_with_its_manifests() -> None:
    index = HeldIndex(frozenset(), NOW - 40 * DAY, 10)
    for writers, gone in ((True, set()), (False, {"i0"})):
        inventory = Inventory(
            now=NOW,
            tags={},
            indexes={"i0": index},
            manifests={},
            entries={},
            blobs={},
            writers=writers,
        )
        assert removed(decide(inventory, Policy(untagged=True)), "index") == gone
