"""The size of vLLM Neuron's KV pool, against the published formula worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from grid_samples import build_config
from hypothesis import given
from hypothesis import strategies as st

from neffbuild.config.build import BuildConfig
from neffbuild.config.model import ModelConfig
from neffbuild.config.serve import NeuronConfig
from neffbuild.grid.kv_pool import GIB, KVPool, kv_budget, logical_core_bytes, neuron_kv_pool

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
LLAMA_70B = {
    **LLAMA_8B,
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
}
EAGLE3 = {**LLAMA_70B, "num_hidden_layers": 1}
QWEN3_30B = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "moe_intermediate_size": 768,
    "vocab_size": 151936,
}


def serving(model: dict[str, Any], **options: Any) -> BuildConfig:
    options = {"dtype": "bfloat16", "block_size": 32, "tensor_parallel_size": 8} | options
    config = build_config(num_seqs=(1, 8), max_num_seqs=8, **options)
    draft = ModelConfig("draft", EAGLE3) if options.get("spec_tokens") else None
    return replace(config, model=ModelConfig("target", model), draft_model=draft)


def pool(config: BuildConfig, target: str = "trn2", lnc: int = 2, **environment: str) -> KVPool:
    return neuron_kv_pool(config, target=target, physical_cores=lnc, environment=environment)


@pytest.mark.parametrize(
    ("target", "lnc", "gib"), [("trn2", 2, 24), ("trn2", 1, 12), ("trn3", 2, 36), ("trn3", 1, 18)]
)
def test_memory_of_a_logical_core(target: str, lnc: int, gib: int) -> None:
    assert logical_core_bytes(target, lnc) == gib * GIB
    assert logical_core_bytes("trn1", 1) is None


def test_the_budget() -> None:
    # Fractions of what gpu_memory_utilization allows, whole bytes at each step.
    assert kv_budget(24 * GIB, 0.9, 0) == 6957847019
    assert int(int(24 * GIB * 0.9) * 0.3) == 6957847019
    # Weights that leave less than the cap decide.
    assert kv_budget(1000, 0.9, 700) == 200
    assert kv_budget(1000, 0.9, 700, 0.1) == 90
    assert kv_budget(1000, 0.9, 901) == 0


@pytest.mark.parametrize(
    ("config", "target", "lnc", "blocks"),
    [
        # One KV head of 128 per rank, keys and values, 32 positions, 2 bytes: 16 KiB in each of 32 layers.
        (serving(LLAMA_8B), "trn2", 2, int(int(24 * GIB * 0.92) * 0.3) // (32 * 16384)),
        (serving(LLAMA_8B), "trn3", 2, int(int(36 * GIB * 0.92) * 0.3) // (32 * 16384)),
        (serving(LLAMA_8B), "trn2", 1, int(int(12 * GIB * 0.92) * 0.3) // (32 * 16384)),
        (serving(LLAMA_8B, kv_cache_dtype="fp8"), "trn2", 2,
         int(int(24 * GIB * 0.92) * 0.3) // (32 * 8192)),
        (serving(LLAMA_8B, gpu_memory_utilization=0.5), "trn2", 2,
         int(int(24 * GIB * 0.5) * 0.3) // (32 * 16384)),
        # 32 ranks share 8 KV heads: each keeps a whole one. The draft's layer draws on the pool too.
        (serving(LLAMA_70B, tensor_parallel_size=32), "trn2", 2,
         int(int(24 * GIB * 0.92) * 0.3) // 16384 // 80),
        (serving(LLAMA_70B, tensor_parallel_size=32, spec_tokens=5), "trn2", 2,
         int(int(24 * GIB * 0.92) * 0.3) // 16384 // 81),
        (serving(QWEN3_30B), "trn2", 2,
         int(int(24 * GIB * 0.92) * 0.3) // (48 * 16384)),
    ],
)  # fmt: skip
def test_blocks(config: BuildConfig, target: str, lnc: int, blocks: int) -> None:
    assert pool(config, target, lnc) == KVPool(blocks)


def test_8b_on_a_trn2_core() -> None:
    assert pool(serving(LLAMA_8B)).blocks == 13565


def test_what_is_pinned_is_so() -> None:
    pinned = serving({"model_type": "anything"}, num_gpu_blocks_override=77)
    assert pool(pinned, "trn1") == KVPool(77)


@pytest.mark.parametrize(
    ("config", "environment", "why"),
    [
        (serving({**LLAMA_8B, "model_type": "mamba"}), {}, "the weights of a mamba model"),
        (serving({**QWEN3_30B, "num_experts": None}), {}, "the weights of a qwen3_moe model"),
        (serving({**LLAMA_8B, "intermediate_size": None}), {}, "the weights of a llama model"),
        (serving(LLAMA_8B, dtype="float64", kv_cache_dtype="fp8"), {}, "the weights of a llama"),
        (serving(LLAMA_70B), {}, "weights take about 16.4 of a core's 24 GiB"),
        (serving(LLAMA_8B, pipeline_parallel_size=2), {}, "stages of pipeline parallelism"),
        (serving(LLAMA_8B, kv_cache_memory_bytes=1 << 30), {}, "kv_cache_memory_bytes is set"),
        (serving({**LLAMA_8B, "sliding_window": 4096}), {}, "target has layers with a sliding window"),
        (serving({**LLAMA_8B, "quantization_config": {}}), {}, "target is quantised"),
        (serving(LLAMA_70B, tensor_parallel_size=4, spec_tokens=5), {}, "weights take about"),
        (serving({**LLAMA_8B, "num_key_value_heads": 16}, spec_tokens=5), {},
         "blocks of draft are not of the size of those of target"),
        (serving(LLAMA_8B), {"VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION": "0.04"},
         "0.88 GiB are left for it, below the engine's minimum of 1"),
        (serving(LLAMA_8B), {"VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION": "0.04",
                             "VLLM_NEURON_MIN_KV_BUDGET_GIB": "0"},
         "hold 1808 blocks, and one sequence of max_model_len takes 4096"),
        (serving(LLAMA_8B), {"VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION": "measured"},
         "VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION is 'measured'"),
        (serving(LLAMA_8B), {"VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION": "-1"}, "is '-1'"),
        (serving(LLAMA_8B), {"VLLM_NEURON_DEVICE_GRAPH_RESERVE_GIB": "1"},
         "VLLM_NEURON_DEVICE_GRAPH_RESERVE_GIB is set"),
        (serving(LLAMA_8B), {"VLLM_NEURON_KV_HEADROOM_GIB": "5"}, "VLLM_NEURON_KV_HEADROOM_GIB is set"),
    ],
)  # fmt: skip
def test_what_cannot_be_told(config: BuildConfig, environment: dict[str, str], why: str) -> None:
    found = pool(config, **environment)
    assert found.blocks is None
    assert found.unresolved is not None
    assert why in found.unresolved
    assert found.unresolved.endswith("pin serve.num_gpu_blocks_override")


def test_component_data_parallelism_spreads_heads_in_another_way() -> None:
    config = serving(LLAMA_8B)
    neuron = NeuronConfig(**{**config.serve.neuron_config.model_dump(), "attention_dp_size": 2})
    additional = config.serve.additional_config.model_copy(update={"neuron_config": neuron})
    spread = replace(
        config, serve=config.serve.model_copy(update={"additional_config": additional})
    )
    assert "neuron_config.attention_dp_size is set" in (pool(spread).unresolved or "")


def test_a_target_of_unknown_memory() -> None:
    assert "the memory of trn1 is not known" in (pool(serving(LLAMA_8B), "trn1").unresolved or "")


def test_the_cap_may_be_another() -> None:
    found = pool(serving(LLAMA_8B), VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION="0.15")
    assert found.blocks == int(int(24 * GIB * 0.92) * 0.15) // (32 * 16384)


@given(st.integers(0, 1 << 40), st.floats(0, 1), st.integers(0, 1 << 40), st.floats(0, 1))
def test_a_budget_stays_within_what_is_allowed(
    hbm: int, utilization: float, weights: int, cap: float
) -> None:
    budget = kv_budget(hbm, utilization, weights, cap)
    total = int(hbm * utilization)
    assert 0 <= budget <= total
    assert budget == 0 or budget + weights <= total
    assert budget <= total * cap
