"""An index: what a tag names. Platform → manifest, so that a mixed fleet pulls by one name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from neffbuild.cache.canonical import canonical_json, digest_bytes, is_digest, parse_json
from neffbuild.config.errors import IntegrityError

SCHEMA = "neffbuild.index/1"


@dataclass(frozen=True, slots=True)
class Fit:
    """How a host suits a platform: why it cannot run its artifacts, or None, and which of several that
    it can run it should (the highest rank)."""

    refusal: str | None
    rank: int = 0


HostFit = Callable[[Mapping[str, Any]], Fit]
"""A platform → how the host suits it, by what can be seen there."""


@dataclass(frozen=True, slots=True)
class IndexedManifest:
    """The manifest (digest) for one platform."""

    platform: Mapping[str, Any]
    manifest: str


@dataclass(frozen=True, slots=True)
class Index:
    """One manifest per platform, ordered by platform."""

    manifests: tuple[IndexedManifest, ...] = ()

    @property
    def digest(self) -> str:
        return digest_bytes(self.to_json())

    def manifest_for(self, platform: Mapping[str, Any]) -> str | None:
        """The digest of the manifest for exactly this platform, or None."""
        wanted = canonical_json(platform)
        for indexed in self.manifests:
            if canonical_json(indexed.platform) == wanted:
                return indexed.manifest
        return None

    def with_manifest(self, platform: Mapping[str, Any], manifest: str) -> Index:
        """This index with the manifest for one platform set; other platforms keep theirs."""
        mine = canonical_json(platform)
        others = [one for one in self.manifests if canonical_json(one.platform) != mine]
        manifests = [*others, IndexedManifest(dict(platform), manifest)]
        return Index(tuple(sorted(manifests, key=lambda one: canonical_json(one.platform))))

    def to_json(self) -> bytes:
        return canonical_json(
            {
                "schema": SCHEMA,
                "manifests": [
                    {"platform": one.platform, "manifest": one.manifest} for one in self.manifests
                ],
            }
        )

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Parse what a store returned. Raises `IntegrityError` naming what is wrong."""
        document = parse_json(data, "index")
        try:
            if document["schema"] != SCHEMA:
                raise IntegrityError(f"index has schema {document['schema']!r}, expected {SCHEMA}")
            manifests = tuple(_indexed(one) for one in document["manifests"])
        except (KeyError, TypeError) as error:
            raise IntegrityError(f"index is malformed: {error!r}") from error
        if len({canonical_json(one.platform) for one in manifests}) != len(manifests):
            raise IntegrityError("index names a platform twice")
        return cls(manifests)


def platform_text(platform: Mapping[str, Any]) -> str:
    """A platform in one line, for people."""
    versions = platform.get("versions")
    parts = [str(platform.get(part)) for part in ("toolchain", "route", "target")]
    if isinstance(versions, Mapping):
        parts += [f"{name} {versions[name]}" for name in sorted(versions)]
    return ", ".join(parts)


def _indexed(document: Any) -> IndexedManifest:
    platform, manifest = document["platform"], document["manifest"]
    if not isinstance(platform, dict) or not is_digest(manifest):
        raise IntegrityError(f"index holds the malformed line {document!r:.200}")
    return IndexedManifest(platform, manifest)
