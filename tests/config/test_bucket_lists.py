"""Every rule of every bucket list, each refusal naming field, value and what is allowed."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from config_workspace import EAGLE3, Workspace, neuron
from hypothesis import given
from hypothesis import strategies as st

from neffbuild.config.buckets import powers_of_two
from neffbuild.config.errors import ConfigError

_VALID = {
    "num_seqs_buckets": [1, 4, 8],
    "decode_context_length_buckets": [512, 1024],
    "num_batched_tokens_buckets": [512, 2048],
    "kv_segment_size_buckets": [2048],
    "verify_query_len_buckets": [2, 6],
}
_SERVE = {"speculative_config": EAGLE3, "max_num_batched_tokens": 2048}


def lists(**changed: Any) -> dict[str, Any]:
    """Valid lists with one changed (segments only where they are what is changed)."""
    valid = {name: value for name, value in _VALID.items() if name != "kv_segment_size_buckets"}
    return {**_SERVE, **neuron(**{**valid, **changed})}


def path(name: str) -> str:
    return f"serve.additional_config.neuron_config.{name}"


def test_valid_lists(workspace: Workspace) -> None:
    got = workspace.load(lists()).serve.neuron_config
    assert got.num_seqs_buckets == (1, 4, 8)
    assert got.decode_context_length_buckets == (512, 1024)
    assert got.num_batched_tokens_buckets == (512, 2048)
    assert got.kv_segment_size_buckets is None
    assert got.verify_query_len_buckets == (2, 6)


@pytest.mark.parametrize("name", _VALID)
@pytest.mark.parametrize(
    ("value", "needle"),
    [
        ([1024, 512], "it is not in order"),
        ([512, 512], "an entry is repeated"),
        ([0, 512], "entry 0 is 0"),
        ([-512], "entry 0 is -512"),
        ([True], "entry 0 is True"),
        ([512, False], "entry 1 is False"),
        ([512.0], "entry 0 is 512.0"),
        (["512.0"], "entry 0 is '512.0'"),
        (["many"], "entry 0 is 'many'"),
        ([None], "entry 0 is None"),
        ([[512]], "entry 0 is [512]"),
        ([2**63], "entry 0 is"),
        ([], "is []"),
        (512, "is 512"),
        (True, "is True"),
        ({}, "is {}"),
        ("512", "is '512'"),
        ("512,1024", "is '512,1024'"),
        ("", "is ''"),
    ],
)
def test_no_list_of_ascending_positive_integers(
    workspace: Workspace, name: str, value: Any, needle: str
) -> None:
    error = workspace.refused(lists(**{name: value}))
    assert error.field == path(name)
    assert error.value == value
    assert f"{path(name)} {needle}" in error.message or needle in error.message
    assert "a list of positive integers, strictly ascending" in error.message


def test_hints_say_what_to_write(workspace: Workspace) -> None:
    assert workspace.refused(lists(num_seqs_buckets=8)).hint == "write [8]"
    assert workspace.refused(lists(num_seqs_buckets={})).hint is None
    assert workspace.refused(lists(num_seqs_buckets=[8, 4, 4])).hint == "write [4, 8]"
    assert "context buckets" in (
        workspace.refused(lists(decode_context_length_buckets=[])).hint or ""
    )


@pytest.mark.parametrize("name", [name for name in _VALID if name != "kv_segment_size_buckets"])
def test_texts_are_read_with_a_note(workspace: Workspace, name: str) -> None:
    expected = workspace.load(lists()).serve
    numbers = workspace.load(lists(**{name: [str(item) for item in _VALID[name]]}))
    assert numbers.serve == expected
    assert any(f"{path(name)}: numbers were given as texts" in note for note in numbers.notes)
    whole = workspace.load(lists(**{name: str(_VALID[name])}))
    assert whole.serve == expected
    assert any(f"{path(name)}: the list was given as a text" in note for note in whole.notes)


@pytest.mark.parametrize(
    ("value", "needle"),
    [
        ([1, 4], "its last entry 4 is not serve.max_num_seqs 8; allowed: a list that ends with 8"),
        ([1, 16], "its last entry 16 is larger than serve.max_num_seqs 8"),
        ([6, 7], "allowed: a list that ends with 8"),
    ],
)
def test_num_seqs_ends_with_max_num_seqs(
    workspace: Workspace, value: list[int], needle: str
) -> None:
    error = workspace.refused(lists(num_seqs_buckets=value))
    assert (error.field, error.value) == (path("num_seqs_buckets"), value)
    assert needle in error.message
    assert f"set max_num_seqs to {value[-1]}" in (error.hint or "")


def test_top_buckets_that_are_no_powers_of_two(workspace: Workspace) -> None:
    """6 sequences with 6 drafts: 42 tokens wide, and 33 sequences: both exact."""
    six = workspace.load(
        {
            "max_num_seqs": 6,
            "speculative_config": {**EAGLE3, "num_speculative_tokens": 6},
            **neuron(num_seqs_buckets=[2, 6]),
        }
    ).serve
    assert six.neuron_config.num_seqs_buckets == (2, 6)
    assert six.neuron_config.verify_query_len_buckets == (7,)
    many = workspace.load({"max_num_seqs": 33, **neuron(num_seqs_buckets=[33])}).serve
    assert many.neuron_config.num_seqs_buckets == (33,)


@pytest.mark.parametrize(
    ("value", "needle"),
    [
        ([100], "entry 100 is not a multiple of 128"),
        ([128, 200], "entry 200 is not a multiple of 128"),
        ([4096], "entry 4096 is not below max_model_len 4096"),
        ([512, 8192], "entry 8192 is not below max_model_len 4096"),
    ],
)
def test_contexts(workspace: Workspace, value: list[int], needle: str) -> None:
    error = workspace.refused(lists(decode_context_length_buckets=value))
    assert (error.field, error.value) == (path("decode_context_length_buckets"), value)
    assert needle in error.message
    assert "allowed: multiples of 128 from 128 to 3968" in error.message


def test_context_limits(workspace: Workspace) -> None:
    config = workspace.load(lists(decode_context_length_buckets=[128, 3968]))
    assert config.serve.neuron_config.decode_context_length_buckets == (128, 3968)
    small = {"max_model_len": 128, **neuron(decode_context_length_buckets=[128])}
    assert "allowed: no list" in workspace.refused(small).message


def test_without_context_buckets(workspace: Workspace) -> None:
    config = workspace.load(neuron(num_seqs_buckets=[8], decode_context_length_buckets=None))
    assert config.serve.neuron_config.decode_context_length_buckets is None


@pytest.mark.parametrize(
    ("serve", "value", "needle"),
    [
        ({"max_num_batched_tokens": 2048}, [512], "ends with 2048"),
        ({"max_num_batched_tokens": 2048}, [4096], "larger than"),
        ({"max_num_batched_tokens": 8192}, [8192], "ends with 4096"),
        ({}, [512], "ends with 2048"),
    ],
)
def test_prefill_buckets_end_with_what_a_step_may_hold(
    workspace: Workspace, serve: dict[str, Any], value: list[int], needle: str
) -> None:
    error = workspace.refused({**serve, **neuron(num_batched_tokens_buckets=value)})
    assert (error.field, error.value) == (path("num_batched_tokens_buckets"), value)
    assert needle in error.message


def test_prefill_buckets_above_the_length_end_with_it(workspace: Workspace) -> None:
    serve = {"max_num_batched_tokens": 8192, **neuron(num_batched_tokens_buckets=[512, 4096])}
    got = workspace.load(serve).serve.neuron_config
    assert got.num_batched_tokens_buckets == (512, 4096)


def test_the_assumed_step_size_is_noted_where_it_matters(workspace: Workspace) -> None:
    notes = workspace.load(neuron(num_batched_tokens_buckets=[2048])).notes
    assert any("serve.max_num_batched_tokens 2048" in note for note in notes)
    assert not any("batched" in note for note in workspace.load().notes)


@pytest.mark.parametrize(
    ("serve", "changed", "needle"),
    [
        ({}, {"kv_segment_size_buckets": [512, 1024]}, "allowed: one of [512], [1024]"),
        ({}, {"kv_segment_size_buckets": [256]}, "allowed: one of [512], [1024]"),
        ({"block_size": 1024}, {"kv_segment_size_buckets": [512]},
         "allowed: one of [1024], [2048], [4096], [8192], with block_size 1024"),
        ({"max_num_batched_tokens": 2048},
         {"kv_segment_size_buckets": [1024], "num_batched_tokens_buckets": [512, 2048]},
         "while num_batched_tokens_buckets is [512, 2048]"),
    ],
)  # fmt: skip
def test_segments(
    workspace: Workspace, serve: dict[str, Any], changed: dict[str, Any], needle: str
) -> None:
    error = workspace.refused({**serve, **neuron(**changed)})
    assert error.field == path("kv_segment_size_buckets")
    assert error.value == changed["kv_segment_size_buckets"]
    assert needle in error.message


def test_segments_that_fit(workspace: Workspace) -> None:
    both = neuron(kv_segment_size_buckets=[2048], num_batched_tokens_buckets=[2048])
    got = workspace.load({**both, "max_num_batched_tokens": 2048}).serve.neuron_config
    assert got.kv_segment_size_buckets == got.num_batched_tokens_buckets == (2048,)
    error = workspace.refused({"block_size": 96, **neuron(kv_segment_size_buckets=[512])})
    assert "allowed: no segment size, with block_size 96" in error.message


def test_a_row_of_one_token_holds_no_draft(workspace: Workspace) -> None:
    error = workspace.refused(lists(verify_query_len_buckets=[1, 6]))
    assert (error.field, error.value) == (path("verify_query_len_buckets"), [1, 6])
    assert "allowed: integers from 2 to 6" in error.message


@pytest.mark.parametrize("value", [[5], [7], [2, 3]])
def test_query_lengths_end_with_one_and_all_drafts(workspace: Workspace, value: list[int]) -> None:
    error = workspace.refused(lists(verify_query_len_buckets=value))
    assert (error.field, error.value) == (path("verify_query_len_buckets"), value)
    assert "1 + num_speculative_tokens, 6; allowed: a list that ends with 6" in error.message


def test_query_lengths_need_speculation(workspace: Workspace) -> None:
    error = workspace.refused(neuron(verify_query_len_buckets=[1]))
    assert "without serve.speculative_config" in error.message
    assert workspace.load().serve.neuron_config.verify_query_len_buckets is None


@given(
    st.lists(
        st.one_of(
            st.integers(-2, 40).map(lambda n: n * 128),
            st.integers(0, 5000),
            st.booleans(),
            st.floats(0, 5000),
            st.integers(0, 40).map(lambda n: str(n * 128)),
        ),
        max_size=4,
    )
)
def test_a_context_list_is_read_or_refused_by_the_rules(
    shared_workspace: Workspace, value: list[Any]
) -> None:
    """The rules once more, written differently: what is accepted obeys every one of them."""
    numbers = [int(item) if isinstance(item, str) else item for item in value]
    obeys = (
        bool(numbers)
        and all(type(item) is int for item in numbers)
        and all(0 < item < 4096 and item % 128 == 0 for item in numbers)
        and all(low < high for low, high in pairwise(numbers))
    )
    serve = neuron(decode_context_length_buckets=value)
    if obeys:
        got = shared_workspace.load(serve).serve.neuron_config.decode_context_length_buckets
        assert got == tuple(numbers)
    else:
        error = shared_workspace.refused(serve)
        assert isinstance(error, ConfigError)
        assert error.field == path("decode_context_length_buckets")


@given(st.integers(1, 1 << 20), st.sampled_from([1, 128]))
def test_powers_of_two(top: int, first: int) -> None:
    ladder = powers_of_two(top, first)
    assert ladder[-1] == top
    assert list(ladder) == sorted(set(ladder))
    assert all(size % first == 0 and (size // first).bit_count() == 1 for size in ladder[:-1])
    assert len(ladder) == 1 or top <= 2 * ladder[-2]
