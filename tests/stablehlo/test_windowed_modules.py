"""Models with sliding windows as StableHLO: several block tables are arguments like any other."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch_mlir", reason="needs torch-mlir: make test-stablehlo")
pytest.importorskip("jaxlib", reason="needs jaxlib: make test-stablehlo")

import numpy as np
import torch
from step_samples import grid, quickstart, unit
from xla_cpu import XlaProgram

from neffbuild.config.model import ModelConfig
from neffbuild.grid.bucketer import Bucketer, QueryLenSupport
from neffbuild.grid.kv_blocks import num_kv_blocks
from neffbuild.grid.shapes import Family
from neffbuild.models.decode import (
    allocate_kv_caches,
    build_program,
    model_dtype,
    named_inputs,
    named_kv_caches,
    named_tensors,
)
from neffbuild.runtime.step_buffers import draft_buffers, target_buffers
from neffbuild.toolchain.neuronx.stablehlo import capture

WINDOW = 33


def windowed():
    config = quickstart()
    layers = config.model.num_hidden_layers
    kinds = ["full_attention", "sliding_attention"] * layers
    target = config.model.architecture | {"sliding_window": WINDOW, "layer_types": kinds[:layers]}
    draft = config.draft_model.architecture | {"sliding_window": WINDOW}
    return replace(
        config, model=ModelConfig("target", target), draft_model=ModelConfig("draft", draft)
    )


@pytest.mark.parametrize("family", [Family.TARGET_WITH_SPEC, Family.DRAFT])
def test_xla_computes_what_the_reference_model_does(family):
    config = windowed()
    bucketer = Bucketer.from_config(config, query_len_support=QueryLenSupport.VARLEN)
    shape = max(
        (one for one in grid(config).values() if one.family is family),
        key=lambda one: (one.num_seqs, -one.context_len),
    )
    assert bucketer.window_table_width(shape) < bucketer.block_table_width(shape)
    graph = capture(unit(config, shape)).graph
    model, _ = build_program(config, shape)
    random = torch.Generator().manual_seed(11)
    for parameter in model.parameters():
        parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.08, generator=random)
    caches = allocate_kv_caches(
        model.architecture, model_dtype(config), num_kv_blocks(config.serve), bucketer.block_size
    )
    pool, weights = named_kv_caches(caches), named_tensors(model)
    for tensor in pool.values():
        tensor.normal_(generator=random)
    if family is Family.DRAFT:
        buffers = draft_buffers(bucketer, shape, weights)
        buffers.inputs.auxiliary_hidden_states.normal_(generator=random)
    else:
        buffers = target_buffers(bucketer, shape, weights)
    rows, columns = shape.num_seqs, -(-bucketer.max_model_len // bucketer.block_size)
    blocks = torch.randperm(rows * columns, generator=random).view(rows, columns).int() + 1
    # A row in the middle of the context, the last a token short; positions the draft goes on to fit.
    starts = np.array([shape.context_len - 16 - 37 * row for row in range(rows)])
    lengths = np.array([shape.query_len] * (rows - 1) + [shape.query_len - 1], dtype=np.int32)
    buffers.place(starts, lengths, blocks.numpy())
    buffers.inputs.input_ids.random_(model.architecture.vocab_size, generator=random)

    given = named_inputs(buffers.inputs) | {n: t.clone() for n, t in pool.items()} | weights
    results, taken = XlaProgram(graph.module).run([given[name] for name in graph.inputs])
    assert [graph.inputs[position] for position in taken] == list(pool)
    with torch.inference_mode():
        returned = model(*buffers.inputs, caches)
    expected = dict(zip(model.output_names, returned, strict=True)) | pool
    found = dict(zip(graph.outputs, results, strict=True))
    tokens = model.output_names[0]
    assert torch.equal(found.pop(tokens), expected.pop(tokens))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
