"""The configs that come with the repository load, and are what their comments say."""

from __future__ import annotations

from pathlib import Path

import pytest

from neffbuild.config.build import BuildConfig
from neffbuild.config.load import load_config

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def load(name: str) -> BuildConfig:
    return load_config(CONFIGS / f"{name}.yaml")


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_loads_without_a_note(path: Path) -> None:
    assert load_config(path).notes == ()


def test_quickstart() -> None:
    config = load("quickstart")
    neuron = config.serve.neuron_config
    assert neuron.num_seqs_buckets == (1, 2, 4)
    assert neuron.decode_context_length_buckets == (256, 1024)
    assert (config.serve.max_model_len, config.serve.dtype) == (4096, "float32")
    assert (config.toolchain.name, config.toolchain.target) == ("inductor", "x86-64-v3")
    assert config.model.num_attention_heads > config.model.num_key_value_heads


def test_decode_worker() -> None:
    serve = load("llama-3.1-8b-decode-131072").serve
    assert serve.max_model_len == 131072
    assert serve.neuron_config.decode_context_length_buckets == (16384,)
    assert (serve.kv_transfer_config or {})["kv_role"] == "kv_consumer"


def test_grid() -> None:
    neuron = load("llama-3.1-8b-grid").serve.neuron_config
    assert neuron.num_seqs_buckets == (1, 2, 4)
    assert neuron.decode_context_length_buckets == (4096, 8192, 16384)


def test_eagle3_on_32_ranks() -> None:
    config = load("llama-3.3-70b-tp32-eagle3")
    assert config.serve.tensor_parallel_size == 32
    assert config.serve.num_speculative_tokens == 5
    assert config.serve.speculative_config is not None
    assert config.serve.speculative_config.max_model_len == 4096
    assert config.draft_model is not None
    assert config.draft_model.hidden_size == config.model.hidden_size
