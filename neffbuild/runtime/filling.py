"""From a batch to the input buffers of its program.

What does not fit is refused: a program looks up whatever it is given, and ends its process where that lies
outside a table.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from neffbuild.config.errors import ConfigError
from neffbuild.grid.step import Rows
from neffbuild.models.decode import DraftInputs, WindowedDraftInputs
from neffbuild.runtime.batch import DecodeBatch, DraftBatch
from neffbuild.runtime.step_buffers import StepBuffers


def fill_target(
    buffers: StepBuffers, batch: DecodeBatch, rows: Rows, verified: Sequence[int] | None
) -> None:
    """`rows` are the batch's; row r computes `1 + verified[r]` tokens, all that the program is wide where
    `verified` is None: what a row of a uniform program has beyond its own tokens are placeholders, whose
    keys and values the next steps overwrite.

    Raises `ConfigError` for parts of a batch that are not of one size, for ids outside the vocabulary,
    and as `head_trim` does.
    """
    count = len(rows)
    token_ids, block_table = batch.token_ids.numpy(), batch.block_table.numpy()
    windows = None if batch.window_block_table is None else batch.window_block_table.numpy()
    ids = buffers.input_ids[:count]
    if (
        token_ids.shape != (count,)
        or len(ids) != count
        or not _holds(block_table, count)
        or (windows is not None and not _holds(windows, count))
    ):
        raise _unequal(buffers, batch, rows)
    _check_vocabulary(token_ids, buffers.vocab_size, "token_ids")
    ids[:, 0] = token_ids
    query_lens = None
    if columns := ids.shape[1] - 1:
        drafts = _draft_token_ids(batch.draft_token_ids, rows.num_drafts, columns)
        _check_vocabulary(drafts, buffers.vocab_size, "draft_token_ids")
        ids[:, 1:] = drafts
        if verified is not None and verified.count(columns) < count:
            query_lens = np.array(verified, dtype=np.int32) + np.int32(1)
    buffers.place(
        np.array(rows.num_computed_tokens, dtype=np.int64),
        query_lens,
        block_table[:count],
        None if windows is None else windows[:count],
    )


def fill_draft(buffers: StepBuffers, batch: DraftBatch) -> None:
    """Raises `ConfigError` as `fill_target` does, for starts from which the program would go on beyond its
    context, and where `buffers` are of no draft's program."""
    inputs = buffers.inputs
    if not isinstance(inputs, DraftInputs | WindowedDraftInputs):
        raise ConfigError(
            "drafts are proposed by a draft's program, and this shape is a target's",
            field="shape",
            hint="hand over the `draft` of the step's shapes",
        )
    token_ids, states = batch.token_ids.numpy(), batch.auxiliary_hidden_states.detach()
    starts, query_lens = batch.starts.numpy(), batch.query_lens.numpy()
    block_table = batch.block_table.numpy()
    count, width = token_ids.shape if token_ids.ndim == 2 else (-1, 0)
    most = query_lens.max(initial=0)
    if (
        not (starts.shape == query_lens.shape == (count,) and _holds(block_table, count))
        or count > len(buffers.input_ids)
        or width > buffers.input_ids.shape[1]
        or states.ndim != 3
        or len(states) != count
        or states.shape[2] != inputs.auxiliary_hidden_states.shape[2]
        or not most <= min(width, states.shape[1])
        or query_lens.min(initial=0) < 0
        or starts.dtype.kind not in "iu"
        or query_lens.dtype.kind not in "iu"
    ):
        raise _unequal_draft(buffers, batch)
    _check_reach(buffers, starts, query_lens)
    token_ids = token_ids * (np.arange(width) < query_lens[:, None])
    _check_vocabulary(token_ids, buffers.vocab_size, "token_ids")
    ids = buffers.input_ids[:count]
    ids[:, :width] = token_ids
    ids[:, width:] = 0
    states = states[:, :width]
    inputs.auxiliary_hidden_states[:count, : states.shape[1]] = states
    buffers.place(starts.astype(np.int64), query_lens.astype(np.int32), block_table[:count])


def _draft_token_ids(
    given: Tensor | None, brought: Sequence[int], columns: int
) -> NDArray[np.integer]:
    """What a program verifies behind each row's token: its own drafts, and 0 where it has fewer."""
    count = len(brought)
    drafts = np.zeros((count, 0), np.int32) if given is None else given.numpy()
    if drafts.ndim != 2 or len(drafts) != count:
        raise _unfit_drafts(given, brought, columns)
    if drafts.shape[1] >= columns and brought.count(columns) == count:
        return drafts[:, :columns]
    if max(brought, default=0) > min(columns, drafts.shape[1]):
        raise _unfit_drafts(given, brought, columns)
    own = np.array(brought)[:, None]
    if (fewest := int(own.min(initial=0))) < 0:
        raise ConfigError(
            f"a row brings {fewest} drafts; allowed: integers from 0",
            field="num_drafts",
            value=fewest,
        )
    ids = np.zeros((count, columns), np.int64)
    width = min(columns, drafts.shape[1])
    ids[:, :width] = drafts[:, :width]
    ids *= np.arange(columns) < own
    return ids


def _unfit_drafts(given: Tensor | None, brought: Sequence[int], columns: int) -> ConfigError:
    return ConfigError(
        f"rows bring up to {max(brought, default=0)} drafts each, draft_token_ids is "
        f"{'left out' if given is None else list(given.shape)}, and the program verifies up to {columns} in "
        f"each of {len(brought)} rows",
        field="draft_token_ids",
        hint="hand over the ids of every row's drafts, [rows, most drafts]; a step that was prepared holds "
        "no more than it was prepared with",
    )


def _holds(block_table: NDArray[np.integer], rows: int) -> bool:
    return block_table.ndim == 2 and len(block_table) >= rows


_UNSIGNED = {
    np.dtype(f"{sign}{size}"): np.dtype(f"u{size}") for sign in "iu" for size in (1, 2, 4, 8)
}


def _check_vocabulary(ids: NDArray[np.integer], vocab_size: np.uint32, field: str) -> None:
    unsigned = _UNSIGNED.get(ids.dtype)
    if unsigned is None:
        raise ConfigError(f"{field} are of dtype {ids.dtype}; allowed: integers", field=field)
    # Without a sign what is below 0 is above all else, and one look finds both.
    outside = ids.view(unsigned) >= vocab_size
    if np.count_nonzero(outside):
        bad = int(ids[outside][0])
        raise ConfigError(
            f"token id {bad} is not in the vocabulary; allowed: 0 to {int(vocab_size) - 1}",
            field=field,
            value=bad,
            hint="hand over placeholders as 0, or not at all: a row's own drafts are the first num_drafts",
        )


def _check_reach(
    buffers: StepBuffers, starts: NDArray[np.integer], query_lens: NDArray[np.integer]
) -> None:
    for start, count in zip(starts.tolist(), query_lens.tolist(), strict=True):
        if count and not 0 <= start <= buffers.reach - count:
            raise ConfigError(
                f"a row adds {count} tokens from position {start} on, and the draft would go on beyond its "
                f"program's context; allowed: up to position {buffers.reach - count}",
                field="starts",
                value=start,
                hint="hand over the `draft` of the shapes selected for this step, and query_lens of 0 for "
                "rows that get no drafts (`grid.select.proposes`)",
            )


def _unequal(buffers: StepBuffers, batch: DecodeBatch, rows: Rows) -> ConfigError:
    windows = batch.window_block_table
    tables = f"block_table {list(batch.block_table.shape)}"
    if windows is not None:
        tables += f", window_block_table {list(windows.shape)}"
    return ConfigError(
        f"a batch of {len(rows)} rows has token_ids {list(batch.token_ids.shape)} and {tables}, in a "
        f"program of up to {len(buffers.input_ids)} rows",
        field="batch",
        hint="hand over one token for each live row and at least its row of a table; a step that was "
        "prepared has the rows it was prepared with, or fewer",
    )


def _unequal_draft(buffers: StepBuffers, batch: DraftBatch) -> ConfigError:
    shapes = {name: list(part.shape) for name, part in batch._asdict().items()}
    num_seqs, query_len = buffers.input_ids.shape
    return ConfigError(
        f"the parts of a draft's batch do not fit each other or the program ({num_seqs} rows of "
        f"{query_len} tokens): {shapes}, query_lens {batch.query_lens.tolist()}",
        field="batch",
        hint="hand over `starts`, `query_lens`, ids, states and table of the step's rows; no row has more "
        "query_lens than there are ids and states",
    )
