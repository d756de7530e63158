"""The difference of two releases, unit by unit. Pure: what they are was read before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

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
class PlatformDifference:
    """What differs for one platform; `before` and `after` are manifest digests, None where a release
    has nothing for it. `unchanged` counts the units that are the same."""

    platform: Mapping[str, Any]
    before: str | None
    after: str | None
    units: tuple[UnitDifference, ...]
    unchanged: int


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
    old = _units(before.manifests[old_digest]) if old_digest else {}
    new = _units(after.manifests[new_digest]) if new_digest else {}
    differences = []
    for unit in [*old, *(unit for unit in new if unit not in old)]:
        one = _difference(old.get(unit), new.get(unit))
        if one is not None:
            differences.append(one)
    return PlatformDifference(
        platform,
        old_digest,
        new_digest,
        tuple(differences),
        unchanged=len(old.keys() | new.keys()) - len(differences),
    )


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
    files = {name: record.document() for name, record in entry.files.items()} if entry else None
    return UnitVersion(unit.key, digest_document(files) if files else None)
