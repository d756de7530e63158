"""What vLLM Neuron settles and refuses when it starts: with field, value and what is allowed."""

from __future__ import annotations

from typing import Any

import pytest
from config_workspace import EAGLE3, MODEL, Workspace, neuron
from hypothesis import given
from hypothesis import strategies as st

from neffbuild.config.buckets import KV_SEGMENT_SIZES
from neffbuild.config.build import BuildConfig
from neffbuild.config.errors import ConfigError
from neffbuild.config.findings import Findings
from neffbuild.config.model import ModelConfig
from neffbuild.config.neuron_engine import PrefillBuckets, neuron_prefill
from neffbuild.config.serve import AdditionalConfig, NeuronConfig, ServeConfig

NEURON = "serve.additional_config.neuron_config"
DCP = {"tensor_parallel_size": 8, "decode_context_parallel_size": 2}
TOOLCHAIN = {"name": "neuronx"}
ON_DEVICE = {"on_device_sampling_config": {"all_greedy": True}}


def settled(workspace: Workspace, serve: dict[str, Any]) -> tuple[PrefillBuckets, list[str]]:
    """The buckets of a config that loads, and the notes there are on them."""
    findings = Findings("test")
    with findings.stage():
        buckets = neuron_prefill(workspace.load(serve, toolchain=TOOLCHAIN), findings)
    return buckets, findings.notes


def refused(workspace: Workspace, serve: dict[str, Any]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        settled(workspace, serve)
    return caught.value


SINGLE_SHOT = {"max_num_batched_tokens": 4096, "enable_prefix_caching": False}


@pytest.mark.parametrize(
    ("serve", "tokens", "segments"),
    [
        # max_model_len is 4096. Prompts that come in parts are read in segments of a part.
        ({}, (2048,), (2048,)),
        ({"max_num_batched_tokens": 512}, (512,), (512,)),
        ({"max_num_batched_tokens": 512, **neuron(num_batched_tokens_buckets=[512])},
         (512,), (512,)),
        ({"max_num_batched_tokens": 1024, **neuron(kv_segment_size_buckets=[1024])},
         (1024,), (1024,)),
        ({"max_num_batched_tokens": 1024,
          **neuron(kv_segment_size_buckets=[1024], num_batched_tokens_buckets=[1024])},
         (1024,), (1024,)),
        ({**SINGLE_SHOT, **neuron(kv_segment_size_buckets=[4096])}, (4096,), (4096,)),
        ({"max_num_batched_tokens": 4096, **neuron(kv_segment_size_buckets=[4096])},
         (4096,), (4096,)),
        # Others are prefilled at once, in the smallest bucket that holds them.
        (SINGLE_SHOT, (128, 256, 512, 1024, 2048, 4096), (0,)),
        ({**SINGLE_SHOT, "max_num_batched_tokens": 8192}, (128, 256, 512, 1024, 2048, 4096), (0,)),
        ({**SINGLE_SHOT, "max_model_len": 3000}, (128, 256, 512, 1024, 2048, 3000), (0,)),
        ({**SINGLE_SHOT, "max_model_len": 100}, (100,), (0,)),
        ({**SINGLE_SHOT, **neuron(num_batched_tokens_buckets=[300, 4096])}, (300, 4096), (0,)),
    ],
)  # fmt: skip
def test_what_is_settled(
    workspace: Workspace,
    serve: dict[str, Any],
    tokens: tuple[int, ...],
    segments: tuple[int, ...],
) -> None:
    assert settled(workspace, serve) == (PrefillBuckets(tokens, segments), [])


@pytest.mark.parametrize(
    ("serve", "field", "value", "needle"),
    [
        ({"max_num_batched_tokens": 1000}, "serve.max_num_batched_tokens", 1000,
         "below max_model_len 4096, so that prompts are prefilled in segments of that size; allowed: "
         "512, 1024, 2048, or at least 4096"),
        ({"max_num_batched_tokens": 512, "block_size": 1024}, "serve.max_num_batched_tokens", 512,
         "allowed: 1024, 2048, or at least 4096"),
        ({"max_num_batched_tokens": 2048, "block_size": 96}, "serve.max_num_batched_tokens", 2048,
         "allowed: no size below max_model_len is a multiple of block_size 96, or at least 4096"),
        ({"max_num_batched_tokens": 2048, **neuron(num_batched_tokens_buckets=[512, 2048])},
         f"{NEURON}.num_batched_tokens_buckets", [512, 2048],
         "in segments of 2048 (max_num_batched_tokens, below max_model_len 4096); allowed: [2048]"),
        ({"max_num_batched_tokens": 4096}, "serve.enable_prefix_caching", True,
         "allowed: false, or prefill in segments"),
        ({"max_num_batched_tokens": 4096, "enable_prefix_caching": True},
         "serve.enable_prefix_caching", True, "is true (the default)"),
        (neuron(ep_degree=8), f"{NEURON}.ep_degree", 8, "without serve.enable_expert_parallel"),
        ({"enable_expert_parallel": True, "tensor_parallel_size": 4, "data_parallel_size": 2,
          **neuron(ep_degree=3)},
         f"{NEURON}.ep_degree", 3, "allowed: a divisor of 8 ranks (tensor_parallel_size 4 ×"),
        ({"enable_expert_parallel": True, **neuron(ep_degree="many")},
         f"{NEURON}.ep_degree", "many", "allowed: an integer of at least 1"),
        ({"enable_expert_parallel": True, **neuron(ep_degree=-2)},
         f"{NEURON}.ep_degree", -2, "allowed: an integer of at least 1"),
        ({"data_parallel_size": 2, **neuron(attention_dp_size=3)},
         f"{NEURON}.attention_dp_size", 3, "allowed: a divisor of data_parallel_size 2"),
        (neuron(attention_dp_size=2), f"{NEURON}.attention_dp_size", 2,
         "allowed: a divisor of data_parallel_size 1"),
        (neuron(attention_dp_size="x"), f"{NEURON}.attention_dp_size", "x", "allowed: a divisor of"),
        ({"async_scheduling": True}, f"{NEURON}.on_device_sampling_config", None,
         "serve.async_scheduling is true"),
        ({**DCP, "kv_transfer_config": {"kv_connector": "X", "kv_role": "kv_consumer"}},
         "serve.cp_kv_cache_interleave_size", 1, "allowed: block_size 32, with KV transfer"),
        ({**DCP, "block_size": 1024, **SINGLE_SHOT, "max_num_batched_tokens": 1024,
          "enable_prefix_caching": True},
         "serve.max_num_batched_tokens", 1024, "not a multiple of block_size × "
         "decode_context_parallel_size = 2048; allowed: multiples of 2048"),
        ({**DCP, "block_size": 512, **neuron(kv_segment_size_buckets=[512])},
         f"{NEURON}.kv_segment_size_buckets", 512, "allowed: multiples of 1024"),
        ({"additional_config": {"encoder_neuron_config": {}, "vision_neuron_config": {}}},
         "serve.additional_config.vision_neuron_config", {},
         "beside encoder_neuron_config, another name of the same"),
        ({"mm_encoder_only": True}, "serve.mm_encoder_only", True, "runs an encoder alone"),
    ],
)  # fmt: skip
def test_what_is_refused(
    workspace: Workspace, serve: dict[str, Any], field: str, value: Any, needle: str
) -> None:
    error = refused(workspace, serve)
    assert (error.field, error.value) == (field, value)
    assert field in error.message
    assert needle in error.message
    assert error.hint or "allowed" in error.message


def test_following_the_hint_leads_to_no_other_refusal(workspace: Workspace) -> None:
    hint = refused(workspace, {"max_num_batched_tokens": 1000}).hint or ""
    assert "to 4096 and enable_prefix_caching to false" in hint
    hint = refused(workspace, {"max_num_batched_tokens": 4096, "block_size": 1024}).hint or ""
    assert hint.endswith("or max_num_batched_tokens to one of 1024, 2048")


def test_one_step_for_a_whole_prompt_has_a_limit(workspace: Workspace) -> None:
    lengths = {"max_position_embeddings": 131072}
    workspace.write_model("model", {**_model(workspace), **lengths})
    whole = {"enable_prefix_caching": False, "max_num_batched_tokens": 16384}
    buckets, _ = settled(workspace, {**whole, "max_model_len": 16384})
    assert buckets.num_batched_tokens[-1] == 16384
    error = refused(workspace, {**whole, "max_model_len": 16385, "max_num_batched_tokens": 16385})
    assert error.field == "serve.max_num_batched_tokens"
    assert "which is supported up to 16384; allowed: 512, 1024, 2048, 4096, 8192" in error.message
    # Beyond the limit, a step of all tokens is no way out of an unsupported segment either.
    error = refused(workspace, {**whole, "max_model_len": 32768, "max_num_batched_tokens": 1000})
    assert error.message.endswith("allowed: 512, 1024, 2048, 4096, 8192")


def _model(workspace: Workspace) -> dict[str, Any]:
    return dict(workspace.load().model.architecture) | {"torch_dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("serve", "note"),
    [
        ({"max_num_batched_tokens": 2048, **neuron(kv_segment_size_buckets=[512])},
         "is [512], the only prefill bucket, while a step may hold 2048 tokens"),
        ({"max_num_batched_tokens": 512, **neuron(kv_segment_size_buckets=[2048])},
         "the engine raises 512 to the segment size 2048"),
        ({"speculative_config": EAGLE3}, "on_device_sampling_config is not set"),
        ({"additional_config":
          {"encoder_neuron_config": {"num_vision_tokens_buckets": [2048, 8192]}}},
         "the programs of model's encoder (one for each of [2048, 8192]) are not planned"),
        ({"additional_config": {"vision_neuron_config": {"tp_size": 4}}},
         "the programs of model's encoder are not planned; the engine compiles them when it starts"),
        ({**DCP, **SINGLE_SHOT, "block_size": 128}, "prefill buckets [128] are not multiples"),
    ],
)  # fmt: skip
def test_what_is_noted(workspace: Workspace, serve: dict[str, Any], note: str) -> None:
    _, notes = settled(workspace, serve)
    assert [one for one in notes if note in one] == notes
    assert len(notes) == 1


def test_a_model_with_an_encoder_is_told_by_its_architecture(workspace: Workspace) -> None:
    workspace.write_model("model", {"model_type": "vl", "text_config": MODEL, "vision_config": {}})
    _, notes = settled(workspace, {})
    assert [note for note in notes if "encoder are not planned" in note] == notes != []
    language_only = {"additional_config": {"mm_language_model_only": True}}
    assert settled(workspace, language_only)[1] == []


def test_what_the_engine_needs_is_there(workspace: Workspace) -> None:
    on_device = neuron(**ON_DEVICE)
    for serve in (
        {"async_scheduling": True, **on_device},
        {"speculative_config": EAGLE3, **on_device},
        {"async_scheduling": False},
        neuron(ep_degree=1),
        {"enable_expert_parallel": True, "tensor_parallel_size": 8, **neuron(ep_degree=4)},
        {**DCP, "kv_transfer_config": {"kv_connector": "X"}, "cp_kv_cache_interleave_size": 32},
        {"kv_transfer_config": {"kv_connector": "X"}},
    ):
        assert settled(workspace, serve) == (PrefillBuckets((2048,), (2048,)), [])


def test_misaligned_buckets_are_dropped_and_the_largest_is_not(workspace: Workspace) -> None:
    serve = {**DCP, **SINGLE_SHOT, "block_size": 128}
    buckets, _ = settled(workspace, serve)
    assert buckets == PrefillBuckets((256, 512, 1024, 2048, 4096), (0,))
    # A list of one's own was noted when it was read.
    own = {**serve, **neuron(num_batched_tokens_buckets=[128, 384, 512, 4096])}
    assert settled(workspace, own) == (PrefillBuckets((512, 4096), (0,)), [])


def test_the_assumed_step_size_is_noted(workspace: Workspace) -> None:
    (note,) = workspace.load(toolchain=TOOLCHAIN).notes
    assert note.endswith("serve.max_num_batched_tokens 2048")
    assert workspace.load({"max_num_batched_tokens": 2048}, toolchain=TOOLCHAIN).notes == ()


@pytest.mark.parametrize(
    ("max_model_len", "hint"),
    [
        (256, "set enable_prefix_caching to false"),
        (512, "set enable_prefix_caching to false"),
        (2000, "set enable_prefix_caching to false, or max_num_batched_tokens to one of 512, 1024"),
    ],
)
def test_a_hint_names_only_what_helps(workspace: Workspace, max_model_len: int, hint: str) -> None:
    assert refused(workspace, {"max_model_len": max_model_len}).hint == hint


def test_several_problems_are_told_at_once(workspace: Workspace) -> None:
    error = refused(
        workspace, {"max_num_batched_tokens": 1000, "async_scheduling": True, **neuron(ep_degree=2)}
    )
    for field in ("ep_degree", "on_device_sampling_config", "max_num_batched_tokens"):
        assert field in error.message


SIZES = st.one_of(st.integers(1, 20000), st.sampled_from(KV_SEGMENT_SIZES))


@given(
    st.integers(2, 20000),
    SIZES,
    st.booleans(),
    st.none() | st.sampled_from(KV_SEGMENT_SIZES),
    st.sampled_from([1, 16, 32, 128]),
    st.sampled_from([1, 2, 4]),
)
def test_what_is_settled_is_what_the_rules_say(
    max_model_len: int, tokens: int, caching: bool, segment: int | None, block: int, dcp: int
) -> None:
    """The rules once more, written differently."""
    serve = ServeConfig(
        model="model",
        max_model_len=max_model_len,
        max_num_seqs=1,
        block_size=block,
        max_num_batched_tokens=tokens,
        decode_context_parallel_size=dcp,
        enable_prefix_caching=caching,
        additional_config=AdditionalConfig(
            neuron_config=NeuronConfig(
                kv_segment_size_buckets=None if segment is None else (segment,)
            )
        ),
    )
    most = min(tokens, max_model_len)
    at_once = segment is None and tokens >= max_model_len
    allowed = segment is not None or (
        max_model_len <= 16384 and not caching
        if at_once
        else tokens in KV_SEGMENT_SIZES and tokens % block == 0
    )
    largest = most if segment is None else segment
    findings = Findings("test")
    config = BuildConfig(source="test", serve=serve, model=ModelConfig("model", {}))
    buckets = neuron_prefill(config, findings)
    assert bool(findings.problems) is not (
        allowed and largest % (block * dcp if dcp > 1 else 1) == 0
    )
    if findings.problems:
        return
    assert buckets.num_batched_tokens[-1] == largest
    assert buckets.kv_segments == ((0,) if at_once else (largest,))
    if not at_once:
        assert buckets.num_batched_tokens == (largest,)
    else:
        powers = [128 << shift for shift in range(20) if 128 << shift < most]
        whole = [size for size in powers if dcp == 1 or size % (block * dcp) == 0]
        assert list(buckets.num_batched_tokens) == [*whole, most]
