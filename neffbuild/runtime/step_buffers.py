"""The input buffers of a loaded program: what a step is written to, over and over.

What is computed in every step is written through NumPy: its calls on arrays this small cost a fraction of
torch's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from neffbuild.grid.bucketer import Bucketer
from neffbuild.grid.shapes import DecodeShape, Family
from neffbuild.models.decode import (
    DraftInputs,
    Inputs,
    StepInputs,
    draft_inputs,
    step_inputs,
    windowed_draft_inputs,
    windowed_inputs,
)
from neffbuild.runtime.block_table import TrimmedBlockTable, cut_head, cut_tail, new_trimmed


class GroupBuffers:
    """The block table of one KV group and the slots in it; `window` None for layers that see the whole
    context."""

    def __init__(
        self,
        table: TrimmedBlockTable,
        slot_mapping: Tensor,
        *,
        window: int | None,
        block_size: int,
        full_columns: int,
    ) -> None:
        self.table = table
        self.window = window
        self._block_size = block_size
        self.full_columns = full_columns
        self._blocks: NDArray[np.int32] = table.block_table.numpy()
        self._offsets: NDArray[np.int32] = table.position_offset.numpy()
        self._slots: NDArray[np.int64] = slot_mapping.numpy()
        self._rows = np.arange(len(self._blocks))[:, None]

    def fill(
        self,
        full: NDArray[np.integer],
        starts: NDArray[np.int64],
        positions: NDArray[np.int64],
        live: NDArray[np.bool_] | None,
    ) -> None:
        """Cut the live rows' tables and look up the slots of `positions` `[rows, query_len]`, which begin
        at `starts`; tokens that are not `live` (None: all are) look nothing up. Raises as `head_trim`
        does."""
        count, block_size = len(starts), self._block_size
        if self.window is None:
            cut_head(full, self._blocks)
            within = positions
        else:
            cut_tail(
                full,
                self._blocks,
                self._offsets,
                starts,
                window=self.window,
                block_size=block_size,
                full_columns=self.full_columns,
            )
            within = positions - self._offsets[:count, None]
            if live is not None:
                within *= live
        columns = within // block_size
        slots = self._slots[:count]
        # In int64, as positions are: blocks are int32 and slots need not fit.
        slots[:] = self._blocks[self._rows[:count], columns]
        slots -= columns
        slots *= block_size
        slots += within
        if live is not None:
            slots *= live


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """`inputs` are bound to the program; the rest is views of them, and what does not change: `queries`
    counts the tokens of a row. `groups` in the order of the program's tables. Ids are below `vocab_size`;
    what a step adds to a row ends by position `reach`, a draft goes on from there."""

    inputs: Inputs
    groups: tuple[GroupBuffers, ...]
    input_ids: NDArray[np.int32]
    positions: NDArray[np.int64]
    query_lens: NDArray[np.int32]
    queries: NDArray[np.int64]
    vocab_size: np.uint32
    reach: int

    def place(
        self,
        starts: NDArray[np.int64],
        query_lens: NDArray[np.int32] | None,
        block_table: NDArray[np.integer],
        window_block_table: NDArray[np.integer] | None = None,
    ) -> None:
        """Where the tokens of each live row are, from its start on. Rows beyond them are pad rows, and
        queries beyond a row's length (None: every row is as wide as the program) pad tokens: neither
        looks anything up in a block table.

        The tables are the engine's own, of the live rows, at full width; without one of their own, layers
        with a window take `block_table`. Raises as `head_trim` does.
        """
        rows = len(starts)
        positions, live = self.positions[:rows], None
        np.add(starts[:, None], self.queries, out=positions)
        if query_lens is None:
            self.query_lens[:rows] = len(self.queries)
        else:
            self.query_lens[:rows] = query_lens
            live = self.queries < query_lens[:, None]
            positions *= live
        if rows < len(self.query_lens):
            self.query_lens[rows:] = 0
        for group in self.groups:
            full = block_table
            if group.window is not None and window_block_table is not None:
                full = window_block_table
            group.fill(full, starts, positions, live)

    def place_nothing(self) -> None:
        """No row is live: all are pad rows."""
        nothing = np.zeros((0, self.groups[0].full_columns), np.int32)
        self.place(np.zeros(0, np.int64), None, nothing)


def target_buffers(
    bucketer: Bucketer, shape: DecodeShape, tensors: Mapping[str, Tensor]
) -> StepBuffers:
    """The buffers of a target's program; `tensors` are the target's by name."""
    layers = bucketer.target_layers
    if layers.window is None:
        return _one_table(bucketer, shape, step_inputs(shape, bucketer.block_size), tensors)
    windows = (None, layers.window) if layers.full else (layers.window,)
    tables = [_new_table(bucketer, shape, window) for window in windows]
    inputs = windowed_inputs(shape, [table.block_table.shape[1] for table in tables])._replace(
        block_tables=tuple(table.block_table for table in tables),
        position_offsets=tuple(table.position_offset for table in tables),
    )
    groups = zip(windows, tables, inputs.slot_mappings, strict=True)
    of_groups = [_group(bucketer, shape, window, table, slots) for window, table, slots in groups]
    return _buffers(bucketer, shape, inputs, of_groups, tensors)


def draft_buffers(
    bucketer: Bucketer, shape: DecodeShape, tensors: Mapping[str, Tensor]
) -> StepBuffers:
    """The buffers of a draft's program; `tensors` are the draft's by name, `fc.weight` the one that its
    auxiliary states go into."""
    fusion = tensors["fc.weight"]
    size, dtype = fusion.shape[1], fusion.dtype
    window = bucketer.draft_layers.window
    if window is None:
        inputs = draft_inputs(shape, bucketer.block_size, size, dtype)
        return _one_table(bucketer, shape, inputs, tensors)
    table = _new_table(bucketer, shape, window)
    windowed = windowed_draft_inputs(shape, table.block_table.shape[1], size, dtype)._replace(
        block_table=table.block_table, position_offset=table.position_offset
    )
    group = _group(bucketer, shape, window, table, windowed.slot_mapping)
    return _buffers(bucketer, shape, windowed, [group], tensors)


def _vocab_size(tensors: Mapping[str, Tensor]) -> int:
    """How many ids the embedding has rows for; where there is none, as many as 32 bits have."""
    for name, tensor in tensors.items():
        if name.endswith("embed_tokens.weight"):
            return len(tensor)
    return 1 << 31


def _one_table(
    bucketer: Bucketer,
    shape: DecodeShape,
    inputs: StepInputs | DraftInputs,
    tensors: Mapping[str, Tensor],
) -> StepBuffers:
    table = _new_table(bucketer, shape, None)
    inputs = inputs._replace(block_table=table.block_table)
    group = _group(bucketer, shape, None, table, inputs.slot_mapping)
    return _buffers(bucketer, shape, inputs, [group], tensors)


def _new_table(bucketer: Bucketer, shape: DecodeShape, window: int | None) -> TrimmedBlockTable:
    columns = bucketer.block_table_width(shape)
    if window is not None:
        columns = bucketer.window_table_width(shape) or columns
    return new_trimmed(shape.num_seqs, columns)


def _group(
    bucketer: Bucketer,
    shape: DecodeShape,
    window: int | None,
    table: TrimmedBlockTable,
    slot_mapping: Tensor,
) -> GroupBuffers:
    return GroupBuffers(
        table,
        slot_mapping,
        window=window,
        block_size=bucketer.block_size,
        full_columns=bucketer.block_table_width(shape),
    )


def _buffers(
    bucketer: Bucketer,
    shape: DecodeShape,
    inputs: Inputs,
    groups: Sequence[GroupBuffers],
    tensors: Mapping[str, Tensor],
) -> StepBuffers:
    # The first draft comes of what was added, each further one of the one before.
    further = bucketer.num_speculative_tokens - 1 if shape.family is Family.DRAFT else 0
    return StepBuffers(
        inputs=inputs,
        groups=tuple(groups),
        input_ids=inputs.input_ids.numpy(),
        positions=inputs.positions.numpy(),
        query_lens=inputs.query_lens.numpy(),
        queries=np.arange(inputs.input_ids.shape[1]),
        vocab_size=np.uint32(_vocab_size(tensors)),  # of NumPy: compared in every step
        reach=shape.context_len - further,
    )
