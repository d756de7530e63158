"""The layers of the reference models: attention over a paged KV cache, MLP, norms, rotary embedding.

Written to be read, shapes in comments. B rows (`num_seqs`), Q tokens per row (`query_len`), C context
positions (`block_table` width times block size), H attention heads, G of them per KV head, D `head_dim`.
Module names are those of Hugging Face `LlamaForCausalLM`.

Source of the arithmetic: `transformers` 5, `models/llama/modeling_llama.py` and
`modeling_rope_utils.py`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, silu

from neffbuild.models.architecture import LlamaArchitecture

KVCache = tuple[Tensor, Tensor]
"""Keys and values of one layer, each `[num_blocks, block_size, num_key_value_heads, head_dim]`."""


class Linear(nn.Module):
    """`torch.nn.Linear` without its initialisation, which would touch every weight."""

    def __init__(self, inputs: int, outputs: int, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(outputs, dtype=dtype)) if bias else None

    def forward(self, values: Tensor) -> Tensor:
        return linear(values, self.weight, self.bias)


class Embedding(nn.Module):
    """`torch.nn.Embedding`, likewise."""

    def __init__(self, rows: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width, dtype=dtype))

    def forward(self, ids: Tensor) -> Tensor:
        return embedding(ids, self.weight)


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32."""

    def __init__(self, hidden_size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=dtype))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        exact = hidden.float()
        exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * exact.to(hidden.dtype)


class RotaryEmbedding(nn.Module):
    """Cosine and sine of the rotary angles of absolute positions, plain or with Llama-3 scaling."""

    inv_freq: Tensor

    def __init__(self, architecture: LlamaArchitecture) -> None:
        super().__init__()
        self.register_buffer("inv_freq", inverse_frequencies(architecture), persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angles = positions[..., None].float() * self.inv_freq  # [B, Q, D / 2]
        angles = torch.cat((angles, angles), dim=-1)[:, :, None, :]  # [B, Q, 1, D]
        return angles.cos().to(dtype), angles.sin().to(dtype)


class Attention(nn.Module):
    """Grouped-query attention that writes this step's keys and values in place, then reads the context
    back through the block table. `inputs` is the width of what queries, keys and values are made of."""

    def __init__(self, architecture: LlamaArchitecture, inputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, bias = architecture.hidden_size, architecture.attention_bias
        self.head_dim = architecture.head_dim
        self.kv_heads = architecture.num_key_value_heads
        self.groups = architecture.num_attention_heads // self.kv_heads
        heads_width = architecture.num_attention_heads * self.head_dim
        kv_width = self.kv_heads * self.head_dim
        self.q_proj = Linear(inputs, heads_width, bias, dtype)
        self.k_proj = Linear(inputs, kv_width, bias, dtype)
        self.v_proj = Linear(inputs, kv_width, bias, dtype)
        self.o_proj = Linear(heads_width, hidden, architecture.attention_output_bias, dtype)

    def forward(
        self,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor],
        slots: Tensor,
        live: Tensor,
        block_table: Tensor,
        visible: Tensor,
        kv_cache: KVCache,
    ) -> Tensor:
        q = self.enter(hidden, rotary, slots, live, kv_cache)
        scores, context_values = self.scores(q, block_table, visible, kv_cache)
        weights = scores.softmax(dim=-1).to(hidden.dtype)
        mixed = self.mix(weights, context_values)
        output: Tensor = self.o_proj(mixed.reshape(*hidden.shape[:2], -1))
        return output

    def enter(
        self,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor],
        slots: Tensor,
        live: Tensor,
        kv_cache: KVCache,
    ) -> Tensor:
        """Write keys and values; the queries `[B, Q, H, D]`."""
        rows, queries, _ = hidden.shape
        cos, sin = rotary
        q = _rotate(self.q_proj(hidden).view(rows, queries, -1, self.head_dim), cos, sin)
        k = _rotate(self.k_proj(hidden).view(rows, queries, self.kv_heads, self.head_dim), cos, sin)
        v = self.v_proj(hidden).view(rows, queries, self.kv_heads, self.head_dim)
        keys, values = kv_cache
        _write(keys, slots, live, k)
        _write(values, slots, live, v)
        return q

    def scores(
        self, q: Tensor, block_table: Tensor, visible: Tensor, kv_cache: KVCache
    ) -> tuple[Tensor, Tensor]:
        """What queries make of the keys behind the block table `[B, H / G, G, Q, C]` float32, -inf where
        those are not visible, and the values there `[B, C, H / G, D]`."""
        keys, values = kv_cache
        context_keys = keys[block_table].flatten(1, 2)  # [B, C, H / G, D]
        context_values = values[block_table].flatten(1, 2)
        rows, queries = q.shape[:2]
        q = q.view(rows, queries, self.kv_heads, self.groups, self.head_dim)
        scores = torch.einsum("bqhgd,bchd->bhgqc", q, context_keys) / math.sqrt(self.head_dim)
        return scores.float().masked_fill(~visible[:, None, None], -math.inf), context_values

    def mix(self, weights: Tensor, context_values: Tensor) -> Tensor:
        """The values `[B, Q, H / G, G, D]`, weighed."""
        return torch.einsum("bhgqc,bchd->bqhgd", weights, context_values)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, architecture: LlamaArchitecture, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, inner = architecture.hidden_size, architecture.intermediate_size
        self.gate_proj = Linear(hidden, inner, architecture.mlp_bias, dtype)
        self.up_proj = Linear(hidden, inner, architecture.mlp_bias, dtype)
        self.down_proj = Linear(inner, hidden, architecture.mlp_bias, dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.down_proj(silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return output


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP, each with its residual."""

    def __init__(self, architecture: LlamaArchitecture, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, eps = architecture.hidden_size, architecture.rms_norm_eps
        self.self_attn = Attention(architecture, hidden, dtype)
        self.mlp = MLP(architecture, dtype)
        self.input_layernorm = RMSNorm(hidden, eps, dtype)
        self.post_attention_layernorm = RMSNorm(hidden, eps, dtype)

    def forward(
        self,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor],
        slots: Tensor,
        live: Tensor,
        block_table: Tensor,
        visible: Tensor,
        kv_cache: KVCache,
    ) -> Tensor:
        hidden = hidden + self.self_attn(
            self.input_layernorm(hidden), rotary, slots, live, block_table, visible, kv_cache
        )
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class LlamaModel(nn.Module):
    """Embedding, layers and final norm; a namespace of parameters, driven by `LlamaDecoder`."""

    def __init__(self, architecture: LlamaArchitecture, dtype: torch.dtype) -> None:
        super().__init__()
        vocabulary, hidden = architecture.vocab_size, architecture.hidden_size
        self.embed_tokens = Embedding(vocabulary, hidden, dtype)
        self.layers = nn.ModuleList(
            DecoderLayer(architecture, dtype) for _ in range(architecture.num_hidden_layers)
        )
        self.norm = RMSNorm(hidden, architecture.rms_norm_eps, dtype)
        self.rotary_emb = RotaryEmbedding(architecture)


def inverse_frequencies(architecture: LlamaArchitecture) -> Tensor:
    """Rotary frequencies `[head_dim / 2]` float32, as `transformers` computes them."""
    exponents = torch.arange(0, architecture.head_dim, 2, dtype=torch.float) / architecture.head_dim
    frequencies = 1.0 / (architecture.rope_theta**exponents)
    scaling = architecture.rope_scaling
    if scaling is None:
        return frequencies
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    original = scaling.original_max_position_embeddings
    smooth = (original / wavelengths - low) / (high - low)
    blended = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    scaled = torch.where(wavelengths > original / low, frequencies / scaling.factor, frequencies)
    between = (wavelengths >= original / high) & (wavelengths <= original / low)
    return torch.where(between, blended, scaled)


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin


def _write(cache: Tensor, slots: Tensor, live: Tensor, values: Tensor) -> None:
    """Pad tokens write zeros, so the null block stays finite: rows that read it through the padding of
    their block table weigh it with 0, and 0 times NaN would spread."""
    block_size = cache.shape[1]
    cache[slots // block_size, slots % block_size] = values.masked_fill(~live[..., None, None], 0)
