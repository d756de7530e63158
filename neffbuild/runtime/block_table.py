"""Block tables cut down to what a program's context bucket covers.

A table handed to a program has exactly the program's width and canonical strides: it is copied, never
sliced. A slice of a one-row table keeps its parent's stride, counts as contiguous all the same, and
is a new layout to whoever compiled for the old one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from neffbuild.config.errors import ConfigError

NULL_BLOCK = 0


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

    `full` `[rows, columns]` integer, at most as many rows and at least as many columns; rows beyond it
    become null blocks. Positions stay absolute, so offsets are 0. Raises `ConfigError` for a table that
    is too narrow or has too many rows.
    """
    table, offset = trimmed
    rows, columns = full.shape[0], table.shape[1]
    if full.shape[1] < columns or rows > table.shape[0]:
        raise ConfigError(
            f"a block table of shape {list(full.shape)} cannot be trimmed to {list(table.shape)}",
            field="block_table",
            value=list(full.shape),
            hint="hand over the live rows' tables at full width: ceil(max_model_len / block_size)",
        )
    table[:rows].copy_(full[:, :columns])
    table[rows:].fill_(NULL_BLOCK)
    offset.zero_()
