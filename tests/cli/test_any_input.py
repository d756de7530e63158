"""No config, however wrong, is a bug: it is planned, or refused in words."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cli_samples import DRAFT, EAGLE3, INDUCTOR, MODEL, SERVE, Project
from hypothesis import given, settings
from hypothesis import strategies as st

from neffbuild.config.build import CacheConfig, ToolchainConfig
from neffbuild.config.serve import NeuronConfig, ServeConfig, SpeculativeConfig

TEXTS = [
    "",
    "8",
    "128k",
    "true",
    "auto",
    "{",
    "[1, 2]",
    '{"a": 1}',
    "draft",
    "fp8",
    "inf",
    "\0",
    "ü",
]
NAMES = [
    "neuron_config",
    "kv_role",
    "a-b",
    *NeuronConfig.model_fields,
    *SpeculativeConfig.model_fields,
]
SERVE_OPTIONS = [*ServeConfig.model_fields, "hf_overrides", "revision", "spec_tokens", "unknown"]
MODEL_KEYS = [
    *MODEL,
    "text_config",
    "rope_parameters",
    "sliding_window",
    "kv_lora_rank",
    "eagle_config",
    "eagle_aux_hidden_state_layer_ids",
    "quantization_config",
    "transformer_layer_config",
]

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 9000)
    | st.floats(allow_nan=False, allow_infinity=False, width=16)
    | st.sampled_from(TEXTS)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3)
    ),
    max_leaves=5,
)


def some_of(names: list[str], most: int) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(names), values, max_size=most)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """One folder for all examples."""
    return Project(tmp_path_factory.mktemp("any"))


@settings(max_examples=150, deadline=None)
@given(
    serve=some_of(SERVE_OPTIONS, 3),
    speculation=st.booleans(),
    toolchain=some_of([*ToolchainConfig.model_fields], 1),
    cache=some_of([name for name in CacheConfig.model_fields if name != "remotes"], 1),
    model=some_of(MODEL_KEYS, 2),
    draft=some_of(MODEL_KEYS, 2),
    command=st.sampled_from(["plan", "compile", "verify", "report", "explain", "replay"]),
)
def test_every_config_ends_in_a_documented_status(
    project: Project,
    serve: dict[str, Any],
    speculation: bool,
    toolchain: dict[str, Any],
    cache: dict[str, Any],
    model: dict[str, Any],
    draft: dict[str, Any],
    command: str,
) -> None:
    # A torch that is nowhere: nothing is compiled, whatever comes out.
    pins = {**INDUCTOR, "versions": {"torch": "0.1", "g++": "0.1"}}
    base = {**SERVE, "speculative_config": EAGLE3} if speculation else SERVE
    for name, document in (
        ("model/config.json", {**MODEL, **model}),
        ("draft/config.json", {**DRAFT, "architectures": ["LlamaForCausalLMEagle3"], **draft}),
        (
            "config.json",
            {"serve": {**base, **serve}, "toolchain": {**pins, **toolchain}, "cache": cache},
        ),
    ):
        (project.root / name).write_text(json.dumps(document), encoding="utf-8")
    words = {"explain": ["decode_b1_ctx1024"], "replay": ["--steps", "4"]}.get(command, [])
    ran = project.call(command, "config.json", *words, "--json")
    assert ran.status in (0, 1, 2, 3, 4)
    assert ran.document
