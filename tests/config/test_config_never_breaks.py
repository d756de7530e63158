"""Whatever is written, a config loads or is refused: never another exception."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from config_workspace import SERVE, Workspace
from hypothesis import given, settings
from hypothesis import strategies as st

from neffbuild.config import vllm_options
from neffbuild.config.errors import ConfigError
from neffbuild.config.load import load_config
from neffbuild.config.serve import NeuronConfig, ServeConfig, SpeculativeConfig
from neffbuild.config.vllm_command import parse_vllm_command

_NAMES = sorted(
    {
        *("serve", "toolchain", "cache", "farm", "neuron_config", "remotes", "versions", "local"),
        *ServeConfig.model_fields,
        *NeuronConfig.model_fields,
        *SpeculativeConfig.model_fields,
        *("hf_overrides", "hf_config_path", "revision", "spec_tokens", "kv_role", "kv_connector"),
    }
)
_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(0, 40).map(lambda n: n * 128),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["model", "draft", "eagle3", "8", "[1, 8]", "{", "auto", "128k", "true", ""]),
    st.text(max_size=8),
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.sampled_from(_NAMES) | st.text(max_size=4), inner, max_size=4),
    ),
    max_leaves=12,
)
_SERVE = st.dictionaries(st.sampled_from(_NAMES), _VALUES, max_size=5)


@settings(max_examples=100)
@given(document=_VALUES | st.fixed_dictionaries({"serve": _SERVE.map(lambda serve: SERVE | serve)}))
def test_any_document(shared_workspace: Workspace, document: Any) -> None:
    file = shared_workspace.root / "any.json"
    file.write_text(json.dumps(document), encoding="utf-8")
    with contextlib.suppress(ConfigError):
        serve = load_config(file).serve
        json.dumps(serve.model_dump(mode="json"), allow_nan=False)


@settings(max_examples=100)
@given(data=st.binary(max_size=40) | st.text(max_size=40).map(str.encode))
def test_any_bytes(shared_workspace: Workspace, data: bytes) -> None:
    file = shared_workspace.root / "any.yaml"
    file.write_bytes(data)
    with contextlib.suppress(ConfigError):
        load_config(file)


_WORDS = st.one_of(
    st.sampled_from(sorted(vllm_options.NAMES)).map(lambda name: f"--{name}"),
    st.sampled_from(sorted(vllm_options.SHORT)),
    st.sampled_from(["-O", "-O3", "--", "-1", "--config", "--a.b", "--a.b+", "--x=", "{", "a,b"]),
    st.text(max_size=6),
)


@settings(max_examples=100)
@given(words=st.lists(_WORDS, max_size=6))
def test_any_words(words: list[str]) -> None:
    with contextlib.suppress(ConfigError):
        assert parse_vllm_command(["vllm", "serve", *words]).options["model"]
