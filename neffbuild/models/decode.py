"""What a decode step is called with: one description that capture and runtime share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from neffbuild.cache.serve_options import auxiliary_layers
from neffbuild.config.build import BuildConfig
from neffbuild.config.errors import ConfigError
from neffbuild.grid.shapes import DecodeShape, Family
from neffbuild.grid.windows import WindowColumns, extra_positions, span_columns
from neffbuild.models.architecture import SUPPORTED_DTYPES, LlamaArchitecture
from neffbuild.models.eagle3 import Eagle3Draft, WindowedEagle3Draft
from neffbuild.models.eagle3_architecture import Eagle3Architecture
from neffbuild.models.layers import KVCache
from neffbuild.models.llama import LlamaDecoder
from neffbuild.models.windowed import WindowedDecoder


class StepInputs(NamedTuple):
    """A step's small inputs, in the order `LlamaDecoder.forward` takes them; shapes and dtypes there."""

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    block_table: Tensor
    query_lens: Tensor


class DraftInputs(NamedTuple):
    """The same of a draft, in the order `Eagle3Draft.forward` takes them."""

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    block_table: Tensor
    query_lens: Tensor
    auxiliary_hidden_states: Tensor


class WindowedInputs(NamedTuple):
    """The same of a model with sliding windows, in the order `WindowedDecoder.forward` takes them."""

    input_ids: Tensor
    positions: Tensor
    query_lens: Tensor
    slot_mappings: tuple[Tensor, ...]
    block_tables: tuple[Tensor, ...]
    position_offsets: tuple[Tensor, ...]


class WindowedDraftInputs(NamedTuple):
    """The same of a draft with a sliding window, in the order `WindowedEagle3Draft.forward` takes them."""

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    block_table: Tensor
    position_offset: Tensor
    query_lens: Tensor
    auxiliary_hidden_states: Tensor


Inputs = StepInputs | WindowedInputs | DraftInputs | WindowedDraftInputs


def step_inputs(shape: DecodeShape, block_size: int) -> StepInputs:
    """Inputs of a program that holds pad rows only (all zero): buffers to fill, or an example."""
    tokens = (shape.num_seqs, shape.query_len)
    return StepInputs(
        input_ids=torch.zeros(tokens, dtype=torch.int32),
        positions=torch.zeros(tokens, dtype=torch.int64),
        slot_mapping=torch.zeros(tokens, dtype=torch.int64),
        block_table=torch.zeros(
            shape.num_seqs, block_table_width(shape.context_len, block_size), dtype=torch.int32
        ),
        query_lens=torch.zeros(shape.num_seqs, dtype=torch.int32),
    )


def draft_inputs(
    shape: DecodeShape, block_size: int, auxiliary_size: int, dtype: torch.dtype
) -> DraftInputs:
    """The same for a draft's program; `auxiliary_size` and `dtype` are those of its auxiliary states."""
    states = torch.zeros(shape.num_seqs, shape.query_len, auxiliary_size, dtype=dtype)
    return DraftInputs(*step_inputs(shape, block_size), states)


def windowed_inputs(shape: DecodeShape, columns: Sequence[int]) -> WindowedInputs:
    """The same for a program of a model with sliding windows; `columns` of each KV group's table."""
    tokens, rows = (shape.num_seqs, shape.query_len), shape.num_seqs
    return WindowedInputs(
        input_ids=torch.zeros(tokens, dtype=torch.int32),
        positions=torch.zeros(tokens, dtype=torch.int64),
        query_lens=torch.zeros(rows, dtype=torch.int32),
        slot_mappings=tuple(torch.zeros(tokens, dtype=torch.int64) for _ in columns),
        block_tables=tuple(torch.zeros(rows, width, dtype=torch.int32) for width in columns),
        position_offsets=tuple(torch.zeros(rows, dtype=torch.int32) for _ in columns),
    )


def windowed_draft_inputs(
    shape: DecodeShape, columns: int, auxiliary_size: int, dtype: torch.dtype
) -> WindowedDraftInputs:
    """The same for the program of a draft with a sliding window."""
    tokens, rows = (shape.num_seqs, shape.query_len), shape.num_seqs
    return WindowedDraftInputs(
        input_ids=torch.zeros(tokens, dtype=torch.int32),
        positions=torch.zeros(tokens, dtype=torch.int64),
        slot_mapping=torch.zeros(tokens, dtype=torch.int64),
        block_table=torch.zeros(rows, columns, dtype=torch.int32),
        position_offset=torch.zeros(rows, dtype=torch.int32),
        query_lens=torch.zeros(rows, dtype=torch.int32),
        auxiliary_hidden_states=torch.zeros(*tokens, auxiliary_size, dtype=dtype),
    )


def named_inputs(inputs: Inputs) -> dict[str, Tensor]:
    """Inputs by the names a captured program knows them under: one of several tables is
    `block_tables.<group>`."""
    return {
        name if index is None else f"{name}.{index}": tensor
        for name, value in inputs._asdict().items()
        for index, tensor in (enumerate(value) if isinstance(value, tuple) else [(None, value)])
    }


def block_table_width(context_len: int, block_size: int) -> int:
    """Columns of the head-trimmed block table: blocks that hold `context_len` positions."""
    return -(-context_len // block_size)


def allocate_kv_caches(
    architecture: LlamaArchitecture,
    dtype: torch.dtype,
    num_blocks: int,
    block_size: int,
    allocate: Callable[..., Tensor] = torch.zeros,
) -> list[KVCache]:
    """KV pool, per layer `(keys, values)`; block 0 is the null block.

    A pool that is read must not hold NaN where nothing was written yet, so it is zeroed;
    `allocate=torch.empty` is for tracing alone and touches no memory.
    """
    size = (num_blocks, block_size, architecture.num_key_value_heads, architecture.head_dim)
    return [
        (allocate(size, dtype=dtype), allocate(size, dtype=dtype))
        for _ in range(architecture.num_hidden_layers)
    ]


def named_kv_caches(kv_caches: Sequence[KVCache]) -> dict[str, Tensor]:
    """The pool by the names a captured program knows it under: `kv_caches.<layer>.<0 keys, 1 values>`."""
    return {
        f"kv_caches.{layer}.{index}": tensor
        for layer, cache in enumerate(kv_caches)
        for index, tensor in enumerate(cache)
    }


def mark_num_blocks_symbolic(kv_caches: Sequence[KVCache]) -> None:
    """Tell Dynamo that the number of blocks may vary, so that one program serves every pool size.

    Needed wherever a step is traced, so that the graphs are the same; imports `torch._dynamo`.
    """
    from torch._dynamo import mark_dynamic

    for cache in kv_caches:
        for tensor in cache:
            mark_dynamic(tensor, 0)


def model_dtype(config: BuildConfig) -> torch.dtype:
    """Dtype of the config's model. Raises `ConfigError` for one the decoder does not compute in."""
    if config.serve.dtype not in SUPPORTED_DTYPES:
        raise ConfigError(
            f"the reference model computes in {' or '.join(SUPPORTED_DTYPES)}, not "
            f"{config.serve.dtype!r}",
            field="serve.dtype",
            value=config.serve.dtype,
            hint=f"set serve.dtype to one of {', '.join(SUPPORTED_DTYPES)}",
        )
    dtype: torch.dtype = getattr(torch, config.serve.dtype)
    return dtype


def build_decoder(config: BuildConfig, family: Family) -> LlamaDecoder | WindowedDecoder:
    """The model whose step a family's programs run, parameters uninitialised.

    The two families that run beside an EAGLE3 draft return auxiliary hidden states; `target` does not.
    Raises `ConfigError` for a model the decoder does not compute.
    """
    architecture = LlamaArchitecture.from_config(config.model.architecture)
    return (WindowedDecoder if architecture.has_windows else LlamaDecoder)(
        architecture,
        model_dtype(config),
        auxiliary_layers(config) or () if family is not Family.TARGET else (),
    )


def build_draft(config: BuildConfig) -> Eagle3Draft | WindowedEagle3Draft:
    """The config's EAGLE3 draft, parameters uninitialised.

    Raises `ConfigError` for a draft the reference does not compute, or that does not fit the target.
    """
    assert config.draft_model is not None
    eagle3 = Eagle3Architecture.from_configs(
        config.draft_model.architecture,
        LlamaArchitecture.from_config(config.model.architecture),
        auxiliary_layers(config) or (),
    )
    return (WindowedEagle3Draft if eagle3.layer.has_windows else Eagle3Draft)(
        eagle3, model_dtype(config), config.serve.num_speculative_tokens
    )


def build_program(
    config: BuildConfig, shape: DecodeShape, window_columns: WindowColumns = span_columns
) -> tuple[LlamaDecoder | WindowedDecoder | Eagle3Draft | WindowedEagle3Draft, Inputs]:
    """The model whose step a shape's program runs, and inputs of that shape. Raises as
    `build_decoder` and `build_draft` do."""
    block_size, spec_tokens = config.serve.block_size, config.serve.num_speculative_tokens

    def columns(architecture: LlamaArchitecture) -> list[int]:
        full, extra = (
            block_table_width(shape.context_len, block_size),
            extra_positions(shape, spec_tokens),
        )
        return [
            full if window is None else min(window_columns(window, extra, block_size), full)
            for window in architecture.kv_windows
        ]

    if shape.family is not Family.DRAFT:
        decoder = build_decoder(config, shape.family)
        if isinstance(decoder, WindowedDecoder):
            return decoder, windowed_inputs(shape, columns(decoder.architecture))
        return decoder, step_inputs(shape, block_size)
    draft, dtype = build_draft(config), model_dtype(config)
    auxiliary_size = draft.eagle3.auxiliary_size
    if isinstance(draft, WindowedEagle3Draft):
        [own] = columns(draft.architecture)
        return draft, windowed_draft_inputs(shape, own, auxiliary_size, dtype)
    return draft, draft_inputs(shape, block_size, auxiliary_size, dtype)


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer by its dotted name, shared ones under each of their names."""
    return dict(model.named_parameters(remove_duplicate=False)) | dict(
        model.named_buffers(remove_duplicate=False)
    )
