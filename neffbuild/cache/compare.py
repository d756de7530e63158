"""The difference of two releases, unit by unit, and of what was adopted beside the units. Pure: what they are
was read before."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from neffbuild.cache.adopted import adopted_in, adopted_name
from neffbuild.cache.canonical import canonical_json, digest_document
from neffbuild.cache.entry import Entry
from neffbuild.cache.manifest import Manifest, ManifestUnit
from neffbuild.cache.recipe import difference
from neffbuild.cache.release import Release
from neffbuild.grid.shapes import Shape

Change = Literal["added", "removed", "changed"]
_Stored = tuple[ManifestUnit, Entry | None]


@dataclass(frozen=True, slots=True)
class UnitVersion:
    """A unit as one release has it: its key, and the digest of its artifact (names, content and modes
    of its files), None where it is not stored."""

    key: str | None
    artifact: str | None


@dataclass(frozen=True, slots=True)
class UnitDifference:
    """A unit that is in one release only, or differs. `ingredients` are the paths in the recipe that
    differ; none do where the same recipe was compiled to other bytes."""

    unit: ManifestUnit
    change: Change
    before: UnitVersion | None
    after: UnitVersion | None
    ingredients: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AdoptedDifference:
    """An adopted entry that is in one release only, or another of the same `name` (its layout and the
    engine's key). `ingredients` as of a unit."""

    name: str
    change: Change
    before: UnitVersion | None
    after: UnitVersion | None
    ingredients: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PlatformDifference:
    """What differs for one platform; `before` and `after` are manifest digests, None where a release
    has nothing for it. `unchanged` counts the units that are the same, `adopted_unchanged` the adopted
    entries."""

    platform: Mapping[str, Any]
    before: str | None
    after: str | None
    units: tuple[UnitDifference, ...]
    unchanged: int
    adopted: tuple[AdoptedDifference, ...] = ()
    adopted_unchanged: int = 0


def compare(before: Release, after: Release) -> tuple[PlatformDifference, ...]:
    """The difference of two releases, for every platform that either has, in the order of an index."""
    platforms = {
        canonical_json(one.platform): one.platform
        for release in (before, after)
        for one in release.index.manifests
    }
    return tuple(_compare(platforms[name], before, after) for name in sorted(platforms))


def _compare(platform: Mapping[str, Any], before: Release, after: Release) -> PlatformDifference:
    old_digest, new_digest = (one.index.manifest_for(platform) for one in (before, after))
    old_manifest = before.manifests[old_digest] if old_digest else None
    new_manifest = after.manifests[new_digest] if new_digest else None
    old = _units(old_manifest) if old_manifest else {}
    new = _units(new_manifest) if new_manifest else {}
    differences = []
    for unit in [*old, *(unit for unit in new if unit not in old)]:
        one = _difference(old.get(unit), new.get(unit))
        if one is not None:
            differences.append(one)
    adopted_old = _adopted(old_manifest) if old_manifest else {}
    adopted_new = _adopted(new_manifest) if new_manifest else {}
    return PlatformDifference(
        platform,
        old_digest,
        new_digest,
        tuple(differences),
        unchanged=len(old.keys() | new.keys()) - len(differences),
        adopted=tuple(_adopted_differences(adopted_old, adopted_new)),
        adopted_unchanged=len(adopted_old.keys() & adopted_new.keys()),
    )


def _adopted(manifest: Manifest) -> dict[UnitVersion, Entry]:
    entries = (manifest.entries[key] for key in adopted_in(manifest))
    return {UnitVersion(entry.key, _artifact(entry)): entry for entry in entries}


def _adopted_differences(
    old: Mapping[UnitVersion, Entry], new: Mapping[UnitVersion, Entry]
) -> Iterator[AdoptedDifference]:
    """By name. One name may have several entries, where an engine's key does not cover its compiler: which of
    them became which is then not said."""
    gone, come = _by_name(old, new), _by_name(new, old)
    for name in sorted(gone.keys() | come.keys()):
        before, after = gone.get(name, []), come.get(name, [])
        if len(before) == len(after) == 1:
            [was], [now] = before, after
            ingredients = _ingredients(old[was], new[now])
            yield AdoptedDifference(name, "changed", was, now, ingredients)
        else:
            yield from (AdoptedDifference(name, "removed", one, None) for one in before)
            yield from (AdoptedDifference(name, "added", None, one) for one in after)


def _by_name(
    entries: Mapping[UnitVersion, Entry], others: Container[UnitVersion]
) -> dict[str, list[UnitVersion]]:
    """Name → those that are not among the others."""
    found: dict[str, list[UnitVersion]] = {}
    for version, entry in entries.items():
        if version not in others:
            found.setdefault(adopted_name(entry.recipe), []).append(version)
    return found


def _units(manifest: Manifest) -> dict[tuple[Shape, str], _Stored]:
    """(shape, rank scope) → unit. Shapes that cannot occur are not units."""
    return {
        (unit.shape, unit.rank_scope): (unit, manifest.entries.get(unit.key or ""))
        for unit in manifest.units
        if unit.need != "cannot_occur"
    }


def _difference(old: _Stored | None, new: _Stored | None) -> UnitDifference | None:
    before, after = _version(old), _version(new)
    if before == after:
        return None
    if old is not None and new is not None:
        return UnitDifference(new[0], "changed", before, after, _ingredients(old[1], new[1]))
    if old is not None:
        return UnitDifference(old[0], "removed", before, None)
    return UnitDifference(new[0], "added", None, after) if new is not None else None


def _ingredients(old: Entry | None, new: Entry | None) -> tuple[str, ...]:
    if old is None or new is None:
        return ()
    return tuple(path for path, _, _ in difference(old.recipe, new.recipe))


def _version(stored: _Stored | None) -> UnitVersion | None:
    if stored is None:
        return None
    unit, entry = stored
    return UnitVersion(unit.key, _artifact(entry) if entry else None)


def _artifact(entry: Entry) -> str:
    return digest_document({name: record.document() for name, record in entry.files.items()})
