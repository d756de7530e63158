"""What differs between two releases: units added, removed and changed, per platform."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from cache_samples import ANYONE, X86_V4, make_entry, make_manifest, shape
from trust_samples import PROD, STAGING, Place, Signing, swapped

from neffbuild.cache.catalog import commit_entry
from neffbuild.cache.compare import PlatformDifference, compare
from neffbuild.cache.manifest import Manifest, ManifestUnit
from neffbuild.cache.release import read_release
from neffbuild.config.errors import IntegrityError, StoreError


def difference(place: Place, old: Manifest, new: Manifest) -> tuple[PlatformDifference, ...]:
    digests = [place.push(one, None, allow_partial=True).index for one in (old, new)]
    before, after = (
        read_release(place.remote, place.fresh(), digest, ANYONE) for digest in digests
    )
    return compare(before, after)


def changes(platform: PlatformDifference) -> dict[str, str]:
    return {one.unit.shape.bucket_name: one.change for one in platform.units}


def test_a_release_does_not_differ_from_itself(place: Place) -> None:
    manifest = place.manifest(3)
    [platform] = difference(place, manifest, manifest)
    assert platform.units == ()
    assert platform.unchanged == 3
    assert platform.before == platform.after == manifest.digest


def test_added_and_removed_units(place: Place) -> None:
    small, large = place.manifest(2), place.manifest(4)
    [grown] = difference(place, small, large)
    assert changes(grown) == {"decode_b3_ctx4096": "added", "decode_b4_ctx4096": "added"}
    assert grown.unchanged == 2
    assert all(one.before is None and one.after is not None for one in grown.units)
    [shrunk] = difference(place, large, small)
    assert set(changes(shrunk).values()) == {"removed"}
    assert all(one.before is not None and one.after is None for one in shrunk.units)


def test_another_recipe_is_another_key_and_says_where_it_differs(place: Place) -> None:
    old, new = place.manifest(2), place.manifest(2, note="new")
    [platform] = difference(place, old, new)
    assert set(changes(platform).values()) == {"changed"}
    for one in platform.units:
        assert one.ingredients == ("note",)
        assert one.before is not None
        assert one.after is not None
        assert one.before.key != one.after.key


def test_the_same_recipe_with_another_artifact(place: Place) -> None:
    """As two builders with a compiler that is not deterministic make them; and as an attack looks."""
    old = place.manifest(2)
    [platform] = difference(place, old, swapped(old))
    assert set(changes(platform).values()) == {"changed"}
    first, second = platform.units
    assert (first.ingredients, second.ingredients) == ((), ())
    assert first.before is not None
    assert first.after is not None
    assert first.before.key == first.after.key
    assert first.before.artifact != first.after.artifact
    assert first.after == replace(first.after, artifact=second.before and second.before.artifact)


@pytest.mark.parametrize("change", ["mode", "name"])
def test_modes_and_names_belong_to_an_artifact(place: Place, change: str) -> None:
    old = place.manifest(1)
    [entry] = old.entries.values()
    files = dict(entry.files)
    record = files.pop("model.so")
    files["other.so" if change == "name" else "model.so"] = replace(record, mode=0o755)
    new = replace(old, entries={entry.key: replace(entry, files=files)})
    [platform] = difference(place, old, new)
    assert changes(platform) == {"decode_b1_ctx4096": "changed"}


def test_statistics_do_not(place: Place) -> None:
    old = place.manifest(1)
    [entry] = old.entries.values()
    again = replace(entry, statistics={"compile_seconds": 99.0}, graph_digest="0" * 64)
    [platform] = difference(place, old, replace(old, entries={entry.key: again}))
    assert platform.units == ()
    assert platform.before != platform.after


def test_units_that_are_not_stored(place: Place) -> None:
    """A unit that is planned and not built is there, without an artifact."""
    whole = place.manifest(2)
    [kept, lost] = whole.entries.values()
    partial = replace(whole, entries={kept.key: kept})
    [platform] = difference(place, whole, partial)
    [one] = platform.units
    assert (one.change, one.unit.key) == ("changed", lost.key)
    assert one.before is not None
    assert one.after is not None
    assert one.after.key == lost.key
    assert one.after.artifact is None


def test_shapes_that_cannot_occur_are_no_units(place: Place) -> None:
    old = place.manifest(1)
    units = (*old.units, ManifestUnit(shape(7), None, "cannot_occur"))
    [platform] = difference(place, old, replace(old, units=units))
    assert platform.units == ()
    assert platform.unchanged == 1


def test_platforms_that_only_one_has(place: Place) -> None:
    manifest = place.manifest(2)
    other = replace(manifest, platform=X86_V4)
    gone, new = difference(place, manifest, other)
    assert (gone.before, gone.after) == (manifest.digest, None)
    assert (new.before, new.after) == (None, other.digest)
    assert set(changes(gone).values()) == {"removed"}
    assert set(changes(new).values()) == {"added"}


def test_platforms_are_compared_each_with_its_own(place: Place) -> None:
    place.push(place.manifest(2), PROD)
    place.push(replace(place.manifest(2), platform=X86_V4), PROD)
    place.push(place.manifest(2), STAGING)
    place.push(replace(place.manifest(3), platform=X86_V4), STAGING)
    before, after = (
        read_release(place.remote, place.fresh(), ref, ANYONE) for ref in (PROD, STAGING)
    )
    same, grown = compare(before, after)
    assert same.units == ()
    assert grown.platform == X86_V4
    assert changes(grown) == {"decode_b3_ctx4096": "added"}


def test_rank_scopes_are_units_of_their_own(place: Place) -> None:
    made = [make_entry(place.root, 0, note=note) for note in ("rank0", "rank1")]
    entries = [commit_entry(place.builder, *one) for one in made]
    old = make_manifest(entries)
    units = tuple(
        ManifestUnit(shape(0), entry.key, "required", f"dp{rank}")
        for rank, entry in enumerate(entries)
    )
    old = replace(old, units=units)
    new = replace(old, units=units[:1], entries={entries[0].key: entries[0]})
    [platform] = difference(place, old, new)
    [one] = platform.units
    assert (one.change, one.unit.rank_scope) == ("removed", "dp1")
    assert platform.unchanged == 1


def test_what_is_compared_is_verified(place: Place, release: Signing) -> None:
    pushed = place.push(place.manifest(), PROD)
    with pytest.raises(IntegrityError, match="is not signed"):
        read_release(place.remote, place.fresh(), PROD, release.trust)
    with pytest.raises(StoreError, match="no index and no manifest"):
        read_release(place.remote, place.fresh(), "0" * 64, ANYONE)
    manifest = place.path(f"manifests/{pushed.manifest}.json")
    manifest.write_text(json.dumps({}))
    with pytest.raises(IntegrityError, match="does not have the digest"):
        read_release(place.remote, place.fresh(), PROD, ANYONE)
