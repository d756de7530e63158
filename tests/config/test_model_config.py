"""Finding a model's config.json, and what of it is the architecture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from config_workspace import DRAFT, EAGLE3, MODEL, Workspace

from neffbuild.config.errors import ConfigError
from neffbuild.config.model import DROPPED, ModelConfig, model_config
from neffbuild.config.model_files import load_model


def test_what_is_no_architecture_is_dropped() -> None:
    noise = dict.fromkeys(DROPPED, "x")
    document = {
        **MODEL,
        **noise,
        "text_config": {"hidden_size": 1, **noise},
        "quantization_config": {"quant_method": "fp8", "dtype": "e4m3"},
        "auto_map": {"AutoModel": "modeling.Model"},
    }
    architecture = model_config("m", document).architecture
    assert architecture == {
        **{key: value for key, value in MODEL.items() if key not in DROPPED},
        "text_config": {"hidden_size": 1},
        "quantization_config": {"quant_method": "fp8", "dtype": "e4m3"},
        "auto_map": {"AutoModel": "modeling.Model"},
    }


def test_where_a_model_lies_is_no_part_of_it(workspace: Workspace) -> None:
    here = workspace.load()
    workspace.write_model("other", {**MODEL, "_name_or_path": "/elsewhere", "dtype": "bfloat16"})
    there = workspace.load({"model": "other"})
    assert here.model.architecture == there.model.architecture
    assert (here.model.name, there.model.name) == ("model", "other")


@pytest.mark.parametrize("reference", ["model", "./model", "model/config.json", "other/../model"])
def test_relative_to_the_config_file(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, reference: str
) -> None:
    (workspace.root / "other").mkdir()
    monkeypatch.chdir("/")
    config = workspace.load({"model": reference})
    assert config.model.num_hidden_layers == 4
    assert config.model.name == "model"


def test_absolute_home_and_variables(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(workspace.root))
    monkeypatch.setenv("MODELS", str(workspace.root))
    for reference in (str(workspace.root / "model"), "~/model", "$MODELS/model"):
        assert workspace.load({"model": reference}).model.num_hidden_layers == 4


def test_a_file_of_another_name(workspace: Workspace) -> None:
    (workspace.root / "tiny.json").write_text(json.dumps(MODEL))
    assert workspace.load({"model": "tiny.json"}).model.name == "tiny"


def test_a_directory_without_config(workspace: Workspace) -> None:
    (workspace.root / "empty").mkdir()
    error = workspace.refused({"model": "empty"})
    assert (error.field, error.value) == ("serve.model", "empty")
    assert f"the directory {workspace.root / 'empty'} holds no config.json" in error.message


@pytest.mark.parametrize(
    ("content", "needle"),
    [
        (b'{"a": 1,\n "b": }', "line 2, column 7: not valid JSON"),
        (b"[]", "is not a model's config.json"),
        (b"\xff\xfe", "is not UTF-8"),
        (b"", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"a": ' + b"[" * 90 + b"]" * 90 + b"}", "is not a model's config.json"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"num_attention_heads": "32"}', "num_attention_heads is '32'; allowed: a positive"),
        (b'{"max_position_embeddings": 1.5}', "max_position_embeddings is 1.5"),
    ],
)
def test_malformed_config_json(workspace: Workspace, content: bytes, needle: str) -> None:
    (workspace.root / "model" / "config.json").write_bytes(content)
    assert needle in workspace.refused().message


def test_weights_are_not_mistaken_for_a_config(workspace: Workspace) -> None:
    with (workspace.root / "model" / "config.json").open("wb") as file:
        file.truncate(1 << 40)
    assert "too many for a model's config.json" in workspace.refused().message


def test_addresses_are_refused(workspace: Workspace) -> None:
    error = workspace.refused({"model": "s3://bucket/model"})
    assert error.hint is not None
    assert "hf_config_path" in error.hint


def test_a_reference_no_file_system_takes(workspace: Workspace) -> None:
    error = workspace.refused({"model": "x" * 5000})
    assert error.field == "serve.model"
    assert "looked" in error.message


class HubCache:
    """The local Hugging Face cache, laid out as its library does."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def add(
        self, repository: str, commit: str, document: dict[str, Any], ref: str = "main"
    ) -> None:
        folder = self.root / ("models--" + repository.replace("/", "--"))
        (folder / "blobs").mkdir(parents=True, exist_ok=True)
        (folder / "blobs" / commit).write_text(json.dumps(document))
        snapshot = folder / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").symlink_to(Path("../../blobs") / commit)
        (folder / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
        (folder / "refs" / ref).write_text(commit)


@pytest.mark.parametrize(
    ("variable", "value", "below"),
    [
        ("HF_HUB_CACHE", "{root}/hub", "hub"),
        ("HUGGINGFACE_HUB_CACHE", "{root}/hub", "hub"),
        ("HF_HOME", "{root}/hf", "hf/hub"),
        ("XDG_CACHE_HOME", "{root}/xdg", "xdg/huggingface/hub"),
        ("HOME", "{root}/me", "me/.cache/huggingface/hub"),
    ],
)
def test_a_model_id_in_the_local_cache(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, below: str
) -> None:
    monkeypatch.setenv(variable, value.format(root=workspace.root))
    HubCache(workspace.root / below).add("org/tiny", "c0ffee", {**MODEL, "num_hidden_layers": 7})
    config = workspace.load({"model": "org/tiny"})
    assert config.model.num_hidden_layers == 7
    assert config.model.name == "org/tiny"


def test_revisions(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(workspace.root / "hub"))
    cache = HubCache(workspace.root / "hub")
    cache.add("tiny", "1111111", {**MODEL, "num_hidden_layers": 1})
    cache.add("tiny", "2222222", {**MODEL, "num_hidden_layers": 2}, ref="v2")
    cache.add("draft-org/draft", "3333333", {**DRAFT, "num_hidden_layers": 3}, ref="pr/1")
    layers = {
        revision: workspace.load({"model": "tiny", "revision": revision}).model.num_hidden_layers
        for revision in (None, "main", "v2", "1111111", 2222222)
    }
    assert list(layers.values()) == [1, 1, 2, 1, 2]
    draft = workspace.load(
        {"speculative_config": {**EAGLE3, "model": "draft-org/draft", "revision": "pr/1"}}
    ).draft_model
    assert draft is not None
    assert draft.num_hidden_layers == 3


def test_what_is_not_cached_lists_where_it_looked(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(workspace.root / "hub"))
    HubCache(workspace.root / "hub").add("org/tiny", "c0ffee", MODEL)
    (workspace.root / "hub/models--org--tiny/snapshots/c0ffee/config.json").unlink()
    error = workspace.refused({"model": "org/tiny"})
    for place in (
        workspace.root / "org/tiny",
        workspace.root / "hub/models--org--tiny/snapshots/c0ffee/config.json",
        workspace.root / "hub/models--org--tiny/refs/main",
    ):
        assert str(place) in error.message
    assert "network" in (error.hint or "")


@pytest.mark.parametrize("reference", ["../etc", "a/b/c", "org/..", "org/na me"])
def test_what_is_no_model_id_is_not_looked_up_in_the_cache(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, reference: str
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", "/hub-cache")
    assert "/hub-cache" not in workspace.refused({"model": reference}).message


def test_a_revision_cannot_leave_the_cache(workspace: Workspace) -> None:
    error = workspace.refused({"model": "org/tiny", "revision": "../../../model"})
    assert "snapshots/.." not in error.message


def test_loading_by_path_is_public(workspace: Workspace) -> None:
    assert load_model("model", workspace.root, field="serve.model").vocab_size == 1024


def longest(**keys: Any) -> int | None:
    return ModelConfig("m", {"model_type": "llama", **keys}).max_position_embeddings


@pytest.mark.parametrize(
    ("keys", "length"),
    [
        ({"max_position_embeddings": 2048}, 2048),
        ({"n_positions": 1024}, 1024),
        ({"max_position_embeddings": 4096, "seq_length": 2048}, 2048),
        ({"max_position_embeddings": 4096, "model_max_length": 8192}, 8192),
        ({}, None),
        ({"max_position_embeddings": 4096, "rope_scaling": None}, 4096),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}}, 16384),
        ({"max_position_embeddings": 4096, "rope_scaling": {"rope_type": "dynamic", "factor": 2}},
         8192),
        ({"max_position_embeddings": 131072, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
         131072),
        ({"max_position_embeddings": 32768, "rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
         32768),
        ({"max_position_embeddings": 4096, "rope_parameters": {"rope_type": "default"}}, 4096),
        ({"max_position_embeddings": 4096,
          "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0},
                              "sliding_attention": {"rope_type": "default"}}}, 32768),
        ({"model_type": "gemma3_text", "max_position_embeddings": 131072,
          "rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 131072),
        ({"text_config": {"max_position_embeddings": 512}}, 512),
        ({"transformer_layer_config": {"max_position_embeddings": 256}}, 256),
    ],
)  # fmt: skip
def test_longest_context(keys: dict[str, Any], length: int | None) -> None:
    assert longest(**keys) == length


def test_long_rope_serves_its_original_length(workspace: Workspace) -> None:
    long_rope = {
        **MODEL,
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "rope_scaling": {"type": "longrope", "long_factor": [1.0], "short_factor": [1.0]},
    }
    workspace.write_model("model", long_rope)
    assert workspace.load({"max_model_len": ...}).serve.max_model_len == 4096
    assert workspace.load({"max_model_len": 131072}).serve.max_model_len == 131072


def test_accessors() -> None:
    model = ModelConfig("m", MODEL)
    assert (model.num_hidden_layers, model.hidden_size, model.vocab_size) == (4, 256, 1024)
    assert (model.num_attention_heads, model.num_key_value_heads, model.head_dim) == (32, 4, 8)
    assert model.sliding_window is None
    assert ModelConfig("m", {"sliding_window": 512}).sliding_window == 512
    windowed = {"sliding_window": 512, "use_sliding_window": False}
    assert ModelConfig("m", windowed).sliding_window is None
    assert ModelConfig("m", {"num_attention_heads": 8}).num_key_value_heads == 8
    assert ModelConfig("m", {**MODEL, "head_dim": 64}).head_dim == 64


def test_an_accessor_names_what_is_missing() -> None:
    with pytest.raises(ConfigError, match="model tiny states no num_hidden_layers") as caught:
        _ = ModelConfig("tiny", {}).num_hidden_layers
    assert caught.value.field == "num_hidden_layers"


def test_infinity_in_a_config_json_is_kept(workspace: Workspace) -> None:
    text = json.dumps(MODEL)[:-1] + ', "time_step_limit": [0.0, Infinity]}'
    (workspace.root / "model" / "config.json").write_text(text)
    assert workspace.load().model.architecture["time_step_limit"] == [0.0, "Infinity"]


@pytest.mark.parametrize("layers", [100_001, 10**12, 2**63])
def test_more_layers_than_lists_can_be_made_of_are_refused(layers: int) -> None:
    model = ModelConfig("m", {"num_hidden_layers": layers, "sliding_window": 512})
    with pytest.raises(ConfigError, match=f"num_hidden_layers is {layers}; allowed: "):
        _ = model.layer_windows
