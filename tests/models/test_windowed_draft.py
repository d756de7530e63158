"""The reference draft with a sliding window against its arithmetic spelled out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_eagle3_draft import AUXILIARY_SIZE, states_of
from tiny_eagle3 import proposals, random_draft
from tiny_llama import BLOCK_SIZE, Batch

from neffbuild.grid.windows import span_columns
from neffbuild.models.decode import WindowedDraftInputs
from neffbuild.models.llama import PAD_TOKEN_ID
from neffbuild.runtime.block_table import NULL_BLOCK, new_trimmed, tail_trim

WINDOW = 20
QUERY_LEN = 6


class WindowedDraftRows(Batch):
    """Rows of a draft side by side; blocks that slid out of the window are given to others."""

    def propose(self, tokens, states, starts):
        self._give_up(starts)
        inputs = self.inputs(tokens, starts, QUERY_LEN)
        padded = torch.full((self.rows, QUERY_LEN, AUXILIARY_SIZE), torch.nan)
        for row, given in enumerate(states):
            padded[row, : len(given)] = given
        extra = QUERY_LEN - 1 + self.model.num_speculative_tokens - 1
        full_columns = self.block_table.shape[1]
        columns = min(span_columns(WINDOW, extra, BLOCK_SIZE), full_columns)
        cut = new_trimmed(self.rows, columns)
        tail_trim(
            self.block_table, cut, np.array(starts), window=WINDOW, block_size=BLOCK_SIZE,
            full_columns=full_columns,
        )  # fmt: skip
        given = WindowedDraftInputs(
            inputs.input_ids, inputs.positions, inputs.slot_mapping, *cut, inputs.query_lens, padded
        )
        with torch.inference_mode():
            [drafts] = self.model(*given, self.kv_caches)
        return drafts.tolist()

    def _give_up(self, starts):
        for row, start in enumerate(starts):
            for column in range(max(start - WINDOW + 1, 0) // BLOCK_SIZE):
                if block := int(self.block_table[row, column]):
                    for tensor in self.kv_caches[0]:
                        tensor[block] = 1e4
                self.block_table[row, column] = NULL_BLOCK


@pytest.mark.parametrize("spec_tokens", [1, 2, 5])
def test_proposals_equal_the_arithmetic_spelled_out_as_the_window_slides(spec_tokens):
    draft = random_draft(spec_tokens, sliding_window=WINDOW)
    unlike = random_draft(spec_tokens)
    rows = WindowedDraftRows(draft, rows=3, context_len=96)
    torch.manual_seed(5)
    tokens, states = torch.randint(0, 256, (96,)).tolist(), states_of(96, 1)
    known, differing = [0, 0, 0], 0
    while max(known) < 96 - QUERY_LEN - spec_tokens:
        # Row 1 lags, row 2 gets no drafts.
        until = [known[0] + 4, known[1] + 3, 0]
        fed = [slice(a, b) for a, b in zip(known, until, strict=True)]
        drafts = rows.propose([tokens[part] for part in fed], [states[part] for part in fed], known)
        for row in (0, 1):
            expected, _ = proposals(draft, tokens[: until[row]], states[: until[row]])
            assert drafts[row] == expected
            wide, _ = proposals(unlike, tokens[: until[row]], states[: until[row]])
            differing += wide != expected
        assert drafts[2] == [PAD_TOKEN_ID] * spec_tokens
        known = until
    assert differing > 2, "the window makes no difference: the comparison proves little"
    assert not any(tensor[0].any() for tensor in rows.kv_caches[0])
