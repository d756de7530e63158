"""Spellings that mean the same lead to one serve config; what means nothing is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from config_workspace import DRAFT, EAGLE3, MODEL, Workspace, neuron
from hypothesis import given, settings
from hypothesis import strategies as st

from neffbuild.config.errors import ConfigError
from neffbuild.config.load import load_config
from neffbuild.config.values import human_readable_integer, plain, scalar

_SERVE = {
    "max_num_batched_tokens": 1024,
    "tensor_parallel_size": 4,
    "enable_expert_parallel": True,
    "gpu_memory_utilization": 0.5,
    "enforce_eager": True,
    "compilation_config": {"mode": 2, "pass_config": {"fuse": True}},
    "some_future_option": 12,
    **neuron(num_seqs_buckets=[1, 2, 8], decode_context_length_buckets=[512, 1024]),
}


def _text(value: Any) -> str:
    return json.dumps(value) if not isinstance(value, bool) else str(value)


@settings(max_examples=40)
@given(st.data())
def test_spelling_does_not_matter(shared_workspace: Workspace, data: st.DataObject) -> None:
    """Dashes for underscores, values as texts, JSON as text, any order: the same serve config."""
    expected = shared_workspace.load(_SERVE).serve
    respelled: dict[str, Any] = {}
    for name in data.draw(st.permutations(sorted(_SERVE))):
        value = _SERVE[name]
        key = name.replace("_", "-") if data.draw(st.booleans()) else name
        if isinstance(value, dict):
            value = data.draw(st.sampled_from([value, json.dumps(value), _texts_inside(value)]))
        elif data.draw(st.booleans()):
            value = _text(value)
        respelled[key] = value
    assert shared_workspace.load(respelled).serve == expected


def _texts_inside(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _texts_inside(item) for key, item in reversed(list(value.items()))}
    if isinstance(value, list):
        return [_texts_inside(item) for item in value]
    return _text(value)


@pytest.mark.parametrize(
    ("serve", "note"),
    [
        ({"max_num_seqs": "8"}, "serve.max_num_seqs '8' is read as 8"),
        ({"enable_prefix_caching": "True"}, "serve.enable_prefix_caching 'True' is read as true"),
        ({"max_model_len": "4k"}, "serve.max_model_len '4k' is read as 4000"),
        ({"max_model_len": "4K"}, "serve.max_model_len '4K' is read as 4096"),
        ({"gpu_memory_utilization": "0.5"}, "serve.gpu_memory_utilization '0.5' is read as 0.5"),
    ],
)
def test_a_text_for_a_number_is_noted(
    workspace: Workspace, serve: dict[str, Any], note: str
) -> None:
    assert note in workspace.load(serve).notes


@pytest.mark.parametrize(
    ("serve", "field", "value", "allowed"),
    [
        ({"max_num_seqs": 0}, "serve.max_num_seqs", 0, "an integer of at least 1"),
        ({"max_num_seqs": -4}, "serve.max_num_seqs", -4, "an integer of at least 1"),
        ({"max_num_seqs": True}, "serve.max_num_seqs", True, "an integer of at least 1"),
        ({"max_num_seqs": 8.0}, "serve.max_num_seqs", 8.0, "an integer of at least 1"),
        ({"max_num_seqs": [8]}, "serve.max_num_seqs", [8], "an integer of at least 1"),
        ({"max_num_seqs": 2**64}, "serve.max_num_seqs", 2**64, "an integer of at least 1"),
        ({"max_num_seqs": "eight"}, "serve.max_num_seqs", "eight", "an integer of at least 1"),
        ({"max_num_seqs": "8k"}, "serve.max_num_seqs", "8k", "an integer of at least 1"),
        ({"block_size": ..., "block-size": "x"}, "serve.block_size", "x", "an integer of at least 1"),
        ({"max_model_len": "auto"}, "serve.max_model_len", "auto", "an integer of at least 1"),
        ({"max_model_len": -1}, "serve.max_model_len", -1, "an integer of at least 1"),
        ({"max_model_len": "2.5K"}, "serve.max_model_len", "2.5K", "an integer of at least 1"),
        ({"max_model_len": 8193}, "serve.max_model_len", 8193, "1 to 8192"),
        ({"gpu_memory_utilization": 1.5}, "serve.gpu_memory_utilization", 1.5, "up to 1"),
        ({"gpu_memory_utilization": "half"}, "serve.gpu_memory_utilization", "half", "up to 1"),
        ({"gpu_memory_utilization": True}, "serve.gpu_memory_utilization", True, "up to 1"),
        ({"gpu_memory_utilization": 0}, "serve.gpu_memory_utilization", 0, "above 0"),
        ({"speculative_config": "["}, "serve.speculative_config", "[", "a mapping"),
        ({"speculative_config": 3, "spec_tokens": 4}, "serve.speculative_config", 3, "a mapping"),
        ({"additional_config": {7: 1}}, "serve.additional_config", 7, "not a text"),
        ({"additional_config": {"x": 2**70}}, "serve.additional_config.x", 2**70, "63 bits"),
        (neuron(x=2**70), "serve.additional_config.neuron_config.x", 2**70, "63 bits"),
        ({"kv_transfer_config": {"x": 2**70}}, "serve.kv_transfer_config", {"x": 2**70}, "63 bits"),
        ({"kv_transfer_config": '{"a": 1, "a": 2}'}, "serve.kv_transfer_config",
         '{"a": 1, "a": 2}', "the key 'a' is given twice"),
        ({"hf_overrides": "{1"}, "serve.hf_overrides", "{1", "Expecting"),
        ({"enable_expert_parallel": 1}, "serve.enable_expert_parallel", 1, "true, false"),
        ({"enable_prefix_caching": "y"}, "serve.enable_prefix_caching", "y", "true, false"),
        ({"dtype": "fp8"}, "serve.dtype", "fp8", "auto, float16, half, bfloat16"),
        ({"dtype": ["a"]}, "serve.dtype", ["a"], "a text"),
        ({"model": 3.5}, "serve.model", "3.5", "a directory"),
        ({"model": ["a"]}, "serve.model", ["a"], "a text"),
        ({"model": ...}, "serve.model", None, "a directory with a config.json"),
        ({"compilation_config": "{"}, "serve.compilation_config", "{", "a mapping"),
        ({"compilation_config": [1]}, "serve.compilation_config", [1], "a mapping"),
        ({"additional_config": "[]"}, "serve.additional_config", "[]", "a mapping"),
        ({"kv_transfer_config": {"kv_role": "decode"}}, "serve.kv_transfer_config.kv_role",
         "decode", "kv_producer, kv_consumer, kv_both"),
        ({"kv_cache_memory_bytes": "much"}, "serve.kv_cache_memory_bytes", "much", "128k"),
        ({"some_option": float("nan")}, "serve.some_option", None, "not a finite number"),
        ({"some_option": 2**70}, "serve.some_option", 2**70, "more than 63 bits"),
        ({"some_option": {1: 2}}, "serve.some_option", {1: 2}, "not a text"),
        ({"num_seqs_buckets": [8]}, "serve.num_seqs_buckets", [8], "vLLM has no such option"),
        ({"additional_config": {"num_seqs_buckets": [8]}},
         "serve.additional_config.num_seqs_buckets", [8], "no engine reads it there"),
        ({"additional_config": {"neuron-config": {}}},
         "serve.additional_config.neuron-config", {}, "with underscores"),
        (neuron(**{"num-seqs-buckets": [8]}),
         "serve.additional_config.neuron_config.num-seqs-buckets", [8], "with underscores"),
        ({"additional_config": {"neuron_config": 3}},
         "serve.additional_config.neuron_config", 3, "a mapping"),
    ],
)  # fmt: skip
def test_refusals_name_field_value_and_what_is_allowed(
    workspace: Workspace, serve: dict[str, Any], field: str, value: Any, allowed: str
) -> None:
    error = workspace.refused(serve)
    assert error.field == field
    if value is not None:
        assert error.value == value
    assert field in error.message
    assert allowed in error.message


def test_all_problems_are_listed(workspace: Workspace) -> None:
    error = workspace.refused({"max_num_seqs": 0, "block_size": "x", "dtype": [1]})
    assert (error.field, error.value) == ("serve.dtype", [1])
    for problem in ("serve.dtype is [1]", "serve.max_num_seqs is 0", "serve.block_size is 'x'"):
        assert problem in error.message


def test_one_option_in_two_spellings_is_refused(workspace: Workspace) -> None:
    error = workspace.refused({"max-num-seqs": 8})
    assert "serve.max_num_seqs is given twice, as " in error.message


def test_parts_of_a_json_option(workspace: Workspace) -> None:
    lists = {"num_seqs_buckets": [1, 8], "decode_context_length_buckets": [512]}
    expected = workspace.load({"additional_config": {"neuron_config": lists}}).serve
    parts = {
        "additional-config.neuron_config.num_seqs_buckets": [1, 8],
        "additional_config.neuron_config.decode_context_length_buckets": [512],
    }
    assert workspace.load(parts).serve == expected
    error = workspace.refused({**parts, "additional_config": {}})
    assert "serve.additional_config is given twice" in error.message
    kept = workspace.load({"no_json_option.x": 1}).serve
    assert kept.model_extra == {"no_json_option.x": 1}


def test_a_switch_may_be_turned_off_by_name(workspace: Workspace) -> None:
    expected = workspace.load({"enable_prefix_caching": False}).serve
    assert workspace.load({"no-enable-prefix-caching": True}).serve == expected
    assert workspace.load({"no-enable-prefix-caching": False}).serve == workspace.load().serve
    assert workspace.load().serve.enable_prefix_caching is True


def test_unset_and_null_are_the_same(workspace: Workspace) -> None:
    nothing = {"quantization": None, "revision": "None", "some_option": None, "dtype": ""}
    assert workspace.load(nothing).serve == workspace.load().serve


def test_defaults_written_out_are_the_same(workspace: Workspace) -> None:
    bare = workspace.load({"max_num_seqs": ..., "block_size": ..., "max_model_len": ...})
    written = json.loads(bare.serve.model_dump_json())
    assert written["max_num_batched_tokens"] == 2048
    assert workspace.load(written).serve == bare.serve


def test_defaults_written_out_are_the_same_with_speculation(workspace: Workspace) -> None:
    bare = workspace.load({"speculative_config": EAGLE3, "tensor_parallel_size": 2})
    written = json.loads(bare.serve.model_dump_json())
    assert written["speculative_config"]["max_model_len"] == 2048
    assert written["speculative_config"]["draft_tensor_parallel_size"] == 2
    assert workspace.load(written).serve == bare.serve


@pytest.mark.parametrize(
    ("toolchain", "serve", "expected"),
    [
        ("inductor", {}, (128, 128, 2048)),
        ("inductor", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, (512, 128, 8192)),
        ("inductor", {"max_num_batched_tokens": 64}, (64, 128, 64)),
        ("inductor", {"performance_mode": "throughput"}, (256, 128, 4096)),
        ("inductor", {"enable_chunked_prefill": False}, (128, 128, 4096)),
        ("inductor", {"max_model_len": 4}, (128, 128, 512)),
        ("neuronx", {}, (256, 32, 2048)),
        ("neuronx", {"tensor_parallel_size": 2}, (256, 32, 2048)),
        ("another", {}, (256, 16, 2048)),
    ],
)
def test_engine_defaults(
    workspace: Workspace, toolchain: str, serve: dict[str, Any], expected: tuple[int, int, int]
) -> None:
    unset = {"max_num_seqs": ..., "block_size": ...}
    config = workspace.load({**unset, **serve}, toolchain={"name": toolchain})
    got = (
        config.serve.max_num_seqs,
        config.serve.block_size,
        config.serve.max_num_batched_tokens,
    )
    assert got == expected
    note = next(note for note in config.notes if "are assumed" in note)
    assert f"serve.max_num_seqs {expected[0]}, serve.block_size {expected[1]}" in note


def test_the_default_ladder_ends_with_max_num_seqs(workspace: Workspace) -> None:
    for seqs, ladder in ((1, (1,)), (6, (1, 2, 4, 6)), (33, (1, 2, 4, 8, 16, 32, 33))):
        assert workspace.load({"max_num_seqs": seqs}).serve.neuron_config.num_seqs_buckets == ladder


@pytest.mark.parametrize(
    ("stated", "given_dtype", "dtype", "noted"),
    [
        ("bfloat16", "auto", "bfloat16", False),
        ("float16", "auto", "float16", False),
        ("torch.float16", "auto", "float16", False),
        ("float32", "auto", "bfloat16", True),
        ("float8_e4m3fn", "auto", "bfloat16", True),
        (None, "auto", "bfloat16", True),
        ("bfloat16", "half", "float16", False),
        ("bfloat16", "Float", "float32", False),
        ("float16", "bfloat16", "bfloat16", False),
    ],
)
def test_dtype(
    workspace: Workspace, stated: str | None, given_dtype: str, dtype: str, noted: bool
) -> None:
    workspace.write_model("model", {**MODEL, "torch_dtype": stated})
    config = workspace.load({"dtype": given_dtype})
    assert config.serve.dtype == dtype
    notes = [note for note in config.notes if "dtype" in note]
    assert len(notes) == noted
    if noted:
        expected = (
            "states no dtype" if stated is None else f"a {stated} model is served in bfloat16"
        )
        assert expected in notes[0]


def test_a_model_that_overflows_in_float16(workspace: Workspace) -> None:
    workspace.write_model("model", {**MODEL, "model_type": "gemma2", "torch_dtype": "float16"})
    assert workspace.load().serve.dtype == "bfloat16"
    error = workspace.refused({"dtype": "half"})
    assert "allowed: auto, bfloat16, float32" in error.message


def test_a_length_beyond_the_model_needs_vllms_own_switch(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "VLLM_ALLOW_LONG_MAX_MODEL_LEN" in (
        workspace.refused({"max_model_len": 9000}).hint or ""
    )
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    config = workspace.load({"max_model_len": 9000})
    assert config.serve.max_model_len == 9000
    assert any("VLLM_ALLOW_LONG_MAX_MODEL_LEN=1" in note for note in config.notes)


@pytest.mark.parametrize("fitted", [-1, "-1", "auto", "Auto"])
def test_a_length_fitted_to_memory_must_be_pinned(workspace: Workspace, fitted: Any) -> None:
    assert "pin the length" in (workspace.refused({"max_model_len": fitted}).hint or "")


def test_length_from_the_model(workspace: Workspace) -> None:
    config = workspace.load({"max_model_len": ...})
    assert config.serve.max_model_len == 8192
    assert any("serve.max_model_len is not set: 8192" in note for note in config.notes)
    workspace.write_model("model", {k: v for k, v in MODEL.items() if "position" not in k})
    error = workspace.refused({"max_model_len": ...})
    assert error.field == "serve.max_model_len"
    assert workspace.load({"max_model_len": 100_000}).serve.max_model_len == 100_000


def test_unknown_options_are_kept(workspace: Workspace) -> None:
    config = workspace.load({"brand_new_thing": {"deep": ["8", "true", "x"]}, "max-num-seq": 4})
    assert config.serve.model_extra == {
        "brand_new_thing": {"deep": [8, True, "x"]},
        "max_num_seq": 4,
    }
    assert any("did you mean max_num_seqs?" in note for note in config.notes)
    assert config.serve.max_num_seqs == 8


def test_a_misspelled_bucket_list_is_noted(workspace: Workspace) -> None:
    notes = workspace.load(neuron(num_seq_buckets=[1, 8])).notes
    assert any("did you mean num_seqs_buckets?" in note for note in notes)


def test_other_engine_options_pass_through(workspace: Workspace) -> None:
    config = workspace.load(
        {
            "additional_config": {"encoder_neuron_config": {"a": "1"}, "neuron_config": {"b": "2"}},
            "kv_cache_memory_bytes": "2g",
            "served_model_name": "x",
            "chat_template": "{% if x %}",
            "enforce_eager": True,
            "pt_load_map_location": "cpu",
            "hf_overrides": "a.callable",
            "unlike_anything": 1,
        }
    )
    assert config.notes == ()
    serve = config.serve
    assert serve.additional_config.model_extra == {"encoder_neuron_config": {"a": 1}}
    assert serve.neuron_config.model_extra == {"b": 2}
    assert serve.model_extra == {
        "kv_cache_memory_bytes": 2 * 10**9,
        "served_model_name": ["x"],
        "chat_template": "{% if x %}",
        "enforce_eager": True,
        "pt_load_map_location": "cpu",
        "hf_overrides": "a.callable",
        "unlike_anything": 1,
    }


def test_short_speculation_options(workspace: Workspace) -> None:
    whole = workspace.load({"speculative_config": EAGLE3}).serve
    parts = {"spec_method": "eagle3", "spec-model": "draft", "spec_tokens": "5"}
    assert workspace.load(parts).serve == whole
    error = workspace.refused({"speculative_config": EAGLE3, "spec_tokens": 4})
    assert "given twice" in error.message


def test_the_old_interleave_option(workspace: Workspace) -> None:
    renamed = workspace.load({"dcp_kv_cache_interleave_size": 16})
    assert renamed.notes == ()
    serve = renamed.serve
    assert serve == workspace.load({"cp_kv_cache_interleave_size": 16}).serve
    assert workspace.load({"dcp_kv_cache_interleave_size": 1}).serve == workspace.load().serve
    both = {"dcp_kv_cache_interleave_size": 16, "cp_kv_cache_interleave_size": 8}
    config = workspace.load(both)
    assert config.serve == serve
    assert any("overridden by dcp_kv_cache_interleave_size" in note for note in config.notes)


def test_hf_overrides_change_the_architecture(workspace: Workspace) -> None:
    config = workspace.load({"hf_overrides": {"max_position_embeddings": 16384}})
    assert config.model.architecture["max_position_embeddings"] == 16384
    longer = {"max_model_len": 16384, "hf_overrides": '{"max_position_embeddings": 16384}'}
    assert workspace.load(longer).serve.max_model_len == 16384


def test_hf_overrides_are_merged_into_nested_models_alone(workspace: Workspace) -> None:
    nested = {"text_config": {**MODEL, "a": 1}, "quantization_config": {"x": 1}, "model_type": "m"}
    workspace.write_model("model", nested)
    overrides = {"text_config": {"a": 2}, "quantization_config": {"y": 2}}
    architecture = workspace.load({"hf_overrides": overrides}).model.architecture
    assert architecture["text_config"]["a"] == 2
    assert architecture["text_config"]["num_hidden_layers"] == 4
    assert architecture["quantization_config"] == {"y": 2}


def test_an_option_name_is_a_text(workspace: Workspace) -> None:
    workspace.write()
    workspace.file.write_text(workspace.file.read_text() + "  8: 1\n")
    with pytest.raises(ConfigError, match=r"serve\.8 is not an option name"):
        load_config(workspace.file)


def test_a_value_json_cannot_hold(workspace: Workspace) -> None:
    workspace.write()
    workspace.file.write_text(workspace.file.read_text() + "  some_option: !!set {a}\n")
    with pytest.raises(ConfigError, match=r"some_option is .*a value of type set"):
        load_config(workspace.file)


def test_hf_config_path_leads_to_the_architecture(workspace: Workspace) -> None:
    workspace.write_model("elsewhere", {**DRAFT, "max_position_embeddings": 4096})
    config = workspace.load({"model": "s3://weights/model", "hf_config_path": "elsewhere"})
    assert config.model.architecture["num_hidden_layers"] == 1
    error = workspace.refused({"hf_config_path": "nowhere"})
    assert (error.field, error.value) == ("serve.hf_config_path", "nowhere")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1k", 1000),
        ("1K", 1024),
        ("25.6k", 25600),
        ("2m", 2 * 10**6),
        ("2M", 2 << 20),
        ("1g", 10**9),
        ("1G", 1 << 30),
        ("1t", 10**12),
        ("1T", 1 << 40),
        ("1.5K", None),
        ("12", 12),
        (" 12 ", 12),
        ("1.5", None),
        ("k", None),
        ("1kk", None),
        ("١٢", None),
    ],
)
def test_human_readable_integers(text: str, number: int | None) -> None:
    assert human_readable_integer(text) == number


@given(st.integers(-(2**63) + 1, 2**63 - 1))
def test_integers_have_one_spelling(number: int) -> None:
    assert scalar(str(number)) == number == plain(number)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_have_one_spelling(number: float) -> None:
    assert repr(plain(repr(number))) == repr(plain(number))


@given(st.text())
def test_no_two_texts_are_merged(text: str) -> None:
    """What a text becomes always tells which text it was (but for the case of true and false)."""
    value = scalar(text)
    if isinstance(value, bool):
        assert text.strip().lower() == str(value).lower()
    else:
        assert str(value) == text


@pytest.mark.parametrize("text", ["3.10", "007", "1e3", "+5", "1_000", "0x10", "inf", "nan", "-0"])
def test_lookalikes_stay_texts(text: str) -> None:
    assert scalar(text) == text
    assert isinstance(scalar(text), str)


def test_our_backend_inside_vllm_is_another_engine(workspace: Workspace) -> None:
    ours = workspace.load({"compilation_config": {"mode": 2, "backend": "neffbuild"}})
    assert ours.toolchain.engine == "vllm"
    assert any("toolchain.engine is taken to be vllm" in note for note in ours.notes)
    assert workspace.load({"compilation_config": {"backend": "inductor"}}).toolchain.engine is None
