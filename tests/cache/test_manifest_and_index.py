from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cache_samples import X86_V3, X86_V4, make_entry, make_manifest, shape
from hypothesis import given, settings
from hypothesis import strategies as st

from neffbuild.cache.canonical import canonical_json, digest_bytes
from neffbuild.cache.entry import Entry, FileRecord
from neffbuild.cache.index import Index, platform_text
from neffbuild.cache.manifest import Manifest, ManifestUnit
from neffbuild.config.errors import IntegrityError
from neffbuild.grid.expand import Need
from neffbuild.grid.shapes import Family, PrefillShape


def entry(number: int, **changes: Any) -> Entry:
    fields: dict[str, Any] = {
        "recipe": {"kind": "unit", "number": number},
        "files": {"model.so": FileRecord(f"{number:064x}", 10 + number)},
        "graph_digest": "c" * 64,
        "graph_key": f"{number % 2:064x}",
    }
    return Entry(**{**fields, **changes})


MANIFEST = make_manifest([entry(number) for number in range(3)], lacking=1)
DATA = MANIFEST.to_json()


class TestManifest:
    def test_round_trip_and_digest(self, tmp_path: Path) -> None:
        manifest = make_manifest([make_entry(tmp_path, number)[0] for number in range(3)])
        assert Manifest.from_json(manifest.to_json()) == manifest
        assert manifest.digest == digest_bytes(manifest.to_json())

    def test_every_kind_of_unit_survives(self) -> None:
        units = (
            ManifestUnit(shape(1), "a" * 64, Need.ENUMERATED_ONLY, rank_scope="dp0"),
            ManifestUnit(shape(2), None, Need.CANNOT_OCCUR),
            ManifestUnit(shape(3), None, Need.REQUIRED),
            ManifestUnit(PrefillShape(Family.PREFILL, 2048, 512), "b" * 64, Need.REQUIRED),
        )
        manifest = Manifest("c" * 64, {}, X86_V3, units, {})
        assert Manifest.from_json(manifest.to_json()).units == units
        assert manifest.missing == (units[0], units[2], units[3])

    @pytest.mark.parametrize("need", list(Need))
    def test_every_need_of_the_grid_is_known(self, need: Need) -> None:
        unit = ManifestUnit(shape(1), "a" * 64, need.value)
        manifest = Manifest("c" * 64, {}, X86_V3, (unit,), {})
        assert Manifest.from_json(manifest.to_json()).units == (unit,)

    def test_graph_index_leads_to_the_first_unit_with_the_graph(self) -> None:
        by_graph: dict[str, list[str]] = {}
        for key, one in MANIFEST.entries.items():
            by_graph.setdefault(one.graph_key, []).append(key)
        assert MANIFEST.graph_index == {graph: min(keys) for graph, keys in by_graph.items()}
        assert len(by_graph) == 2

    def test_blobs_are_named_once_with_their_sizes(self) -> None:
        shared = entry(7, files={"model.so": FileRecord(f"{1:064x}", 11)})
        manifest = make_manifest([entry(1), shared])
        assert manifest.blobs == {f"{1:064x}": 11}
        assert len(manifest.missing) == 0
        assert len(MANIFEST.missing) == 1

    @pytest.mark.parametrize(
        ("where", "value"),
        [
            (["schema"], "neffbuild.manifest/2"),
            (["config"], "../x"),
            (["serve"], []),
            (["platform"], "x86"),
            (["units"], None),
            (["units", 0, "need"], "perhaps"),
            (["units", 0, "need"], []),
            (["units", 0, "key"], "short"),
            (["units", 0, "rank_scope"], 0),
            (["units", 0, "shape", "kind"], "vision"),
            (["units", 0, "shape", "family"], "other"),
            (["units", 0, "shape", "num_seqs"], "4"),
            (["units", 0, "shape", "num_seqs"], True),
            (["units", 0, "shape", "num_seqs"], -1),
            (["units", 0, "shape", "context_bucketed"], 1),
            (["units", 0, "shape", "further"], 1),
            (["units", 0, "shape"], []),
            (["coverage"], None),
            (["graph_index", f"{0:064x}"], "0" * 64),
            (["graph_index"], {}),
        ],
    )
    def test_malformed_parts_are_refused(self, where: list[Any], value: Any) -> None:
        document = json.loads(DATA)
        target = document
        for step in where[:-1]:
            target = target[step]
        target[where[-1]] = value
        with pytest.raises(IntegrityError):
            Manifest.from_json(canonical_json(document))

    def test_entry_swapped_to_another_key_is_refused(self) -> None:
        document = json.loads(DATA)
        first, second, _ = document["entries"]
        entries = document["entries"]
        entries[first], entries[second] = entries[second], entries[first]
        with pytest.raises(IntegrityError, match="holds the recipe of"):
            Manifest.from_json(canonical_json(document))

    def test_two_sizes_of_one_blob_are_refused(self) -> None:
        lying = entry(7, files={"model.so": FileRecord(f"{1:064x}", 99)})
        with pytest.raises(IntegrityError, match="two sizes"):
            Manifest.from_json(make_manifest([entry(1), lying]).to_json())

    @given(position=st.integers(0, len(DATA) - 1), value=st.integers(0, 255))
    @settings(max_examples=300, deadline=None)
    def test_changed_byte_is_refused_or_still_a_manifest(self, position: int, value: int) -> None:
        data = bytearray(DATA)
        data[position] = value
        try:
            manifest = Manifest.from_json(bytes(data))
        except IntegrityError:
            return
        assert manifest.entries.keys() == MANIFEST.entries.keys()
        assert all(one.key == key for key, one in manifest.entries.items())

    @given(st.binary(max_size=100))
    @settings(deadline=None)
    def test_junk_is_refused(self, junk: bytes) -> None:
        with pytest.raises(IntegrityError):
            Manifest.from_json(junk)


class TestIndex:
    def test_each_platform_has_its_manifest(self) -> None:
        index = Index().with_manifest(X86_V4, "4" * 64).with_manifest(X86_V3, "3" * 64)
        assert index.manifest_for(X86_V3) == "3" * 64
        assert index.manifest_for(dict(reversed(X86_V4.items()))) == "4" * 64
        assert index.manifest_for({**X86_V3, "versions": {"torch": "2.14.0"}}) is None
        assert Index.from_json(index.to_json()) == index

    def test_order_of_merging_does_not_matter_and_later_replaces_earlier(self) -> None:
        one = Index().with_manifest(X86_V4, "4" * 64).with_manifest(X86_V3, "3" * 64)
        other = Index().with_manifest(X86_V3, "0" * 64).with_manifest(X86_V3, "3" * 64)
        assert other.with_manifest(X86_V4, "4" * 64).digest == one.digest

    @pytest.mark.parametrize(
        "document",
        [
            [],
            {},
            {"schema": "neffbuild.index/1"},
            {"schema": "neffbuild.index/2", "manifests": []},
            {"schema": "neffbuild.index/1", "manifests": "x"},
            {"schema": "neffbuild.index/1", "manifests": [{"platform": {}, "manifest": "x"}]},
            {"schema": "neffbuild.index/1", "manifests": [{"platform": "x", "manifest": "0" * 64}]},
            {
                "schema": "neffbuild.index/1",
                "manifests": [{"platform": {}, "manifest": "0" * 64}] * 2,
            },
        ],
    )
    def test_malformed_is_refused(self, document: Any) -> None:
        with pytest.raises(IntegrityError):
            Index.from_json(canonical_json(document))

    def test_platform_is_named_for_people(self) -> None:
        assert platform_text(X86_V3) == "inductor, aoti, x86-64-v3, torch 2.13.0"
