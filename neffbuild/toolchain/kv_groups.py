"""Which kinds of KV state a model keeps, told from its `config.json`.

What decides is what happens to a token that comes to nothing, a rejected draft or a placeholder. Keys and
values kept by position are overwritten when the position is computed again; a recurrent state has taken
the token in.

Source of the fields: the configuration classes of `transformers` 5 and vLLM's models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from neffbuild.config.model import SLIDING_ATTENTION, ModelConfig
from neffbuild.toolchain.base import KVGroup

_LAYER_LISTS = ("layer_types", "layers_block_type", "block_types")
_LAYER_KINDS: Mapping[str, KVGroup] = {
    "attention": KVGroup.FULL,
    "full_attention": KVGroup.FULL,
    SLIDING_ATTENTION: KVGroup.SLIDING_WINDOW,
    "chunked_attention": KVGroup.SLIDING_WINDOW,
    "conv": KVGroup.RECURRENT,
    "hybrid": KVGroup.RECURRENT,
    "linear_attention": KVGroup.RECURRENT,
    "mamba": KVGroup.RECURRENT,
    "recurrent": KVGroup.RECURRENT,
}
_RECURRENT_KEYS = (
    "conv_L_cache",  # LFM2
    "hybrid_override_pattern",  # Nemotron-H
    "linear_attn_config",  # Kimi Linear
    "linear_conv_kernel_dim",  # Qwen3-Next
    "lru_width",  # RecurrentGemma
    "mamba_d_state",  # Jamba, Bamba, Falcon-H1, Granite hybrids, Zamba
    "ssm_cfg",  # Mamba checkpoints of state-spaces
    "ssm_state_size",  # Nemotron-H
    "state_size",  # Mamba
    "time_mix_extra_dim",  # RWKV
)
"""Sizes that only a model with recurrent layers states."""


def kv_groups(model: ModelConfig) -> frozenset[KVGroup]:
    """The kinds of KV state in the model's layers."""
    return frozenset(_groups(model))


def _groups(model: ModelConfig) -> Iterator[KVGroup]:
    text = model.text
    if any(text.get(key) is not None for key in _RECURRENT_KEYS):
        yield KVGroup.RECURRENT
    # MiniMax states 0 for a layer of linear attention.
    if 0 in _list(text, "attn_type_list"):
        yield KVGroup.RECURRENT
    stated = [
        _LAYER_KINDS[kind]
        for key in _LAYER_LISTS
        for kind in _list(text, key)
        if kind in _LAYER_KINDS
    ]
    yield from (group for group in stated if group is KVGroup.RECURRENT)
    attention = {group for group in stated if group is not KVGroup.RECURRENT}
    if model.uses_mla:
        yield KVGroup.MLA
    elif attention:
        yield from attention
    elif text.get("num_attention_heads") is not None:
        windows = model.layer_windows if model.sliding_window else (None,)
        yield from (KVGroup.SLIDING_WINDOW if window else KVGroup.FULL for window in windows)


def _list(text: Mapping[str, Any], key: str) -> list[Any]:
    value = text.get(key)
    return value if isinstance(value, list) else []
