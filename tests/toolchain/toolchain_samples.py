"""Small configs and units that the inductor tests share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from neffbuild.config.build import BuildConfig, ToolchainConfig
from neffbuild.config.model import ModelConfig
from neffbuild.config.serve import ServeConfig, SpeculativeConfig
from neffbuild.grid.shapes import DecodeShape, Family
from neffbuild.toolchain.base import Unit
from neffbuild.toolchain.inductor.identity import inductor_identity

TINY_ARCHITECTURE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}

DRAFT_ARCHITECTURE = TINY_ARCHITECTURE | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "draft_vocab_size": 64,
}


def tiny_build(
    *,
    architecture: dict[str, Any] | None = None,
    serve: dict[str, Any] | None = None,
    **toolchain: Any,
) -> BuildConfig:
    """A config as loading would make it; keyword arguments are `toolchain:` fields."""
    options = {
        "model": "tiny",
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 4,
        "block_size": 16,
    }
    return BuildConfig(
        source="test",
        serve=ServeConfig(**(options | (serve or {}))),
        model=ModelConfig("tiny", TINY_ARCHITECTURE | (architecture or {})),
        toolchain=ToolchainConfig(**toolchain),
    )


def speculative_build(auxiliary_layers: list[int], **changes: Any) -> BuildConfig:
    """The same with an EAGLE3 draft that reads `auxiliary_layers` of the target."""
    speculative = SpeculativeConfig(method="eagle3", model="draft", num_speculative_tokens=2)
    base = tiny_build(
        serve={"speculative_config": speculative} | changes.pop("serve", {}), **changes
    )
    architecture = DRAFT_ARCHITECTURE | {"eagle_aux_hidden_state_layer_ids": auxiliary_layers}
    return replace(base, draft_model=ModelConfig("draft", architecture))


def decode(
    num_seqs: int, query_len: int = 1, context_len: int = 128, family: Family = Family.TARGET
) -> DecodeShape:
    return DecodeShape(family, num_seqs, query_len, context_len)


def unit(config: BuildConfig, shape: DecodeShape) -> Unit:
    """With the part of the recipe that a toolchain reads."""
    recipe = {"kind": "unit", "toolchain": inductor_identity(config).document()}
    return Unit(config=config, shape=shape, recipe=recipe, key="0" * 64)
