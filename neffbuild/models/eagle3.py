"""EAGLE3 draft over a paged KV cache of its own: proposals of one step in one graph.

Written to be read, shapes in comments. B rows (`num_seqs`), Q tokens per row (`query_len`), K drafts
(`num_speculative_tokens`), H `hidden_size` of the draft. Module names are those of published EAGLE3
checkpoints.

At position p the draft takes the target's auxiliary hidden states of p and the token at p + 1, which the
target has just verified or sampled, and predicts the token at p + 2. First it does so for all tokens the
step added to a row; then, K - 1 times, for its own last draft at the next position, its own hidden state
standing in for the target's. What it wrote there, the next step overwrites.

Source of the arithmetic: vLLM `model_executor/models/llama_eagle3.py`, `v1/spec_decode/eagle.py`; of the
unrolled steps in one program: vLLM Neuron `spec_decode/eagle.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from neffbuild.config.errors import ConfigError
from neffbuild.models.draft_tables import FullTable, Table, WindowTable
from neffbuild.models.eagle3_architecture import Eagle3Architecture
from neffbuild.models.layers import (
    MLP,
    Attention,
    Embedding,
    KVCache,
    Linear,
    RMSNorm,
    RotaryEmbedding,
)
from neffbuild.models.llama import PAD_TOKEN_ID, live_tokens


class Eagle3Layer(nn.Module):
    """A decoder layer whose attention sees the embedding and the hidden state side by side."""

    def __init__(self, architecture: Eagle3Architecture, dtype: torch.dtype) -> None:
        super().__init__()
        layer = architecture.layer
        hidden, eps = layer.hidden_size, layer.rms_norm_eps
        self.norm_before_residual = architecture.norm_before_residual
        self.input_layernorm = RMSNorm(hidden, eps, dtype)
        self.hidden_norm = RMSNorm(hidden, eps, dtype)
        self.self_attn = Attention(layer, 2 * hidden, dtype)
        self.post_attention_layernorm = RMSNorm(hidden, eps, dtype)
        self.mlp = MLP(layer, dtype)

    def forward(
        self,
        embedded: Tensor,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor],
        slots: Tensor,
        live: Tensor,
        block_table: Tensor,
        visible: Tensor,
        kv_cache: KVCache,
    ) -> Tensor:
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        both = torch.cat((self.input_layernorm(embedded), normed), dim=-1)  # [B, Q, 2 H]
        hidden = residual + self.self_attn(
            both, rotary, slots, live, block_table, visible, kv_cache
        )
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class Proposer(nn.Module):
    """The proposals of one step for every row; how it is told where keys and values are differs between
    `Eagle3Draft` and `WindowedEagle3Draft`. Parameters are allocated and not initialised.

    The embedding is an input like every weight: the target's own, or one of the draft's.
    """

    d2t: Tensor

    output_names = ("draft_token_ids",)

    def __init__(
        self, eagle3: Eagle3Architecture, dtype: torch.dtype, num_speculative_tokens: int
    ) -> None:
        super().__init__()
        layer = eagle3.layer
        hidden = layer.hidden_size
        self.architecture = layer
        self.eagle3 = eagle3
        self.num_speculative_tokens = num_speculative_tokens
        self.embed_tokens = Embedding(layer.vocab_size, hidden, dtype)
        self.fc = Linear(eagle3.auxiliary_size, hidden, False, dtype)
        self.midlayer = Eagle3Layer(eagle3, dtype)
        self.norm = RMSNorm(hidden, layer.rms_norm_eps, dtype)
        self.lm_head = Linear(hidden, eagle3.draft_vocab_size, False, dtype)
        self.rotary_emb = RotaryEmbedding(layer)
        if eagle3.maps_vocabulary:
            # Target token minus draft token, by draft token.
            self.register_buffer("d2t", torch.zeros(eagle3.draft_vocab_size, dtype=torch.int64))
        self.requires_grad_(False)

    def _propose(
        self,
        input_ids: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        table: Table,
        query_lens: Tensor,
        auxiliary_hidden_states: Tensor,
        kv_cache: KVCache,
    ) -> tuple[Tensor]:
        def layer(
            ids: Tensor, hidden: Tensor, positions: Tensor, slots: Tensor, live: Tensor
        ) -> Tensor:
            embedded = self.embed_tokens(ids)
            rotary = self.rotary_emb(positions, embedded.dtype)
            visible = table.visible(positions, live)
            output: Tensor = self.midlayer(
                embedded, hidden, rotary, slots, live, table.block_table, visible, kv_cache
            )
            return output

        live = live_tokens(input_ids, query_lens)
        positions = torch.where(live, positions, 0)
        fused = self.fc(auxiliary_hidden_states.masked_fill(~live[..., None], 0))
        ids, slots = torch.where(live, input_ids, 0), torch.where(live, slot_mapping, 0)
        hidden = layer(ids, fused, positions, slots, live)  # [B, Q, H]

        # From here on a row has one query: its last.
        last = (query_lens[:, None].long() - 1).clamp(min=0)
        live = query_lens[:, None] > 0
        positions = positions.gather(1, last)
        hidden = hidden.take_along_dim(last[..., None], dim=1)  # [B, 1, H]
        drafts = [self._most_likely(hidden)]
        for _ in range(self.num_speculative_tokens - 1):
            positions = torch.where(live, positions + 1, 0)
            slots = table.slots(positions, live)
            hidden = layer(drafts[-1], hidden, positions, slots, live)
            drafts.append(self._most_likely(hidden))
        return (torch.where(live, torch.cat(drafts, dim=1), PAD_TOKEN_ID).to(torch.int32),)

    def _most_likely(self, hidden: Tensor) -> Tensor:
        """Greedy drafts `[B, 1]` int64 in the target's vocabulary."""
        drafts: Tensor = self.lm_head(self.norm(hidden)).argmax(dim=-1)
        return drafts + self.d2t[drafts] if self.eagle3.maps_vocabulary else drafts


class Eagle3Draft(Proposer):
    """The proposals of a draft whose layer sees the whole context."""

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        block_table: Tensor,
        query_lens: Tensor,
        auxiliary_hidden_states: Tensor,
        kv_caches: Sequence[KVCache],
    ) -> tuple[Tensor]:
        """Propose, writing keys and values into `kv_caches` in place.

        Row r has `query_lens[r]` tokens to catch up with, at positions p … p + `query_lens[r]` - 1. It
        writes those and K - 1 positions more, all of which `block_table` has to hold.

        - `input_ids` `[B, Q]` int32: for the query at position p the token at p + 1
        - `positions`, `slot_mapping` `[B, Q]` int64, `block_table` `[B, C / block_size]` int32: as the
          target's (`LlamaDecoder.forward`), of the draft's own cache
        - `query_lens` `[B]` int32: tokens the step added to each row, 0 for a row that gets no drafts.
          Queries beyond it are pad tokens: they write zeros to the null slot
        - `auxiliary_hidden_states` `[B, Q, auxiliary_size]`: what the target returned for the positions
        - `kv_caches`: `(keys, values)` of the one layer

        Returns `[B, K]` int32: drafts for the tokens after the last one given, in the target's
        vocabulary; `PAD_TOKEN_ID` in rows that get none.
        """
        [kv_cache] = kv_caches
        table = FullTable(block_table, kv_cache[0].shape[1])
        return self._propose(
            input_ids, positions, slot_mapping, table, query_lens, auxiliary_hidden_states, kv_cache
        )


class WindowedEagle3Draft(Proposer):
    """The proposals of a draft whose layer has a sliding window."""

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        block_table: Tensor,
        position_offset: Tensor,
        query_lens: Tensor,
        auxiliary_hidden_states: Tensor,
        kv_caches: Sequence[KVCache],
    ) -> tuple[Tensor]:
        """As `Eagle3Draft.forward`, with a `block_table` that begins in each row at `position_offset` `[B]`
        int32, a multiple of the block size. All that a row writes and sees is from there on."""
        [kv_cache] = kv_caches
        [window] = self.architecture.kv_windows
        table = WindowTable(block_table, kv_cache[0].shape[1], position_offset, window)
        return self._propose(
            input_ids, positions, slot_mapping, table, query_lens, auxiliary_hidden_states, kv_cache
        )


def load_checkpoint(
    draft: Proposer, checkpoint: Mapping[str, Tensor], target_embedding: nn.Parameter
) -> None:
    """Load a published checkpoint's tensors, under whichever of the usual names it has them.

    A checkpoint without an embedding shares the target's, `[vocab_size, hidden_size]`. Raises
    `ConfigError` for tensors that are missing, left over, or of another shape.
    """
    tensors = {_own_name(name): tensor for name, tensor in checkpoint.items()}
    # What leads from target tokens to draft tokens serves training; without a map all tokens are both.
    tensors.pop("t2d", None)
    if not draft.eagle3.maps_vocabulary:
        tensors.pop("d2t", None)
    if "embed_tokens.weight" not in tensors:
        draft.embed_tokens.weight = target_embedding
        tensors["embed_tokens.weight"] = target_embedding
    try:
        draft.load_state_dict(tensors)
    except RuntimeError as error:
        raise ConfigError(
            f"the checkpoint is not one of the draft's config.json: {error}",
            field="serve.speculative_config.model",
            hint="take weights and config.json from the same published draft",
        ) from error


def _own_name(name: str) -> str:
    """SafeAILab and SpecForge name the layer `midlayer`, speculators `layers.0`."""
    name = name.removeprefix("model.")
    return name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name
