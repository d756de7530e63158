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
    cut_head(full.numpy(), trimmed.block_table.numpy())
    trimmed.position_offset.zero_()


def cut_head(full: NDArray[np.integer], table: NDArray[np.int32]) -> None:
    """`head_trim` of arrays. torch would split a table of this size between threads, and wait for them on
    a busy host."""
    num_seqs, columns = table.shape
    _check_fits(full, table, columns)
    rows = len(full)
    table[:rows] = full[:, :columns]
    if rows < num_seqs:
        table[rows:] = NULL_BLOCK


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
    table, offset = (tensor.numpy() for tensor in trimmed)
    cut_tail(
        full.numpy(),
        table,
        offset,
        starts,
        window=window,
        block_size=block_size,
        full_columns=full_columns,
    )


def cut_tail(
    full: NDArray[np.integer],
    table: NDArray[np.int32],
    offset: NDArray[np.int32],
    starts: NDArray[np.int64],
    *,
    window: int,
    block_size: int,
    full_columns: int,
) -> None:
    """`tail_trim` of arrays."""
    _check_fits(full, table, full_columns)
    rows, columns = len(full), table.shape[1]
    seen_from = np.maximum(starts - window + 1, 0)
    first = np.minimum(seen_from // block_size, full_columns - columns)
    taken = first[:, None] + np.arange(columns)
    table[:rows] = np.take_along_axis(full, taken, axis=1)
    table[rows:] = NULL_BLOCK
    offset[:rows] = first * block_size
    offset[rows:] = 0


def _check_fits(full: NDArray[np.integer], table: NDArray[np.int32], columns: int) -> None:
    if full.shape[1] < columns or len(full) > len(table):
        raise ConfigError(
            f"a block table of shape {list(full.shape)} cannot be trimmed to {[len(table), columns]}",
            field="block_table",
            value=list(full.shape),
            hint="hand over the live rows' tables at full width: ceil(max_model_len / block_size)",
        )
