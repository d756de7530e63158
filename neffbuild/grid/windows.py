"""Sliding windows: how many block-table columns their layers read, and which.

A layer with a window of W positions lets a query at position p see the positions q with p - q < W. So a
step whose first query of a row is at position s and whose last is at s + e reads s - W + 1 … s + e: W + e
positions, which lie in at most `ceil((W + e - 1) / block_size) + 1` blocks, wherever the first of them is
cut. The table of such layers is cut at both ends; what is left of it starts at a position that differs
between rows.

Source of the window: `transformers` 5, `masking_utils.sliding_window_overlay`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from neffbuild.config.buckets import P_MAX
from neffbuild.config.model import ModelConfig
from neffbuild.grid.shapes import DecodeShape, Family

WindowColumns = Callable[[int, int, int], int]
"""(window, e, block size) → columns, before they are bounded by the table's full width."""


def span_columns(window: int, extra: int, block_size: int) -> int:
    """The blocks that `window + extra` positions lie in at most: what a step reads, and no more."""
    return -(-(window + extra - 1) // block_size) + 1


def tile_columns(window: int, _extra: int, block_size: int) -> int:
    """The width of vLLM Neuron: `window // block_size + 1`, rounded up to whole kernel tiles of 128
    positions."""
    tile = max(P_MAX // block_size, 1)
    return -(-(window // block_size + 1) // tile) * tile


@dataclass(frozen=True, slots=True)
class KVLayers:
    """A model's layers by the KV they read: `full` of them the whole context, `windowed` of them a
    `window` of positions. Where none has a window only their proportion matters, and it is 1 to 0."""

    full: int = 1
    windowed: int = 0
    window: int | None = None

    @classmethod
    def of(cls, model: ModelConfig | None) -> Self:
        """Raises `ConfigError` as `ModelConfig.layer_windows` does."""
        if model is None or model.sliding_window is None:
            return cls()
        windows = model.layer_windows
        windowed = sum(window is not None for window in windows)
        if not windowed:
            return cls()
        return cls(len(windows) - windowed, windowed, model.sliding_window)


WITHOUT_WINDOWS = KVLayers()


def extra_positions(shape: DecodeShape, num_speculative_tokens: int) -> int:
    """e of a step of this shape: how many positions its last query is beyond its first. A draft goes on
    for `num_speculative_tokens - 1` positions after those of the step."""
    drafted = num_speculative_tokens - 1 if shape.family is Family.DRAFT else 0
    return shape.query_len - 1 + drafted
