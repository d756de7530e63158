"""A manifest: everything one serve config needs on one platform, content-addressed.

It embeds whole entries, so a manifest and the blobs it names are all a serving process reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from neffbuild.cache.canonical import (
    canonical_json,
    digest_bytes,
    parse_json,
    require_digest,
    require_object,
)
from neffbuild.cache.entry import Entry
from neffbuild.config.errors import IntegrityError
from neffbuild.grid.shapes import ALL_RANKS, Shape, shape_from_document, unit_name

SCHEMA = "neffbuild.manifest/1"
_NEEDS = frozenset({"required", "enumerated_only", "cannot_occur"})


@dataclass(frozen=True, slots=True)
class ManifestUnit:
    """One shape of the plan. `key` is None where it has none: the shape cannot occur, or the planning
    machine could not resolve it. `need` is a value of `neffbuild.grid.expand.Need`, whose module is
    not imported here: moving and checking artifacts needs no grid."""

    shape: Shape
    key: str | None
    need: str
    rank_scope: str = ALL_RANKS

    @property
    def bucket_name(self) -> str:
        return unit_name(self.shape, self.rank_scope)

    def document(self) -> dict[str, Any]:
        return {
            "shape": self.shape.document(),
            "key": self.key,
            "need": self.need,
            "rank_scope": self.rank_scope,
        }


@dataclass(frozen=True, slots=True)
class Manifest:
    """`config` is the digest that leads from a serve config to its manifest, `serve` the normalised
    serve config without secrets and addresses, `platform` what the artifacts run on, `units` the
    whole plan, `entries` what is stored of it (key → entry), `coverage` a summary for people and for
    `verify`."""

    config: str
    serve: Mapping[str, Any]
    platform: Mapping[str, Any]
    units: tuple[ManifestUnit, ...]
    entries: Mapping[str, Entry]
    coverage: Mapping[str, Any] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        return digest_bytes(self.to_json())

    @property
    def graph_index(self) -> dict[str, str]:
        """graph key → key of the unit that has this graph (the first by key, where several do)."""
        index: dict[str, str] = {}
        for key in sorted(self.entries):
            index.setdefault(self.entries[key].graph_key, key)
        return index

    @property
    def blobs(self) -> dict[str, int]:
        """digest → size of every blob the entries need, each once."""
        return {
            digest: size for entry in self.entries.values() for digest, size in entry.blobs.items()
        }

    @property
    def missing(self) -> tuple[ManifestUnit, ...]:
        """Units of the plan that no entry stands for. Shapes that cannot occur are not units."""
        return tuple(
            unit
            for unit in self.units
            if unit.need != "cannot_occur" and unit.key not in self.entries
        )

    def document(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "config": self.config,
            "serve": dict(self.serve),
            "platform": dict(self.platform),
            "units": [unit.document() for unit in self.units],
            "entries": {key: entry.document() for key, entry in self.entries.items()},
            "graph_index": self.graph_index,
            "coverage": dict(self.coverage),
        }

    def to_json(self) -> bytes:
        return canonical_json(self.document())

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Parse what a store returned. Nothing in it is trusted but its digest, which the caller has
        compared.

        Raises `IntegrityError`: another schema, an entry that does not hash to its key, two sizes for
        one blob, a graph index that disagrees with the entries, a malformed unit.
        """
        document = parse_json(data, "manifest")
        try:
            if document["schema"] != SCHEMA:
                raise IntegrityError(
                    f"manifest has schema {document['schema']!r}, expected {SCHEMA}"
                )
            manifest = cls(
                config=require_digest(document["config"]),
                serve=require_object(document["serve"]),
                platform=require_object(document["platform"]),
                units=tuple(_unit(unit) for unit in document["units"]),
                entries={
                    key: Entry.from_document(entry, expected_key=require_digest(key))
                    for key, entry in require_object(document["entries"]).items()
                },
                coverage=require_object(document["coverage"]),
            )
            stated_graph_index = document["graph_index"]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise IntegrityError(f"manifest is malformed: {error!r}") from error
        if stated_graph_index != manifest.graph_index:
            raise IntegrityError("manifest has a graph index that disagrees with its entries")
        sizes = manifest.blobs
        for key, entry in manifest.entries.items():
            if any(sizes[digest] != size for digest, size in entry.blobs.items()):
                raise IntegrityError(f"manifest gives a blob of {key} two sizes")
        return manifest


def _unit(document: Any) -> ManifestUnit:
    key, need, rank_scope = document["key"], document["need"], document["rank_scope"]
    if key is not None:
        require_digest(key)
    if need not in _NEEDS or not isinstance(rank_scope, str):
        raise IntegrityError(f"manifest holds the malformed unit {document!r:.200}")
    return ManifestUnit(_shape(document["shape"]), key, need, rank_scope)


def _shape(document: Any) -> Shape:
    shape = shape_from_document(require_object(document))
    for name, value in shape.document().items():
        if name in ("kind", "family"):
            continue
        well_typed = type(value) is (bool if name == "context_bucketed" else int)
        if not well_typed or value < 0:
            raise IntegrityError(f"manifest holds the malformed shape {document!r:.200}")
    return shape
