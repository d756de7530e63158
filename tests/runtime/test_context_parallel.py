"""Decode context parallelism against placing every position by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from neffbuild.config.errors import ConfigError
from neffbuild.runtime.context_parallel import (
    local_seq_lens,
    merge_partial_attention,
    padded_local_max,
    placement,
    to_device,
    unpad_gathered,
)

BLOCK_SIZE = 128
interleaves = st.sampled_from([1, 7, 64, BLOCK_SIZE])
sizes = st.integers(1, 8)
lengths = st.lists(st.integers(0, 3000), min_size=1, max_size=6)


def placed(seq_len: int, dcp_size: int, interleave: int) -> list[list[int]]:
    """The positions each rank holds, dealt out one by one."""
    held: list[list[int]] = [[] for _ in range(dcp_size)]
    rank = 0
    for position in range(seq_len):
        held[rank].append(position)
        if position % interleave == interleave - 1:
            rank = (rank + 1) % dcp_size
    return held


@given(lengths, sizes, interleaves)
def test_local_lengths_are_those_of_placement(
    seq_lens: list[int], dcp_size: int, interleave: int
) -> None:
    given_lens = torch.tensor(seq_lens, dtype=torch.int32)
    local = local_seq_lens(given_lens, dcp_size, interleave)
    assert local.dtype == torch.int32
    by_hand = [[len(held) for held in placed(length, dcp_size, interleave)] for length in seq_lens]
    assert local.T.tolist() == by_hand
    most = max(max(row) for row in by_hand)
    padded = padded_local_max(given_lens, dcp_size, interleave, BLOCK_SIZE)
    assert padded % BLOCK_SIZE == 0
    assert most <= padded < max(most, 1) + BLOCK_SIZE


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16])
def test_narrow_lengths_are_reckoned_with_as_wide_ones(dtype: torch.dtype) -> None:
    lengths = torch.tensor([0, 5, 100], dtype=dtype)
    for interleave in (16, 1 << 14):
        local = local_seq_lens(lengths, 4, interleave)
        assert local.dtype == dtype
        assert local.tolist() == local_seq_lens(lengths.long(), 4, interleave).tolist()


@given(st.integers(1, 1000), sizes, interleaves)
def test_positions_are_found_where_they_were_placed(
    seq_len: int, dcp_size: int, interleave: int
) -> None:
    ranks, local = placement(torch.arange(seq_len), dcp_size, interleave)
    held = placed(seq_len, dcp_size, interleave)
    for position, (rank, own) in enumerate(zip(ranks.tolist(), local.tolist(), strict=True)):
        assert held[rank][own] == position


@given(st.integers(0, 1000), sizes, interleaves)
def test_what_is_gathered_comes_back_in_the_order_of_positions(
    seq_len: int, dcp_size: int, interleave: int
) -> None:
    held = placed(seq_len, dcp_size, interleave)
    padded = padded_local_max(torch.tensor([seq_len]), dcp_size, interleave, 16)
    gathered = torch.full((dcp_size, padded, 2), -1)
    for rank, positions in enumerate(held):
        gathered[rank, : len(positions)] = torch.tensor(positions)[:, None]
    whole = unpad_gathered(gathered, seq_len, interleave)
    assert whole.tolist() == [[position] * 2 for position in range(seq_len)]


def test_more_positions_than_the_ranks_hold_are_refused() -> None:
    with pytest.raises(ConfigError, match="do not hold a sequence of 9"):
        unpad_gathered(torch.zeros(2, 4, 1), 9, 1)
    with pytest.raises(ConfigError, match="cp_kv_cache_interleave_size is 0"):
        local_seq_lens(torch.tensor([1]), 2, 0)


@pytest.mark.parametrize(("dcp_size", "interleave"), [(1, 1), (2, 1), (2, 64), (4, 7)])
@pytest.mark.parametrize("context", [1, 3, 127, 128, 129, 700])
def test_partial_softmaxes_merge_to_the_whole(dcp_size: int, interleave: int, context: int) -> None:
    torch.manual_seed(context)
    heads, size = 3, 16
    query = torch.randn(heads, size)
    keys, values = torch.randn(2, context, heads, size).unbind()
    scores = torch.einsum("hd,chd->hc", query, keys) / math.sqrt(size)
    whole = torch.einsum("hc,chd->hd", scores.softmax(-1), values)
    outputs, log_sum_exps = [], []
    for positions in placed(context, dcp_size, interleave):
        part = scores[:, positions]
        outputs.append(torch.einsum("hc,chd->hd", part.softmax(-1), values[positions]))
        log_sum_exps.append(part.logsumexp(-1))
    merged = merge_partial_attention(torch.stack(outputs), torch.stack(log_sum_exps))
    torch.testing.assert_close(merged, whole)


def test_a_row_that_sees_nothing_is_nothing() -> None:
    outputs = torch.ones(2, 3, 4)
    assert merge_partial_attention(outputs, torch.full((2, 3), -math.inf)).eq(0).all()


def test_lengths_are_copied_into_a_buffer_of_more_rows() -> None:
    buffer = torch.full((4,), 9, dtype=torch.int32)
    assert to_device(torch.tensor([5, 6], dtype=torch.int32), buffer).tolist() == [5, 6, 0, 0]
