"""What is in a program of a step and what it is given: weights and tables are arguments."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export.graph_signature import InputKind

from neffbuild.config.build import BuildConfig
from neffbuild.config.load import load_config
from neffbuild.config.model import ModelConfig
from neffbuild.grid.shapes import DecodeShape, Family
from neffbuild.models.decode import allocate_kv_caches, build_program, model_dtype, named_tensors

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart-eagle3.yaml"
FAMILIES = (Family.TARGET_WITH_SPEC, Family.TARGET_WITHOUT_SPEC, Family.DRAFT)


def configured(window: int | None) -> BuildConfig:
    config = load_config(CONFIG)
    if window is None:
        return config
    assert config.draft_model is not None
    kinds = ["full_attention", "sliding_attention"] * config.model.num_hidden_layers
    target = {
        **config.model.architecture,
        "sliding_window": window,
        "layer_types": kinds[: config.model.num_hidden_layers],
    }
    draft = {**config.draft_model.architecture, "sliding_window": window}
    return replace(
        config, model=ModelConfig("target", target), draft_model=ModelConfig("draft", draft)
    )


@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_tensor_is_in_a_program(family: Family, window: int | None) -> None:
    """Capturing reads no weight and knows no checkpoint: nothing of one may be in what it makes, as the key
    has none. A tensor that a model keeps without registering it would be."""
    config = configured(window)
    spec = config.serve.num_speculative_tokens
    query_len = 1 if family is Family.TARGET_WITHOUT_SPEC else 1 + spec
    with FakeTensorMode():
        model, inputs = build_program(config, DecodeShape(family, 1, query_len, 128))
        caches = allocate_kv_caches(
            model.architecture, model_dtype(config), 8, config.serve.block_size, torch.empty
        )
    program = torch.export.export(model, (*inputs, caches))
    kinds = {InputKind.USER_INPUT: 0, InputKind.PARAMETER: 0, InputKind.BUFFER: 0}
    for argument in program.graph_signature.input_specs:
        assert argument.kind in kinds, f"{argument.target} is in the program"
        kinds[argument.kind] += 1
    assert program.constants.keys() <= named_tensors(model).keys()
    assert all(kinds.values())
