"""One rank of decode context parallelism over gloo, as the tests start it, and decoding on a single one.

Greedy decoding of the same prompts with the same weights everywhere; a rank keeps keys and values of its own
positions alone. A rank saves, for each interleave, the tokens and the logits they were chosen from.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from runtime_samples import MODEL
from torch import Tensor

from neffbuild.config.build import BuildConfig
from neffbuild.config.model import ModelConfig
from neffbuild.config.serve import AdditionalConfig, NeuronConfig, ServeConfig
from neffbuild.grid.bucketer import Bucketer, QueryLenSupport
from neffbuild.grid.shapes import Family
from neffbuild.models.architecture import LlamaArchitecture
from neffbuild.models.context_parallel import ContextParallelDecoder
from neffbuild.models.decode import allocate_kv_caches
from neffbuild.models.llama import Decoder, LlamaDecoder
from neffbuild.runtime.block_table import head_trim, new_trimmed
from neffbuild.runtime.context_parallel import local_seq_lens, merge_over, placement

BLOCK_SIZE = 128
MAX_MODEL_LEN = 768
INTERLEAVES = (1, 64, BLOCK_SIZE)
PROMPTS = ((250, 130), (250,), (3, 508, 255))
"""Lengths of what decodes side by side; twelve tokens more take each of them across a bucket."""
NEW_TOKENS = 12

Compute = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""(tokens `[B, Q]`, the position of each row's first, context length) → next token ids, logits."""


def bucketer(dcp_size: int) -> Bucketer:
    config = BuildConfig(
        source="test",
        serve=ServeConfig(
            model="target",
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=4,
            block_size=BLOCK_SIZE,
            decode_context_parallel_size=dcp_size,
            additional_config=AdditionalConfig(
                neuron_config=NeuronConfig(decode_context_length_buckets=(256, 512))
            ),
        ),
        model=ModelConfig("target", MODEL),
    )
    return Bucketer.from_config(config, query_len_support=QueryLenSupport.VARLEN)


def filled(model: Decoder) -> Decoder:
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, MODEL["initializer_range"], generator=generator)
        else:
            parameter.fill_(1.0)
    return model


def decoded(lengths: tuple[int, ...], compute: Compute) -> tuple[list[list[int]], Tensor]:
    """Prompts computed row by row, then all of them decoded side by side: tokens, and logits
    `[NEW_TOKENS, rows, vocabulary]`."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(256, (n,), generator=generator).int() for n in lengths]
    shapes, starts = bucketer(1), torch.tensor(lengths) - 1
    widest = max(lengths) - 1
    fed = torch.full((len(lengths), widest), -1, dtype=torch.int32)
    for row, prompt in enumerate(prompts):
        fed[row, : len(prompt) - 1] = prompt[:-1]
    compute(fed, torch.zeros(len(lengths), dtype=torch.int64), MAX_MODEL_LEN)
    last = torch.stack([prompt[-1] for prompt in prompts])[:, None]
    tokens, chosen_from = [], []
    for _ in range(NEW_TOKENS):
        need = int(starts.max()) + 1
        shape = shapes.decode_shape(Family.TARGET, num_seqs=len(lengths), context_need=need)
        last, logits = compute(last, starts, shape.context_len)
        tokens.append(last[:, 0].tolist())
        chosen_from.append(logits[:, 0])
        starts = starts + 1
    return tokens, torch.stack(chosen_from)


def alone(rows: int) -> Compute:
    """All positions in one place."""
    model = filled(LlamaDecoder(LlamaArchitecture.from_config(MODEL), torch.float32))
    table, caches = scattered(model, rows, MAX_MODEL_LEN // BLOCK_SIZE)

    def compute(tokens: Tensor, starts: Tensor, context_len: int) -> tuple[Tensor, Tensor]:
        positions = starts[:, None] + torch.arange(tokens.shape[1])
        blocks = table.long().gather(1, positions // BLOCK_SIZE)
        slots = blocks * BLOCK_SIZE + positions % BLOCK_SIZE
        cut = new_trimmed(rows, context_len // BLOCK_SIZE)
        head_trim(table, cut)
        lengths = (tokens >= 0).sum(1).int()
        return model(tokens, positions, slots, cut.block_table, lengths, caches)

    return compute


def on_a_rank(rows: int, interleave: int, rank: int, dcp_size: int) -> Compute:
    """The positions of a rank, where the interleave places them."""
    architecture = LlamaArchitecture.from_config(MODEL)
    model = filled(ContextParallelDecoder(architecture, torch.float32))
    shapes, merge = bucketer(dcp_size), merge_over(dist.group.WORLD)
    table, caches = scattered(model, rows, MAX_MODEL_LEN // (BLOCK_SIZE * dcp_size))

    def compute(tokens: Tensor, starts: Tensor, context_len: int) -> tuple[Tensor, Tensor]:
        positions = starts[:, None] + torch.arange(tokens.shape[1])
        holder, local = placement(positions, dcp_size, interleave)
        blocks = table.long().gather(1, local // BLOCK_SIZE)
        slots = torch.where(holder == rank, blocks * BLOCK_SIZE + local % BLOCK_SIZE, -1)
        seen = local_seq_lens(positions.flatten() + 1, dcp_size, interleave)[rank]
        shape = shapes.decode_shape(Family.TARGET, num_seqs=rows, context_need=context_len)
        cut = new_trimmed(rows, shapes.block_table_width(shape))
        head_trim(table, cut)
        lengths = (tokens >= 0).sum(1).int()
        return model(
            tokens,
            positions,
            slots,
            cut.block_table,
            lengths,
            seen.view_as(positions),
            caches,
            merge,
        )

    return compute


def scattered(
    model: Decoder, rows: int, columns: int
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    generator = torch.Generator().manual_seed(2)
    table = (torch.randperm(rows * columns, generator=generator) + 1).int().view(rows, columns)
    caches = allocate_kv_caches(model.architecture, torch.float32, rows * columns + 1, BLOCK_SIZE)
    return table, caches


def main(rank: int, ranks: int, rendezvous: str, result: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    with torch.inference_mode():
        torch.save(
            {
                (lengths, interleave): decoded(
                    lengths, on_a_rank(len(lengths), interleave, rank, ranks)
                )
                for lengths in PROMPTS
                for interleave in INTERLEAVES
            },
            result,
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
