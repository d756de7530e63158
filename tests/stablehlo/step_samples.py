"""The three-family grid of the EAGLE3 quickstart, and steps to run its programs with."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from neffbuild.config.build import BuildConfig
from neffbuild.config.load import load_config
from neffbuild.grid.bucketer import Bucketer, QueryLenSupport
from neffbuild.grid.expand import WarmUp, expand
from neffbuild.grid.kv_blocks import num_kv_blocks
from neffbuild.grid.shapes import DecodeShape, Family
from neffbuild.models.decode import (
    allocate_kv_caches,
    build_program,
    model_dtype,
    named_kv_caches,
    named_tensors,
)
from neffbuild.models.eagle3 import Eagle3Draft
from neffbuild.models.llama import KVCache, LlamaDecoder
from neffbuild.toolchain.base import Unit

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart-eagle3.yaml"


def quickstart(**serve: object) -> BuildConfig:
    """The config, with options of the serve config changed."""
    config = load_config(QUICKSTART)
    changed = config.serve.model_copy(update=serve)
    return BuildConfig(
        source="test",
        serve=changed,
        model=config.model,
        draft_model=config.draft_model,
        toolchain=config.toolchain,
    )


def grid(config: BuildConfig) -> dict[str, DecodeShape]:
    """Its decode shapes by name."""
    bucketer = Bucketer.from_config(config, query_len_support=QueryLenSupport.VARLEN)
    shapes = [gridded.shape for gridded in expand(bucketer, WarmUp.FULL_PRODUCT).shapes]
    return {shape.bucket_name: shape for shape in shapes if isinstance(shape, DecodeShape)}


def unit(config: BuildConfig, shape: DecodeShape) -> Unit:
    return Unit(config=config, shape=shape, recipe={}, key="0" * 64)


class Reference:
    """A shape's model with random weights, a KV pool that remembers a random past, and its steps."""

    def __init__(self, config: BuildConfig, shape: DecodeShape) -> None:
        self.config, self.shape = config, shape
        self.random = torch.Generator().manual_seed(11)
        self.model: LlamaDecoder | Eagle3Draft = build_program(config, shape)[0]
        for parameter in self.model.parameters():
            # Norms around 1; the rest large enough that tokens depend on what is attended to.
            around = 1.0 if parameter.dim() == 1 else 0.0
            parameter.normal_(around, 0.08, generator=self.random)
        if isinstance(self.model, Eagle3Draft) and self.model.eagle3.maps_vocabulary:
            self.model.d2t.copy_(torch.arange(len(self.model.d2t)) * 3)
        self.kv_caches: list[KVCache] = allocate_kv_caches(
            self.model.architecture,
            model_dtype(config),
            num_kv_blocks(config.serve),
            config.serve.block_size,
        )
        for tensor in self.pool.values():
            tensor.normal_(generator=self.random)
        width = shape.context_len // config.serve.block_size
        blocks = torch.randperm(num_kv_blocks(config.serve) - 1, generator=self.random) + 1
        self.block_table = blocks[: shape.num_seqs * width].view(shape.num_seqs, width).int()

    @property
    def pool(self) -> dict[str, Tensor]:
        return named_kv_caches(self.kv_caches)

    @property
    def weights(self) -> dict[str, Tensor]:
        return named_tensors(self.model)

    def steps(self) -> list[dict[str, Tensor]]:
        """Inputs of two steps: every row full, early in the context; then row 0 up to its end, the last
        row one token short, which with one query leaves a pad row."""
        queries, rows = self.shape.query_len, self.shape.num_seqs
        drafts = self.config.serve.num_speculative_tokens
        further = drafts - 1 if self.shape.family is Family.DRAFT else 0
        early = [40 + 23 * row for row in range(rows)]
        late = [self.shape.context_len - queries - further - 5 * row for row in range(rows)]
        short = [queries] * (rows - 1) + [queries - 1 if rows > 1 else queries]
        return [self._step(early, [queries] * rows), self._step(late, short)]

    def run(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """What the model returns, by name; it writes to the pool."""
        with torch.inference_mode():
            returned = self.model(*inputs.values(), self.kv_caches)
        return dict(zip(self.model.output_names, returned, strict=True))

    def _step(self, starts: list[int], lengths: list[int]) -> dict[str, Tensor]:
        block_size = self.config.serve.block_size
        queries = self.shape.query_len
        vocabulary = self.model.architecture.vocab_size
        positions = torch.tensor(starts)[:, None] + torch.arange(queries)
        # Pad tokens bear positions and slots like any other: the program has to disregard them.
        blocks = self.block_table.long().gather(1, positions // block_size)
        inputs = {
            "input_ids": torch.randint(
                vocabulary, positions.shape, generator=self.random, dtype=torch.int32
            ),
            "positions": positions,
            "slot_mapping": blocks * block_size + positions % block_size,
            "block_table": self.block_table,
            "query_lens": torch.tensor(lengths, dtype=torch.int32),
        }
        if isinstance(self.model, Eagle3Draft):
            size = (*positions.shape, self.model.eagle3.auxiliary_size)
            states = torch.randn(size, generator=self.random)
            inputs["auxiliary_hidden_states"] = states.to(model_dtype(self.config))
        return inputs
