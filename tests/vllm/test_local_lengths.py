"""Context parallelism deals out positions as vLLM does."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from neffbuild.runtime.context_parallel import local_seq_lens

utils = pytest.importorskip("vllm.v1.attention.backends.utils")


@given(
    st.lists(st.integers(0, 1 << 20), min_size=1, max_size=8),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 7, 16, 64, 128]),
)
def test_local_lengths_are_vllms(seq_lens: list[int], dcp_size: int, interleave: int) -> None:
    lengths = torch.tensor(seq_lens, dtype=torch.int32)
    theirs = utils.get_dcp_local_seq_lens(lengths, dcp_size, None, interleave)
    assert torch.equal(local_seq_lens(lengths, dcp_size, interleave), theirs.T)
