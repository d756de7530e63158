"""Trimmed block tables have canonical strides, so that no layout is ever a new one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from neffbuild.config.errors import ConfigError
from neffbuild.runtime.block_table import NULL_BLOCK, head_trim, new_trimmed


@given(st.data())
def test_head_trim_keeps_the_first_columns_of_live_rows(data):
    num_seqs = data.draw(st.integers(1, 5))
    columns = data.draw(st.integers(1, 9))
    rows = data.draw(st.integers(0, num_seqs))
    full = torch.arange(1, 1 + rows * 16, dtype=torch.int64).view(rows, 16)
    trimmed = new_trimmed(num_seqs, columns)
    trimmed.block_table.fill_(99)  # what an earlier step left
    trimmed.position_offset.fill_(99)
    head_trim(full, trimmed)
    table, offset = trimmed
    assert table[:rows].tolist() == full[:, :columns].tolist()
    assert (table[rows:] == NULL_BLOCK).all()
    assert table.dtype == offset.dtype == torch.int32
    assert table.stride() == (columns, 1)
    assert offset.tolist() == [0] * num_seqs


@pytest.mark.parametrize("shape", [(1, 3), (3, 4)])
def test_a_table_that_does_not_fit_is_refused(shape):
    with pytest.raises(ConfigError):
        head_trim(torch.zeros(shape, dtype=torch.int32), new_trimmed(2, 4))


def test_at_batch_one_a_trimmed_table_is_not_a_new_layout_and_a_slice_is():
    full = torch.arange(64, dtype=torch.int32).view(1, 64)
    sliced = full[:, :16]
    assert sliced.is_contiguous()  # of no help: its stride is still the parent's
    assert sliced.contiguous().stride() == (64, 1)

    compiles = []

    def backend(module, _inputs):
        compiles.append(module)
        return module.forward

    step = torch.compile(lambda table: table + 1, backend=backend, dynamic=False)
    step(torch.zeros(1, 16, dtype=torch.int32))
    trimmed = new_trimmed(1, 16)
    head_trim(full, trimmed)
    assert torch.equal(step(trimmed.block_table), sliced + 1)
    assert len(compiles) == 1
    step(sliced)
    assert len(compiles) == 2, "torch no longer guards on the stride: the copy can go"
