"""Decode step of one rank under decode context parallelism: it holds some positions of every sequence.

Shapes as in `layers.py`; C are the local positions of the rank's block table. Every rank computes every
query; a layer's attention is made of what all ranks saw in their parts of the context, and is the only
thing they exchange. Weights are whole on every rank: tensor parallelism is another matter.

Source of the scheme: vLLM's `v1/attention/ops/common.py` (`cp_lse_ag_out_rs`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from neffbuild.config.errors import ConfigError
from neffbuild.models.architecture import LlamaArchitecture
from neffbuild.models.layers import Attention, DecoderLayer, KVCache
from neffbuild.models.llama import Decoder, live_tokens

Merge = Callable[[Tensor, Tensor], Tensor]
"""(this rank's part of an attention `[…, D]`, log-sum-exp of its scores `[…]` float32) → the whole."""


class ContextParallelDecoder(Decoder):
    """One decode step over the positions that this rank holds. Runs as it is written, uncompiled: the
    exchange between layers is the caller's."""

    def __init__(
        self,
        architecture: LlamaArchitecture,
        dtype: torch.dtype,
        auxiliary_layers: Sequence[int] = (),
    ) -> None:
        """Raises `ConfigError` for a model with sliding windows."""
        if architecture.has_windows:
            raise ConfigError(
                "the reference model computes no sliding windows under decode context parallelism",
                field="serve.decode_context_parallel_size",
                hint="set decode_context_parallel_size to 1",
            )
        super().__init__(architecture, dtype, auxiliary_layers)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        block_table: Tensor,
        query_lens: Tensor,
        local_lens: Tensor,
        kv_caches: Sequence[KVCache],
        merge: Merge,
    ) -> tuple[Tensor, ...]:
        """Run one step, writing keys and values of this rank's positions into `kv_caches` in place.

        - `slot_mapping` `[B, Q]` int64: where each token is written to, negative for one whose position
          another rank holds
        - `block_table` `[B, C / block_size]` int32: the blocks that hold this rank's positions, one after
          another, padded with the null block 0
        - `local_lens` `[B, Q]` integer: how many positions, its own included, this rank holds of what each
          query sees
        - `merge`: called once in every layer, by all ranks in the same order

        and the others, like what is returned, as for `LlamaDecoder.forward`.
        """
        block_size = kv_caches[0][0].shape[1]
        live = live_tokens(input_ids, query_lens)
        positions = torch.where(live, positions, 0)
        own = live & (slot_mapping >= 0)
        slots = torch.where(own, slot_mapping, 0)
        held = torch.arange(block_table.shape[1] * block_size, device=input_ids.device)
        visible = (held < local_lens[..., None]) & live[..., None]  # [B, Q, C]

        hidden: Tensor = self.model.embed_tokens(torch.where(live, input_ids, 0))
        rotary = self.model.rotary_emb(positions, hidden.dtype)
        entering = []
        for layer, kv_cache in zip(self.model.layers, kv_caches, strict=True):
            assert isinstance(layer, DecoderLayer)
            entering.append(hidden)
            attention = layer.self_attn
            q = attention.enter(layer.input_layernorm(hidden), rotary, slots, own, kv_cache)
            part, log_sum_exp = _part(attention, q, block_table, visible, kv_cache)
            mixed = merge(part, log_sum_exp).flatten(2)
            hidden = hidden + attention.o_proj(mixed)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        entering.append(hidden)
        return self._outputs(hidden, live, entering)


def _part(
    attention: Attention, q: Tensor, block_table: Tensor, visible: Tensor, kv_cache: KVCache
) -> tuple[Tensor, Tensor]:
    """Attention over the positions at hand `[B, Q, H, D]`, and the log-sum-exp of its scores
    `[B, Q, H]`: -inf, and 0, for a query that sees none of them."""
    scores, context_values = attention.scores(q, block_table, visible, kv_cache)
    log_sum_exp = scores.logsumexp(dim=-1)  # [B, H / G, G, Q]
    # Against 0 instead of -inf: weights of nothing are 0, not NaN.
    weights = (scores - log_sum_exp.nan_to_num(neginf=0.0)[..., None]).exp().to(q.dtype)
    mixed = attention.mix(weights, context_values)
    return mixed.flatten(2, 3), log_sum_exp.flatten(1, 2).transpose(1, 2)
