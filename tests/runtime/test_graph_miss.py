"""What strict mode says of a graph that is not stored: the ingredient that differs, where that is known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from neffbuild.cache.canonical import digest_document
from neffbuild.cache.directory import DirectoryStore
from neffbuild.cache.entry import Entry, FileRecord
from neffbuild.cache.manifest import Manifest
from neffbuild.cache.recipe import ToolchainIdentity, graph_recipe
from neffbuild.config.build import ToolchainConfig
from neffbuild.config.errors import MissingUnit, NeffbuildError, ToolchainRefusal
from neffbuild.runtime.backend_settings import BackendSettings
from neffbuild.runtime.graph_miss import graph_miss
from neffbuild.toolchain.base import Captured

HERE = ToolchainIdentity(
    name="inductor",
    route="aot",
    target="x86-64-v3+amx",
    engine="vllm",
    versions={"torch": "2.13.0", "g++": "12.2.0", "vllm": "0.32.0"},
    flags=(),
    source_digest="0" * 64,
)
SERVE = {"dtype": "float32", "max_model_len": 4096, "tensor_parallel_size": 1, "quantization": None}


def captured(*names: str, graph: str = "the graph") -> Captured:
    digest = digest_document([graph, *names])
    inner = SimpleNamespace(names=names, nameless_digest=digest_document(graph))
    return Captured(digest, inner)


def stored(graph: Captured) -> Entry:
    statistics = {
        "layer_names": [*graph.graph.names],
        "nameless_digest": graph.graph.nameless_digest,
    }
    return Entry(
        recipe=graph_recipe(graph.graph_digest, HERE.platform, {}),
        files={"program": FileRecord("1" * 64, 1)},
        graph_digest=graph.graph_digest,
        graph_key="2" * 64,
        statistics=statistics if graph.graph.names else {},
    )


@pytest.fixture
def error_of(tmp_path: Path):
    def miss(
        graph: Captured, *entries: Entry, identity: ToolchainIdentity = HERE
    ) -> NeffbuildError:
        manifest = Manifest(
            config="3" * 64,
            serve=SERVE,
            platform=HERE.platform,
            units=(),
            entries={entry.key: entry for entry in entries},
        )
        store = DirectoryStore(tmp_path)
        settings = BackendSettings(True, ToolchainConfig(engine="vllm"), store, (manifest,))
        return graph_miss(settings, graph, lambda _: identity, "4" * 64, (), None)

    return miss


def test_other_layer_names_of_the_same_graph_are_said(error_of):
    error = error_of(
        captured("renamed.0.attn", "renamed.1.attn"),
        stored(captured("model.0.attn", "model.1.attn")),
    )
    assert isinstance(error, MissingUnit)
    assert "for other layer names ('model.0.attn' for 'renamed.0.attn')" in error.message


@pytest.mark.parametrize(
    "entry",
    [
        stored(captured("model.0.attn", graph="another")),
        stored(captured("renamed.0.attn", graph="another")),
        stored(captured()),
    ],
    ids=["another graph", "its names", "no names"],
)
def test_names_are_not_blamed_for_another_graph(error_of, entry):
    error = error_of(captured("renamed.0.attn"), entry)
    assert "layer names" not in error.message
    stated = "the manifest is for dtype float32, max_model_len 4096, tensor_parallel_size 1 and"
    assert stated in error.message


ELSEWHERE = {
    "vllm '0.32.0', this process runs '0.33.0'": {
        "versions": dict(HERE.versions) | {"vllm": "0.33.0"}
    },
    "torch '2.13.0', this process runs '2.14.0'": {
        "versions": dict(HERE.versions) | {"torch": "2.14.0"}
    },
    "target 'x86-64-v3+amx', this process runs 'x86-64-v3+avx512'": {"target": "x86-64-v3+avx512"},
}


@pytest.mark.parametrize(("said", "change"), ELSEWHERE.items(), ids=ELSEWHERE)
def test_a_manifest_for_another_platform_is_said_first(error_of, said, change):
    error = error_of(captured("a"), stored(captured("b")), identity=replace(HERE, **change))
    assert isinstance(error, ToolchainRefusal)
    assert said in error.message
