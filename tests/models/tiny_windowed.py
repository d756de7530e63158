"""Small random models with sliding windows, as `transformers` makes them and as the reference decoder, and
rows that decode side by side as an engine keeps them: blocks that slid out of a window are gone."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tiny_llama import BLOCK_SIZE
from torch import Tensor
from transformers import (
    MinistralConfig,
    MinistralForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from neffbuild.grid.windows import span_columns
from neffbuild.models.architecture import LlamaArchitecture
from neffbuild.models.decode import WindowedInputs, allocate_kv_caches, block_table_width
from neffbuild.models.windowed import WindowedDecoder
from neffbuild.runtime.block_table import NULL_BLOCK, head_trim, new_trimmed, tail_trim

WINDOW = 20

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "sliding_window": WINDOW,
}
LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]

MODELS = {
    "layers of both kinds": (MinistralForCausalLM, MinistralConfig, {"layer_types": LAYER_TYPES}),
    "sliding windows everywhere": (MistralForCausalLM, MistralConfig, {}),
    "from a layer on, with biases": (
        Qwen2ForCausalLM,
        Qwen2Config,
        {"use_sliding_window": True, "max_window_layers": 1},
    ),
}


def windowed_twins(name: str, **changes: object) -> tuple[Any, WindowedDecoder]:
    """The same random weights in both implementations, float32."""
    model, config, own = MODELS[name]
    torch.manual_seed(0)
    theirs = model(config(architectures=[model.__name__], **SIZES | own | changes)).eval()
    for parameter, values in theirs.named_parameters():
        if parameter.endswith("bias"):  # initialised to zero, which would hide a bias left out
            torch.nn.init.normal_(values, std=0.1)
    architecture = LlamaArchitecture.from_config(theirs.config.to_dict())
    ours = WindowedDecoder(architecture, torch.float32)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


class WindowedRows:
    """Each KV group has blocks of its own, scattered over one pool. Before a step the blocks before a
    window are given up: their columns hold the null block, their contents are another's."""

    def __init__(self, model: WindowedDecoder, rows: int, context_len: int, query_len: int) -> None:
        self.model, self.rows, self.query_len = model, rows, query_len
        self.windows = model.architecture.kv_windows
        self.full_columns = block_table_width(context_len, BLOCK_SIZE)
        blocks = len(self.windows) * rows * self.full_columns
        shuffled = torch.randperm(blocks) + 1
        self.tables = shuffled.view(len(self.windows), rows, -1).to(torch.int32)
        self.kv_caches = allocate_kv_caches(
            model.architecture, torch.float32, blocks + 1, BLOCK_SIZE
        )
        # Rows that are not live have blocks all the same: nothing may reach them.
        self.starts = [0] * rows

    def columns(self, window: int | None) -> int:
        if window is None:
            return self.full_columns
        columns = span_columns(window, self.query_len - 1, BLOCK_SIZE)
        return min(columns, self.full_columns)

    def step(self, tokens: list[list[int]], starts: list[int]) -> tuple[Tensor, ...]:
        """Row r feeds `tokens[r]` at positions from `starts[r]`; shorter rows are padded with values that
        would do damage if they were used."""
        self._give_up(starts)
        ids = torch.full((self.rows, self.query_len), 7, dtype=torch.int32)
        positions = torch.full((self.rows, self.query_len), 3, dtype=torch.int64)
        slots = [torch.full_like(positions, BLOCK_SIZE) for _ in self.windows]
        trimmed = []
        for row, (fed, start) in enumerate(zip(tokens, starts, strict=True)):
            for query, token in enumerate(fed):
                ids[row, query], positions[row, query] = token, start + query
                for group in range(len(self.windows)):
                    slots[group][row, query] = self.slot(group, row, start + query)
        for window, table in zip(self.windows, self.tables, strict=True):
            cut = new_trimmed(self.rows, self.columns(window))
            if window is None:
                head_trim(table, cut)
            else:
                tail_trim(
                    table, cut, np.array(starts), window=window, block_size=BLOCK_SIZE,
                    full_columns=self.full_columns,
                )  # fmt: skip
            trimmed.append(cut)
        lengths = torch.tensor([len(fed) for fed in tokens], dtype=torch.int32)
        inputs = WindowedInputs(
            ids, positions, lengths, tuple(slots), *map(tuple, zip(*trimmed, strict=True))
        )
        with torch.inference_mode():
            return self.model(*inputs, self.kv_caches)

    def slot(self, group: int, row: int, position: int) -> int:
        block = int(self.tables[group, row, position // BLOCK_SIZE])
        assert block != NULL_BLOCK
        return block * BLOCK_SIZE + position % BLOCK_SIZE

    def _give_up(self, starts: list[int]) -> None:
        for group, window in enumerate(self.windows):
            for row, start in enumerate(starts):
                gone = max(start - window + 1, 0) // BLOCK_SIZE if window else 0
                for column in range(gone):
                    if block := int(self.tables[group, row, column]):
                        for cache in self.kv_caches:
                            for tensor in cache:
                                tensor[block] = 1e4
                    self.tables[group, row, column] = NULL_BLOCK
