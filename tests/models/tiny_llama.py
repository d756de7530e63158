"""A small random Llama, as `transformers` makes it and as the reference decoder, and a way to feed it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from neffbuild.models.architecture import LlamaArchitecture
from neffbuild.models.decode import StepInputs, allocate_kv_caches, block_table_width
from neffbuild.models.llama import LlamaDecoder

BLOCK_SIZE = 16

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def tiny_config(**changes: object) -> LlamaConfig:
    """Two layers, grouped queries, Llama-3 rotary scaling that matters within a hundred positions."""
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        # Small initialisers make greedy decoding run in a loop of two tokens.
        "initializer_range": 0.15,
        "rope_parameters": LLAMA3_ROPE,
    }
    return LlamaConfig(**(fields | changes))


def twins(config: LlamaConfig, seed: int = 0) -> tuple[LlamaForCausalLM, LlamaDecoder]:
    """The same random weights in both implementations, float32."""
    torch.manual_seed(seed)
    theirs = LlamaForCausalLM(config).eval()
    for name, parameter in theirs.named_parameters():
        if name.endswith("bias"):  # initialised to zero, which would hide a bias left out
            torch.nn.init.normal_(parameter, std=0.1)
    ours = LlamaDecoder(LlamaArchitecture.from_config(config.to_dict()), torch.float32)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


@dataclass
class Batch:
    """Rows that decode side by side over one KV pool; each row owns blocks scattered over it."""

    model: LlamaDecoder
    rows: int
    context_len: int
    num_blocks: int = 0

    def __post_init__(self) -> None:
        width = block_table_width(self.context_len, BLOCK_SIZE)
        self.num_blocks = self.num_blocks or self.rows * width + 1
        shuffled = torch.randperm(self.num_blocks - 1)[: self.rows * width] + 1
        self.block_table = shuffled.view(self.rows, width).to(torch.int32)
        self.kv_caches = allocate_kv_caches(
            self.model.architecture, torch.float32, self.num_blocks, BLOCK_SIZE
        )

    def inputs(self, tokens: list[list[int]], starts: list[int], query_len: int) -> StepInputs:
        """Row r feeds `tokens[r]` at positions from `starts[r]`; shorter rows are padded with values
        that would do damage if they were used."""
        ids = torch.full((self.rows, query_len), 7, dtype=torch.int32)
        positions = torch.full((self.rows, query_len), 3, dtype=torch.int64)
        slots = torch.full((self.rows, query_len), BLOCK_SIZE, dtype=torch.int64)
        for row, (fed, start) in enumerate(zip(tokens, starts, strict=True)):
            for query, token in enumerate(fed):
                position = start + query
                ids[row, query] = token
                positions[row, query] = position
                slots[row, query] = self.slot(row, position)
        lengths = torch.tensor([len(fed) for fed in tokens], dtype=torch.int32)
        return StepInputs(ids, positions, slots, self.block_table, lengths)

    def slot(self, row: int, position: int) -> int:
        block = int(self.block_table[row, position // BLOCK_SIZE])
        return block * BLOCK_SIZE + position % BLOCK_SIZE

    def step(self, tokens: list[list[int]], starts: list[int], query_len: int):
        with torch.inference_mode():
            return self.model(*self.inputs(tokens, starts, query_len), self.kv_caches)

    def keys_of(self, row: int, positions: int) -> torch.Tensor:
        """Layer 0 keys of a row's first positions `[positions, kv heads, head_dim]`."""
        keys = self.kv_caches[0][0].flatten(0, 1)
        return torch.stack([keys[self.slot(row, position)] for position in range(positions)])
