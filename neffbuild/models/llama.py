"""Llama decode step over a paged KV cache: the graph that the inductor toolchain compiles.

Written to be read, shapes in comments. B rows (`num_seqs`), Q tokens per row (`query_len`), C context
positions (`block_table` width times block size), H attention heads, G of them per KV head, D `head_dim`.
Module names are those of Hugging Face `LlamaForCausalLM`, so its state dict loads as it is.

Source of the arithmetic: `transformers` 5, `models/llama/modeling_llama.py`; of the step's inputs and
dtypes: vLLM's V1 model runner.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from neffbuild.config.errors import ConfigError
from neffbuild.models.architecture import LlamaArchitecture
from neffbuild.models.layers import KVCache, Linear, LlamaModel

PAD_TOKEN_ID = -1
"""What a step returns as the next token of a query beyond its row's length."""


class KVView(NamedTuple):
    """How the layers of one KV group meet the cache in a step: `slots` `[B, Q]` they write to, the
    `block_table` `[B, C / block_size]` they read through, and which of its positions are `visible`
    `[B, Q, C]` to each query."""

    slots: Tensor
    block_table: Tensor
    visible: Tensor


class Decoder(nn.Module):
    """The layers of a model and what a step computes of them; how it is told where keys and values are
    differs between `LlamaDecoder`, `WindowedDecoder` and `ContextParallelDecoder`.

    `auxiliary_layers` are the layers *entering* which the hidden states are returned as well (vLLM's
    convention for EAGLE3: layer i's input, after i layers). Parameters are allocated and not
    initialised, so building a model touches no weight memory.
    """

    def __init__(
        self,
        architecture: LlamaArchitecture,
        dtype: torch.dtype,
        auxiliary_layers: Sequence[int] = (),
    ) -> None:
        """Raises `ConfigError` for an auxiliary layer that the model does not have."""
        super().__init__()
        for layer in auxiliary_layers:
            if not 0 <= layer <= architecture.num_hidden_layers:
                raise ConfigError(
                    f"auxiliary hidden state layer {layer} is outside the target's "
                    f"{architecture.num_hidden_layers} layers",
                    field="speculative_config.eagle_aux_hidden_state_layer_ids",
                    value=list(auxiliary_layers),
                    hint=f"use layers from 0 to {architecture.num_hidden_layers}",
                )
        self.architecture = architecture
        self.auxiliary_layers = tuple(auxiliary_layers)
        self.model = LlamaModel(architecture, dtype)
        self.lm_head = Linear(architecture.hidden_size, architecture.vocab_size, False, dtype)
        if architecture.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.requires_grad_(False)

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of what a step returns, in order."""
        names = ("next_token_ids", "logits")
        return (*names, "auxiliary_hidden_states") if self.auxiliary_layers else names

    def _compute(
        self,
        input_ids: Tensor,
        positions: Tensor,
        live: Tensor,
        views: Sequence[KVView],
        kv_caches: Sequence[KVCache],
    ) -> tuple[Tensor, ...]:
        """A step's outputs. `live` `[B, Q]` is false for pad tokens, whose position is 0; `views` has one
        view for each layer."""
        hidden: Tensor = self.model.embed_tokens(torch.where(live, input_ids, 0))
        rotary = self.model.rotary_emb(positions, hidden.dtype)
        entering = []
        for layer, view, kv_cache in zip(self.model.layers, views, kv_caches, strict=True):
            entering.append(hidden)
            hidden = layer(
                hidden, rotary, view.slots, live, view.block_table, view.visible, kv_cache
            )
        entering.append(hidden)
        return self._outputs(hidden, live, entering)

    def _outputs(
        self, hidden: Tensor, live: Tensor, entering: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """From what left the last layer, and what entered each of them and left the last."""
        logits = self.lm_head(self.model.norm(hidden))
        next_token_ids = torch.where(live, logits.argmax(dim=-1), PAD_TOKEN_ID).to(torch.int32)
        if not self.auxiliary_layers:
            return next_token_ids, logits
        auxiliary = torch.cat([entering[layer] for layer in self.auxiliary_layers], dim=-1)
        return next_token_ids, logits, auxiliary


class LlamaDecoder(Decoder):
    """One decode step of a model whose layers all see the whole context; one signature for every family
    of target programs."""

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        block_table: Tensor,
        query_lens: Tensor,
        kv_caches: Sequence[KVCache],
    ) -> tuple[Tensor, ...]:
        """Run one step, writing keys and values into `kv_caches` in place.

        - `input_ids` `[B, Q]` int32
        - `positions` `[B, Q]` int64, absolute
        - `slot_mapping` `[B, Q]` int64: `block * block_size + offset` each token is written to
        - `block_table` `[B, C / block_size]` int32: the blocks that hold positions 0 … C - 1, padded
          with the null block 0
        - `query_lens` `[B]` int32: live tokens per row, 0 for a pad row. Queries beyond it are pad
          tokens whatever the other inputs say of them: they write zeros to the null slot and return
          `PAD_TOKEN_ID`
        - `kv_caches`: `(keys, values)` per layer

        Returns greedy next token ids `[B, Q]` int32 (the argmax after each query), logits
        `[B, Q, vocab_size]` in the model's dtype and, with auxiliary layers, their hidden states side
        by side `[B, Q, len(auxiliary_layers) * hidden_size]`.
        """
        block_size = kv_caches[0][0].shape[1]
        live = live_tokens(input_ids, query_lens)
        # A pad token sees position 0 alone: an empty softmax would be NaN.
        positions = torch.where(live, positions, 0)
        slots = torch.where(live, slot_mapping, 0)
        context = torch.arange(block_table.shape[1] * block_size, device=input_ids.device)
        visible = context <= positions[..., None]  # [B, Q, C]
        view = KVView(slots, block_table, visible)
        return self._compute(input_ids, positions, live, [view] * len(kv_caches), kv_caches)


def live_tokens(input_ids: Tensor, query_lens: Tensor) -> Tensor:
    """Which tokens `[B, Q]` are within their row's length; the others are pad tokens."""
    return torch.arange(input_ids.shape[1], device=input_ids.device) < query_lens[:, None]
