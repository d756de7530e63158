"""A small random EAGLE3 draft, and the same computed without pages, rows or padding."""

from __future__ import annotations

import math

import torch
from tiny_llama import LLAMA3_ROPE, tiny_config
from torch import Tensor
from torch.nn.functional import silu

from neffbuild.models.architecture import LlamaArchitecture
from neffbuild.models.eagle3 import Eagle3Draft, Proposer, WindowedEagle3Draft
from neffbuild.models.eagle3_architecture import Eagle3Architecture

AUXILIARY_LAYERS = (0, 1, 2)


def draft_config(**changes: object) -> dict[str, object]:
    """A `config.json` as SpecForge publishes it, for the target of `tiny_config`."""
    fields = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": 100,
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 112,
        "max_position_embeddings": 512,
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {k: v for k, v in LLAMA3_ROPE.items() if k != "rope_theta"},
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "vocab_size": 256,
    }
    return {name: value for name, value in (fields | changes).items() if value is not ...}


def architecture(**changes: object) -> Eagle3Architecture:
    target = LlamaArchitecture.from_config(tiny_config().to_dict())
    return Eagle3Architecture.from_configs(draft_config(**changes), target, AUXILIARY_LAYERS)


def random_draft(spec_tokens: int, seed: int = 0, **changes: object) -> Proposer:
    """Random weights, norms too, and a vocabulary map with gaps."""
    torch.manual_seed(seed)
    eagle3 = architecture(**changes)
    kind = WindowedEagle3Draft if eagle3.layer.has_windows else Eagle3Draft
    draft = kind(eagle3, torch.float32, spec_tokens)
    for parameter in draft.parameters():
        parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.15)
    if draft.eagle3.maps_vocabulary:
        size = draft.eagle3.draft_vocab_size
        chosen = torch.randperm(draft.architecture.vocab_size)[:size].sort().values
        draft.d2t.copy_(chosen - torch.arange(size))
    return draft


def proposals(draft: Proposer, tokens: list[int], states: Tensor) -> tuple[list[int], Tensor]:
    """Drafts after `tokens`, and the keys of every position written.

    `states` `[len(tokens), auxiliary size]`: the target's, of the positions before each token. One growing
    sequence, recomputed from its first position for every draft: vLLM's arithmetic spelled out, nothing
    cached.
    """
    w = dict(draft.named_parameters())
    layer, drafts = draft.architecture, []
    hidden = states @ w["fc.weight"].T
    ids = list(tokens)
    while True:
        embedded = _norm(w["embed_tokens.weight"][ids], w["midlayer.input_layernorm.weight"], layer)
        normed = _norm(hidden, w["midlayer.hidden_norm.weight"], layer)
        residual = normed if draft.eagle3.norm_before_residual else hidden
        both = torch.cat([embedded, normed], dim=-1)
        attended, keys = _attention(both, w, layer, draft.rotary_emb.inv_freq)
        summed = residual + attended
        inner = _norm(summed, w["midlayer.post_attention_layernorm.weight"], layer)
        gate = silu(inner @ w["midlayer.mlp.gate_proj.weight"].T)
        up = inner @ w["midlayer.mlp.up_proj.weight"].T
        output = summed + (gate * up) @ w["midlayer.mlp.down_proj.weight"].T
        logits = _norm(output[-1], w["norm.weight"], layer) @ w["lm_head.weight"].T
        draft_id = int(logits.argmax())
        drafts.append(draft_id + (int(draft.d2t[draft_id]) if draft.eagle3.maps_vocabulary else 0))
        if len(drafts) == draft.num_speculative_tokens:
            return drafts, keys
        ids.append(drafts[-1])
        hidden = torch.cat([hidden, output[-1:]])


def _norm(values: Tensor, weight: Tensor, layer: LlamaArchitecture) -> Tensor:
    return weight * values / (values.pow(2).mean(-1, keepdim=True) + layer.rms_norm_eps).sqrt()


def _attention(
    both: Tensor, w: dict[str, Tensor], layer: LlamaArchitecture, inv_freq: Tensor
) -> tuple[Tensor, Tensor]:
    length, size = len(both), layer.head_dim
    q, k, v = (
        (both @ w[f"midlayer.self_attn.{name}_proj.weight"].T).view(length, -1, size)
        for name in "qkv"
    )
    angles = torch.arange(length)[:, None] * inv_freq
    q, k = _rotated(q, angles), _rotated(k, angles)
    groups = layer.num_attention_heads // layer.num_key_value_heads
    spread_k, spread_v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.einsum("qhd,khd->hqk", q, spread_k) / math.sqrt(size)
    ones = torch.ones(length, length, dtype=torch.bool)
    unseen = ones.triu(1)
    [window] = layer.layer_windows
    if window is not None:
        unseen |= ones.tril(-window)
    weights = scores.masked_fill(unseen, -math.inf).softmax(-1)
    mixed = torch.einsum("hqk,khd->qhd", weights, spread_v).reshape(length, -1)
    return mixed @ w["midlayer.self_attn.o_proj.weight"].T, k


def _rotated(heads: Tensor, angles: Tensor) -> Tensor:
    """Pairs (i, i + D / 2) turned by the position's angles."""
    a, b = heads.chunk(2, dim=-1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
