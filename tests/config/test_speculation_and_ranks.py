"""Speculation, tensor parallelism and decode context parallelism: what must fit what."""

from __future__ import annotations

from typing import Any

import pytest
from config_workspace import DRAFT, EAGLE3, MODEL, Workspace, neuron


def speculative(**changed: Any) -> dict[str, Any]:
    merged = {**EAGLE3, **changed}
    return {
        "speculative_config": {name: value for name, value in merged.items() if value is not ...}
    }


@pytest.mark.parametrize(
    ("changed", "field", "value", "allowed"),
    [
        ({"num_speculative_tokens": 0}, "num_speculative_tokens", 0, "at least 1"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens", True, "at least 1"),
        ({"num_speculative_tokens": 2.5}, "num_speculative_tokens", 2.5, "at least 1"),
        ({"num_speculative_tokens": ...}, "num_speculative_tokens", None, "at least 1"),
        ({"num_speculative_tokens": 4096}, "num_speculative_tokens", 4096, "1 to 4095"),
        ({"method": "ngram"}, "method", "ngram", "allowed: eagle3"),
        ({"method": ...}, "method", None, "allowed: eagle3"),
        ({"model": ...}, "model", None, "the draft's directory"),
        ({"model": "nowhere"}, "model", "nowhere", "looked at"),
        ({"max_model_len": 0}, "max_model_len", 0, "at least 1"),
        ({"max_model_len": 2049}, "max_model_len", 2049, "1 to 2048"),
        ({"draft_tensor_parallel_size": 2}, "draft_tensor_parallel_size", 2, "allowed: 1 or 4"),
    ],
)
def test_refused(
    workspace: Workspace, changed: dict[str, Any], field: str, value: Any, allowed: str
) -> None:
    error = workspace.refused({**speculative(**changed), "tensor_parallel_size": 4})
    assert (error.field, error.value) == (f"serve.speculative_config.{field}", value)
    assert error.field in error.message
    assert allowed in error.message


def test_a_draft_limit_above_the_target(workspace: Workspace) -> None:
    error = workspace.refused({**speculative(max_model_len=1500), "max_model_len": 1024})
    assert "1 to 1024 (serve.max_model_len is 1024, the draft's own maximum 2048)" in error.message


@pytest.mark.parametrize(
    ("own", "target", "given", "limit"),
    [
        (2048, 4096, ..., 2048),
        (2048, 1024, ..., 1024),
        (2048, 4096, 512, 512),
        (2048, 4096, 2048, 2048),
        (None, 4096, ..., 4096),
    ],
)
def test_the_draft_limit(
    workspace: Workspace, own: int | None, target: int, given: Any, limit: int
) -> None:
    workspace.write_model("draft", {**DRAFT, "max_position_embeddings": own})
    config = workspace.load({**speculative(max_model_len=given), "max_model_len": target})
    assert config.serve.speculative_config is not None
    assert config.serve.speculative_config.max_model_len == limit
    assert config.draft_model is not None
    assert config.draft_model.num_hidden_layers == 1


def test_what_loading_fills_in(workspace: Workspace) -> None:
    config = workspace.load({**speculative(), "tensor_parallel_size": 4})
    assert config.serve.speculative_config is not None
    assert config.serve.speculative_config.draft_tensor_parallel_size == 4
    assert config.serve.num_speculative_tokens == 5
    assert config.serve.neuron_config.verify_query_len_buckets == (6,)


def test_the_method_may_follow_from_the_name(workspace: Workspace) -> None:
    workspace.write_model("my-EAGLE3-draft", DRAFT)
    config = workspace.load(speculative(method=..., model="my-EAGLE3-draft"))
    assert config.serve.speculative_config is not None
    assert config.serve.speculative_config.method == "eagle3"
    assert any("speculative_config.method is not set: eagle3" in note for note in config.notes)


def test_dashes_in_speculative_config_as_in_vllm(workspace: Workspace) -> None:
    dashed = {name.replace("_", "-"): value for name, value in EAGLE3.items()}
    assert (
        workspace.load({"speculative-config": dashed}).serve == workspace.load(speculative()).serve
    )
    error = workspace.refused({"speculative_config": {**EAGLE3, "num-speculative-tokens": 5}})
    assert "serve.speculative_config.num_speculative_tokens is given twice" in error.message


def test_other_speculative_options_are_kept(workspace: Workspace) -> None:
    config = workspace.load(speculative(quantization="fp8", some_future="8"))
    assert config.serve.speculative_config is not None
    assert config.serve.speculative_config.model_extra == {"quantization": "fp8", "some_future": 8}


# The model of the workspace has 32 attention heads and 4 KV heads: 8 query heads per KV head.


@pytest.mark.parametrize(
    ("serve", "field", "value", "allowed"),
    [
        ({"tensor_parallel_size": 3}, "serve.tensor_parallel_size", 3,
         "a divisor of the model's 32 attention heads"),
        ({"tensor_parallel_size": 64}, "serve.tensor_parallel_size", 64,
         "a divisor of the model's 32 attention heads"),
        ({"tensor_parallel_size": 4, "decode_context_parallel_size": 2},
         "serve.decode_context_parallel_size", 2,
         "unless tensor_parallel_size is larger than the model's 4 KV heads"),
        ({"tensor_parallel_size": 8, "decode_context_parallel_size": 4},
         "serve.decode_context_parallel_size", 4, "1 to 2 (tensor_parallel_size 8 over 4 KV heads)"),
        ({"tensor_parallel_size": 16, "decode_context_parallel_size": 3},
         "serve.decode_context_parallel_size", 3, "a divisor of the model's 8 query heads"),
        ({"tensor_parallel_size": 8, "decode_context_parallel_size": 2,
          "cp_kv_cache_interleave_size": 24},
         "serve.cp_kv_cache_interleave_size", 24, "a divisor of block_size 32"),
        ({"tensor_parallel_size": 8, "decode_context_parallel_size": 2,
          "cp_kv_cache_interleave_size": 64},
         "serve.cp_kv_cache_interleave_size", 64, "a divisor of block_size 32"),
        ({"tensor_parallel_size": 8, "decode_context_parallel_size": 2, "max_model_len": 4000},
         "serve.max_model_len", 4000, "multiples of 64"),
        ({"tensor_parallel_size": 8, "decode_context_parallel_size": 2, "block_size": 128,
          **neuron(decode_context_length_buckets=[256, 384])},
         "serve.additional_config.neuron_config.decode_context_length_buckets", 384,
         "multiples of 256"),
        ({"tensor_parallel_size": 8, "decode_context_parallel_size": 2,
          **neuron(attention_dp_size=2)},
         "serve.decode_context_parallel_size", 2, "attention_dp_size 2; allowed: one of the two"),
        ({"tensor_parallel_size": 8, "decode_context_parallel_size": 2,
          "cp_kv_cache_interleave_size": 8,
          "kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}},
         "serve.cp_kv_cache_interleave_size", 8, "block_size 32, with NixlConnector"),
        ({"tensor_parallel_size": 8, "decode_context_parallel_size": 2, "block_size": 128,
          "max_num_batched_tokens": 640, **neuron(num_batched_tokens_buckets=[640])},
         "serve.additional_config.neuron_config.num_batched_tokens_buckets", [640],
         "multiples of 256"),
    ],
)  # fmt: skip
def test_ranks_refused(
    workspace: Workspace, serve: dict[str, Any], field: str, value: Any, allowed: str
) -> None:
    error = workspace.refused(serve)
    assert (error.field, error.value) == (field, value)
    assert field in error.message
    assert allowed in error.message


def test_tensor_parallel_size_divides_into_context_ranks(workspace: Workspace) -> None:
    workspace.write_model("model", {**MODEL, "num_key_value_heads": 1})
    error = workspace.refused({"tensor_parallel_size": 16, "decode_context_parallel_size": 12})
    assert "a divisor of the model's 32 query heads" in error.message
    workspace.write_model("model", {"model_type": "llama", "max_position_embeddings": 8192})
    error = workspace.refused({"tensor_parallel_size": 16, "decode_context_parallel_size": 12})
    assert (error.field, error.value) == ("serve.decode_context_parallel_size", 12)
    assert "a divisor of tensor_parallel_size 16" in error.message


_DCP = {"tensor_parallel_size": 8, "decode_context_parallel_size": 2}


def test_context_parallelism_that_fits(workspace: Workspace) -> None:
    serve = {
        **_DCP,
        "cp_kv_cache_interleave_size": 16,
        **neuron(decode_context_length_buckets=[256, 1024]),
    }
    config = workspace.load(serve)
    assert config.serve.cp_kv_cache_interleave_size == 16
    assert config.notes == ()


def test_a_share_that_is_no_whole_tile_is_noted(workspace: Workspace) -> None:
    config = workspace.load({**_DCP, **neuron(decode_context_length_buckets=[128, 256])})
    notes = [note for note in config.notes if "kernel tile" in note]
    assert len(notes) == 1
    assert "decode_context_length_buckets 128 is not a multiple of 128 ×" in notes[0]


def test_uneven_prefill_buckets_are_noted(workspace: Workspace) -> None:
    serve = {
        **_DCP,
        "block_size": 128,
        "max_num_batched_tokens": 1024,
        **neuron(num_batched_tokens_buckets=[128, 256, 1024]),
    }
    assert any("[128] are not multiples" in note for note in workspace.load(serve).notes)


def test_transfer_under_context_parallelism_moves_whole_blocks(workspace: Workspace) -> None:
    transfer = {"kv_transfer_config": {"kv_connector": "NeuronNixlConnector"}}
    config = workspace.load({**_DCP, **transfer})
    assert config.serve.cp_kv_cache_interleave_size == 32
    assert any("cp_kv_cache_interleave_size is not set: block_size 32" in n for n in config.notes)
    assert workspace.load(transfer).serve.cp_kv_cache_interleave_size == 1


def test_latent_attention_has_no_kv_heads_to_share_out(workspace: Workspace) -> None:
    workspace.write_model("model", {**MODEL, "kv_lora_rank": 512, "num_key_value_heads": 32})
    assert workspace.load(_DCP).serve.decode_context_parallel_size == 2


def test_rules_of_context_parallelism_need_context_parallelism(workspace: Workspace) -> None:
    serve = {
        "max_model_len": 4001,
        "cp_kv_cache_interleave_size": 24,
        **neuron(attention_dp_size=2),
    }
    assert workspace.load(serve).serve.max_model_len == 4001
