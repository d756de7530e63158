"""Decode step of a model some or all of whose layers have a sliding window.

Shapes as in `layers.py`. Layers with the same window are a KV group: they read the cache through one block
table, which holds no more columns than a step sees. Where it begins differs between rows, so that each
group is told a position for every row.

Source of the arithmetic: `transformers` 5, `models/mistral/modeling_mistral.py`,
`models/ministral/modeling_ministral.py`, `models/qwen2/modeling_qwen2.py` and `masking_utils.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from neffbuild.models.layers import KVCache
from neffbuild.models.llama import Decoder, KVView, live_tokens


class WindowedDecoder(Decoder):
    """One decode step over several block tables, one for each of `architecture.kv_windows`, in that
    order."""

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        query_lens: Tensor,
        slot_mappings: Sequence[Tensor],
        block_tables: Sequence[Tensor],
        position_offsets: Sequence[Tensor],
        kv_caches: Sequence[KVCache],
    ) -> tuple[Tensor, ...]:
        """Run one step, writing keys and values into `kv_caches` in place.

        Of every KV group

        - `slot_mappings` `[B, Q]` int64: `block * block_size + offset` each token is written to
        - `block_tables` `[B, C / block_size]` int32: the blocks that hold C positions of each row. The null
          block 0 stands for those that hold nothing, or nothing that is still seen
        - `position_offsets` `[B]` int32: the first of the positions, a multiple of the block size; 0
          without a window. Each query's own position and those it sees are among the C from there on

        and the others as `LlamaDecoder.forward` takes them, which says what is returned too.
        """
        block_size = kv_caches[0][0].shape[1]
        live = live_tokens(input_ids, query_lens)
        positions = torch.where(live, positions, 0)
        views = {
            window: _view(window, positions, live, block_size, *group)
            for window, *group in zip(
                self.architecture.kv_windows,
                slot_mappings,
                block_tables,
                position_offsets,
                strict=True,
            )
        }
        by_layer = [views[window] for window in self.architecture.layer_windows]
        return self._compute(input_ids, positions, live, by_layer, kv_caches)


def _view(
    window: int | None,
    positions: Tensor,
    live: Tensor,
    block_size: int,
    slot_mapping: Tensor,
    block_table: Tensor,
    position_offset: Tensor,
) -> KVView:
    offset = position_offset[:, None, None].long()  # [B, 1, 1]
    context = offset + torch.arange(block_table.shape[1] * block_size, device=positions.device)
    # A pad token sees the first position of its row's table alone: an empty softmax would be NaN.
    query = torch.where(live[..., None], positions[..., None], offset)  # [B, Q, 1]
    visible = context <= query  # [B, Q, C]
    if window is not None:
        visible = visible & (query - context < window)
    return KVView(torch.where(live, slot_mapping, 0), block_table, visible)
