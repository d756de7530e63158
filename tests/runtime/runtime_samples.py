"""What the runtime's tests share: a small served model, and requests that decode over its KV pool."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from neffbuild.cache.directory import DirectoryStore
from neffbuild.config.build import BuildConfig
from neffbuild.config.load import load_config
from neffbuild.grid.bucketer import Bucketer, QueryLenSupport
from neffbuild.grid.shapes import DecodeShape, Family
from neffbuild.grid.step import Row
from neffbuild.models.decode import (
    StepInputs,
    allocate_kv_caches,
    build_decoder,
    named_kv_caches,
    named_tensors,
)
from neffbuild.runtime.batch import DecodeBatch
from neffbuild.runtime.dispatcher import Dispatcher
from neffbuild.runtime.loader import Loader

MAX_MODEL_LEN = 512
BLOCK_SIZE = 16
CONTEXT_BUCKETS = [128, 256]
NUM_SEQS_BUCKETS = [1, 4]

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_MODEL_LEN,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    # Small initialisers make greedy decoding run in a loop of two tokens.
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}

SERVE = {
    "model": "model",
    "dtype": "float32",
    "max_model_len": MAX_MODEL_LEN,
    "max_num_seqs": NUM_SEQS_BUCKETS[-1],
    "block_size": BLOCK_SIZE,
    "additional_config": {
        "neuron_config": {
            "num_seqs_buckets": NUM_SEQS_BUCKETS,
            "decode_context_length_buckets": CONTEXT_BUCKETS,
        }
    },
}


@dataclass(frozen=True)
class Served:
    """A config and the store that holds every unit of it."""

    path: Path
    config: BuildConfig
    store: DirectoryStore

    @property
    def bucketer(self) -> Bucketer:
        return Bucketer.from_config(self.config, query_len_support=QueryLenSupport.VARLEN)

    def loader(self) -> Loader:
        return Loader.from_config(self.config, self.store)


def write_config(folder: Path, **serve: Any) -> Path:
    """A serve config beside its model's `config.json`, its cache beside both."""
    (folder / "model").mkdir(parents=True)
    (folder / "model/config.json").write_text(json.dumps(MODEL))
    path = folder / "serve.yaml"
    document = {"serve": SERVE | serve, "cache": {"local": str(folder / "cache")}}
    path.write_text(yaml.safe_dump(document))
    return path


def served(path: Path) -> Served:
    config = load_config(path)
    assert config.cache.local is not None
    return Served(path, config, DirectoryStore(Path(config.cache.local)))


def neffbuild(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command, in a process of its own."""
    program = "import sys; from neffbuild.cli.main import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", program, *words],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | environment,
    )


def shape(num_seqs: int, context_len: int) -> DecodeShape:
    return DecodeShape(Family.TARGET, num_seqs, 1, context_len)


class Requests:
    """Requests that decode side by side: one model, one KV pool with scattered blocks, random content.

    Row r's next token `tokens[r]` is computed over `lengths[r]` positions.
    """

    def __init__(self, config: BuildConfig, lengths: Sequence[int], seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.model = build_decoder(config, Family.TARGET)
        for parameter in self.model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, MODEL["initializer_range"], generator=generator)
            else:
                parameter.fill_(1.0)
        columns = MAX_MODEL_LEN // BLOCK_SIZE
        blocks = torch.randperm(NUM_SEQS_BUCKETS[-1] * columns, generator=generator) + 1
        self.block_table = blocks.to(torch.int32).view(-1, columns)
        self.kv_caches = allocate_kv_caches(
            self.model.architecture, torch.float32, blocks.numel() + 1, BLOCK_SIZE
        )
        for tensor in named_kv_caches(self.kv_caches).values():
            tensor.normal_(generator=generator)
        self.lengths = list(lengths)
        self.tokens = [7 + row for row in range(len(lengths))]

    @property
    def tensors(self) -> dict[str, Tensor]:
        return named_tensors(self.model) | named_kv_caches(self.kv_caches)

    def dispatcher(self, served: Served) -> Dispatcher:
        return Dispatcher(served.bucketer, served.loader(), self.tensors)

    def batch(self) -> DecodeBatch:
        rows = len(self.lengths)
        return DecodeBatch(
            [Row(length) for length in self.lengths],
            torch.tensor(self.tokens),
            self.block_table[:rows],
        )

    def slots(self, row: int, positions: Tensor) -> Tensor:
        blocks = self.block_table[row, positions // BLOCK_SIZE].long()
        return blocks * BLOCK_SIZE + positions % BLOCK_SIZE

    def step_inputs(self, context_len: int) -> StepInputs:
        """The step as the reference decoder takes it, over `context_len` positions."""
        rows = len(self.lengths)
        positions = torch.tensor(self.lengths).unsqueeze(1)
        return StepInputs(
            torch.tensor(self.tokens, dtype=torch.int32).unsqueeze(1),
            positions,
            torch.stack([self.slots(row, positions[row]) for row in range(rows)]),
            self.block_table[:rows, : context_len // BLOCK_SIZE].clone(
                memory_format=torch.contiguous_format
            ),
            torch.ones(rows, dtype=torch.int32),
        )

    def copied_caches(self) -> list[tuple[Tensor, Tensor]]:
        return [(keys.clone(), values.clone()) for keys, values in self.kv_caches]

    def reference_logits(self) -> Tensor:
        """What the eager decoder computes over every position; the pool is left alone."""
        with torch.inference_mode():
            _, logits = self.model(*self.step_inputs(MAX_MODEL_LEN), self.copied_caches())
        return logits

    def prefill(self, row: int, prompt: Sequence[int]) -> None:
        """Compute all of a prompt but its last token, which is then the row's next one."""
        count = len(prompt) - 1
        positions = torch.arange(count)
        with torch.inference_mode():
            self.model(
                torch.tensor([prompt[:-1]], dtype=torch.int32),
                positions.unsqueeze(0),
                self.slots(row, positions).unsqueeze(0),
                self.block_table[row : row + 1],
                torch.tensor([count], dtype=torch.int32),
                self.kv_caches,
            )
        self.lengths[row] = count
        self.tokens[row] = prompt[-1]
