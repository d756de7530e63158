"""Trimmed block tables have canonical strides, so that no layout is ever a new one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from neffbuild.config.errors import ConfigError
from neffbuild.grid.windows import span_columns
from neffbuild.runtime.block_table import NULL_BLOCK, head_trim, new_trimmed, tail_trim


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
    tail_trim(full, trimmed, np.array([700]), window=100, block_size=16, full_columns=64)
    assert torch.equal(step(trimmed.block_table), full[:, 37:53] + 1)
    assert len(compiles) == 1
    step(sliced)
    assert len(compiles) == 2, "torch no longer guards on the stride: the copy can go"


LARGE = 10**6


def seen(start: int, window: int, extra: int) -> set[int]:
    """The positions that queries at `start` … `start + extra` see, each in its turn."""
    return {
        position
        for query in range(start, start + extra + 1)
        for position in range(query + 1)
        if query - position < window
    }


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 8])
def test_a_window_takes_the_fewest_columns_that_always_do(block_size):
    """By hand: at some alignment a step needs as many blocks as the rule says, at none it needs more."""
    for window in range(1, 12):
        for extra in range(6):
            most = max(
                len({position // block_size for position in seen(start, window, extra)})
                for start in range(window, window + 3 * block_size)
            )
            assert span_columns(window, extra, block_size) == most


@given(st.data())
def test_tail_trim_holds_every_position_a_step_sees(data):
    block_size = data.draw(st.sampled_from([1, 2, 7, 16]))
    window, extra = data.draw(st.integers(1, 40)), data.draw(st.integers(0, 6))
    full_columns = data.draw(st.integers(1, 12))
    engine_columns = full_columns + data.draw(st.integers(0, 3))
    context = full_columns * block_size
    num_seqs = data.draw(st.integers(1, 4))
    starts = data.draw(st.lists(st.integers(0, context - 1), max_size=num_seqs))
    columns = min(span_columns(window, extra, block_size), full_columns)
    # As an engine keeps it: a block for every column with a position that is seen, else the null block.
    full = torch.zeros(len(starts), engine_columns, dtype=torch.int64)
    steps = [{p for p in seen(start, window, extra) if p < context} for start in starts]
    for row, positions in enumerate(steps):
        for column in {position // block_size for position in positions}:
            full[row, column] = 1 + row * LARGE + column

    trimmed = new_trimmed(num_seqs, columns)
    trimmed.block_table.fill_(99)  # what an earlier step left
    trimmed.position_offset.fill_(99)
    tail_trim(
        full, trimmed, np.array(starts, dtype=np.int64),
        window=window, block_size=block_size, full_columns=full_columns,
    )  # fmt: skip
    table, offset = trimmed
    assert table.dtype == offset.dtype == torch.int32
    assert table.stride() == (columns, 1)
    for row, positions in enumerate(steps):
        begins = int(offset[row])
        assert begins % block_size == 0
        for position in positions:
            column = (position - begins) // block_size
            assert 0 <= column < columns
            assert table[row, column] == 1 + row * LARGE + position // block_size
        # Everything else of the row is a null block, or a column of the context all the same.
        assert begins >= 0
        assert begins // block_size + columns <= full_columns
    assert (table[len(starts) :] == NULL_BLOCK).all()
    assert not offset[len(starts) :].any()


def test_a_window_as_wide_as_the_context_leaves_the_table_as_it_is():
    full = torch.arange(1, 9).view(1, 8)
    for start in range(16):
        tail, head = new_trimmed(1, 4), new_trimmed(1, 4)
        tail_trim(full, tail, np.array([start]), window=100, block_size=4, full_columns=4)
        head_trim(full, head)
        assert tail.block_table.tolist() == head.block_table.tolist()
        assert tail.position_offset.tolist() == head.position_offset.tolist() == [0]


def test_a_table_that_is_too_narrow_for_the_context_is_refused():
    with pytest.raises(ConfigError, match="cannot be trimmed to"):
        tail_trim(
            torch.zeros(1, 3, dtype=torch.int32), new_trimmed(1, 2), np.array([0]),
            window=4, block_size=4, full_columns=4,
        )  # fmt: skip
