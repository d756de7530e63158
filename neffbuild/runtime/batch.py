"""What an engine hands over for a step, and what it gets back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from neffbuild.grid.select import StepShapes
from neffbuild.grid.step import PostTransferPolicy, Row


class DecodeBatch(NamedTuple):
    """The live rows of a decode step, in one order, and what the engine wishes for all of them.

    - `rows`: what selection needs of each; `Rows` where the engine has columns at hand.
    - `token_ids` `[len(rows)]` integer: the token each row computes, at position `num_computed_tokens`.
    - `block_table` `[len(rows), columns]` integer: the engine's own table at full width; the block of
      every position the step writes is in it.
    - `draft_token_ids` `[len(rows), up to K]` integer: the drafts each row brings, the first
      `num_drafts` of its own; needed when some row brings any or gets placeholders.
    - `window_block_table`: the table of layers with a sliding window, of the same shape, where the engine
      keeps their keys and values in blocks of their own; blocks that slid out of the window may be the
      null block. Without it they are under `block_table`.
    """

    rows: Sequence[Row]
    token_ids: Tensor
    block_table: Tensor
    draft_token_ids: Tensor | None = None
    post_transfer_policy: PostTransferPolicy = PostTransferPolicy.WITHOUT_SPEC
    force_without_spec: bool = False
    window_block_table: Tensor | None = None


class DraftBatch(NamedTuple):
    """What the draft learns of a step's rows, in the order of the step.

    - `starts` `[len(rows)]` int64: the position of the first token that the step added to each row.
    - `query_lens` `[len(rows)]` int32: how many it added; 0 for a row that gets no drafts.
    - `token_ids` `[len(rows), most added]` integer: for each such position the token after it.
    - `auxiliary_hidden_states` `[len(rows), at least most added, size]`: as the target returned them.
    - `block_table` `[len(rows), columns]` integer: the engine's own table at full width for the draft's
      layer, which may be the target's; the draft keeps its own KV cache.
    """

    starts: Tensor
    query_lens: Tensor
    token_ids: Tensor
    auxiliary_hidden_states: Tensor
    block_table: Tensor


class StepResult(NamedTuple):
    """`verified`: how many drafts each row had verified. `outputs` by name, live rows only:
    `next_token_ids` `[len(rows), query_len]` int32, `logits` `[len(rows), query_len, vocab_size]`, with
    speculation `auxiliary_hidden_states` `[len(rows), query_len, size]`; of queries beyond a row's
    `1 + verified` nothing is said."""

    shapes: StepShapes
    verified: list[int]
    outputs: dict[str, Tensor]
