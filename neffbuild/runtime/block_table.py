"""Block tables cut down to what a program's context bucket covers, and of it to what its layers see.

Layers that see the whole context read the first columns; those with a sliding window the last ones, which
differ between rows, so that every cut table says at which position each of its rows begins.

A table handed to a program has exactly the program's width and canonical strides: it is copied, never
sliced. A slice of a one-row table keeps its parent's stride, counts as contiguous all the same, and
is a new layout to whoever compiled for the old one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from neffbuild.config.errors import ConfigError

NULL_BLOCK = 0
"""Holds no position of any row: what pad rows read and write, what an engine puts in the place of blocks
that are not there yet, or are out of every window."""


class TrimmedBlockTable(NamedTuple):
    """`block_table` `[num_seqs, columns]` int32; `position_offset` `[num_seqs]` int32, the position that
    each row's first column starts at: 0 unless the front of a table was cut off."""

    block_table: Tensor
    position_offset: Tensor


def new_trimmed(num_seqs: int, columns: int) -> TrimmedBlockTable:
    """A table of null blocks, to be filled step after step."""
    return TrimmedBlockTable(
        torch.full((num_seqs, columns), NULL_BLOCK, dtype=torch.int32),
        torch.zeros(num_seqs, dtype=torch.int32),
    )


def head_trim(full: Tensor, trimmed: TrimmedBlockTable) -> None:
    """Fill `trimmed` with the first columns of the live rows' tables.

    `full` `[rows, columns]` integer, in host memory, at most as many rows and at least as many columns;
    rows beyond it become null blocks. Positions stay absolute, so offsets are 0. Raises `ConfigError` for
    a table that is too narrow or has too many rows.
    """
    _check_fits(full, trimmed, trimmed.block_table.shape[1])
    # Not by torch: it splits a table of this size between threads, and waits for them on a busy host.
    table, offset = (tensor.numpy() for tensor in trimmed)
    rows, columns = full.shape[0], table.shape[1]
    table[:rows] = full.numpy()[:, :columns]
    table[rows:] = NULL_BLOCK
    offset[:] = 0


def tail_trim(
    full: Tensor,
    trimmed: TrimmedBlockTable,
    starts: NDArray[np.int64],
    *,
    window: int,
    block_size: int,
    full_columns: int,
) -> None:
    """Fill `trimmed` with the columns of the live rows' tables that a sliding window leaves to be seen.

    `starts` `[rows]` are the positions of each row's first query, `full_columns` the columns of the
    program's whole context. Of those, none beyond is read: a row's cut table begins with the block of the
    first position that its first query sees, or earlier. `full` as in `head_trim`, at least
    `full_columns` wide; blocks before the window may be null blocks. Rows beyond it become null blocks at
    offset 0. Raises as `head_trim` does.
    """
    _check_fits(full, trimmed, full_columns)
    table, offset = (tensor.numpy() for tensor in trimmed)
    rows, columns = full.shape[0], table.shape[1]
    seen_from = np.maximum(starts - window + 1, 0)
    first = np.minimum(seen_from // block_size, full_columns - columns)
    taken = first[:, None] + np.arange(columns)
    table[:rows] = np.take_along_axis(full.numpy(), taken, axis=1)
    table[rows:] = NULL_BLOCK
    offset[:rows] = first * block_size
    offset[rows:] = 0


def _check_fits(full: Tensor, trimmed: TrimmedBlockTable, columns: int) -> None:
    if full.shape[1] < columns or full.shape[0] > trimmed.block_table.shape[0]:
        raise ConfigError(
            f"a block table of shape {list(full.shape)} cannot be trimmed to "
            f"{[trimmed.block_table.shape[0], columns]}",
            field="block_table",
            value=list(full.shape),
            hint="hand over the live rows' tables at full width: ceil(max_model_len / block_size)",
        )
