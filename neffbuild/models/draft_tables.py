"""The block table of a draft while it goes on by itself: which positions each of its queries sees, and where
the keys and values of the next one go.

Shapes as in `layers.py`.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Table(Protocol):
    """The one block table of a draft, in a step."""

    block_table: Tensor

    def visible(self, positions: Tensor, live: Tensor) -> Tensor:
        """What queries at `positions` `[B, Q]` see: `[B, Q, C]`."""
        ...

    def slots(self, positions: Tensor, live: Tensor) -> Tensor:
        """The slots of positions `[B, 1]`: the null slot where they are not `live`."""
        ...


class FullTable:
    """It holds every position."""

    def __init__(self, block_table: Tensor, block_size: int) -> None:
        self.block_table = block_table
        self.block_size = block_size
        self.context = torch.arange(block_table.shape[1] * block_size, device=block_table.device)

    def visible(self, positions: Tensor, live: Tensor) -> Tensor:
        return self.context <= positions[..., None]

    def slots(self, positions: Tensor, live: Tensor) -> Tensor:
        blocks = self.block_table.gather(1, positions // self.block_size)
        return torch.where(
            live, torch.add(positions % self.block_size, blocks, alpha=self.block_size), 0
        )


class WindowTable:
    """It holds the positions that a window leaves to be seen, in each row from its `offset` `[B]` on."""

    def __init__(
        self, block_table: Tensor, block_size: int, offset: Tensor, window: int | None
    ) -> None:
        assert window is not None
        self.block_table = block_table
        self.block_size = block_size
        self.window = window
        self.offset = offset[:, None].long()
        context = torch.arange(block_table.shape[1] * block_size, device=block_table.device)
        self.context = (self.offset + context)[:, None]  # [B, 1, C]

    def visible(self, positions: Tensor, live: Tensor) -> Tensor:
        query = torch.where(live, positions, self.offset)[..., None]
        return (self.context <= query) & (query - self.context < self.window)

    def slots(self, positions: Tensor, live: Tensor) -> Tensor:
        within = torch.where(live, positions - self.offset, 0)
        blocks = self.block_table.gather(1, within // self.block_size)
        return torch.where(
            live, torch.add(within % self.block_size, blocks, alpha=self.block_size), 0
        )
