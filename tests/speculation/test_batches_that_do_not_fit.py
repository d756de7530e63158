"""What a dispatcher refuses of a batch: every part that a program would misread, or not survive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from eager_programs import EagerLoader
from spec_models import BLOCK_SIZE, MAX_MODEL_LEN, build_config, random_pair
from torch import Tensor

from neffbuild.config.errors import AboveLadder, ConfigError
from neffbuild.grid.bucketer import Bucketer, QueryLenSupport
from neffbuild.grid.shapes import DecodeShape, Family
from neffbuild.grid.step import PostTransferPolicy, Row, Rows, Step
from neffbuild.models.decode import allocate_kv_caches, named_kv_caches
from neffbuild.runtime.batch import DecodeBatch, DraftBatch
from neffbuild.runtime.dispatcher import Dispatcher

K = 3
ROWS = 2
COLUMNS = MAX_MODEL_LEN // BLOCK_SIZE
BOTH = pytest.mark.parametrize("served", QueryLenSupport, indirect=True)


@dataclass(frozen=True)
class Served:
    bucketer: Bucketer
    dispatcher: Dispatcher
    table: Tensor
    caches: list[Tensor]

    def batch(self, rows: Any, **parts: Any) -> DecodeBatch:
        count = len(rows)
        return DecodeBatch(
            rows,
            **{
                "token_ids": torch.arange(5, 5 + count),
                "block_table": self.table[:count],
                "draft_token_ids": torch.arange(1, 1 + K * count).view(count, K),
                **parts,
            },
        )

    def draft_shape(self) -> DecodeShape:
        return self.bucketer.decode_shape(
            Family.DRAFT, num_seqs=ROWS, context_need=40, query_len=1 + K
        )

    def draft_batch(self, **parts: Any) -> DraftBatch:
        size = 192
        return DraftBatch(
            **{
                "starts": torch.tensor([20, 30]),
                "query_lens": torch.tensor([2, 1], dtype=torch.int32),
                "token_ids": torch.tensor([[5, 6], [7, 0]]),
                "auxiliary_hidden_states": torch.ones(ROWS, 2, size),
                "block_table": self.table,
                **parts,
            }
        )


@pytest.fixture
def served(request: pytest.FixtureRequest) -> Served:
    support = getattr(request, "param", QueryLenSupport.VARLEN)
    config = build_config(K)
    bucketer = Bucketer.from_config(config, query_len_support=support)
    pair = random_pair()
    of_target, of_draft = (
        named_kv_caches(
            allocate_kv_caches(model.architecture, torch.float32, ROWS * COLUMNS + 1, BLOCK_SIZE)
        )
        for model in (pair.target, pair.draft)
    )
    dispatcher = Dispatcher(
        bucketer, EagerLoader(config), pair.tensors | of_target, pair.draft_tensors | of_draft
    )
    table = 1 + torch.arange(ROWS * COLUMNS, dtype=torch.int32).view(ROWS, COLUMNS)
    return Served(bucketer, dispatcher, table, [*of_target.values(), *of_draft.values()])


def refused(served: Served, run: Callable[[], object]) -> ConfigError:
    """The refusal; it left nothing in the KV caches, and the next step runs as if it had not been."""
    before = [cache.clone() for cache in served.caches]
    with pytest.raises(ConfigError) as raised:
        run()
    assert all(map(torch.equal, before, served.caches))
    served.dispatcher.run(served.batch(Rows([20, 30], num_drafts=[K, K])))
    return raised.value


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


@BOTH
@pytest.mark.parametrize(
    "drafts", [None, zeros(2, 0), zeros(2, 1), zeros(1, 3), zeros(3, 3), zeros(3)]
)
def test_drafts_that_are_not_those_of_the_rows(served: Served, drafts: Tensor | None) -> None:
    batch = served.batch(Rows([20, 30], num_drafts=[3, 1]), draft_token_ids=drafts)
    error = refused(served, lambda: served.dispatcher.run(batch))
    assert error.field == "draft_token_ids"
    assert "left out" in error.message if drafts is None else str([*drafts.shape]) in error.message


@BOTH
def test_what_a_row_has_beyond_its_own_drafts_is_not_looked_at(served: Served) -> None:
    rows = Rows([20, 30], num_drafts=[3, 1])
    marked = torch.tensor([[7, 8, 9], [10, -1, 1 << 20]])
    clean = torch.tensor([[7, 8, 9], [10, 0, 0]])
    results = [
        served.dispatcher.run(served.batch(rows, draft_token_ids=ids)) for ids in (marked, clean)
    ]
    one, other = (result.outputs["next_token_ids"] for result in results)
    assert torch.equal(one[0], other[0])
    assert torch.equal(one[1, :2], other[1, :2])


@BOTH
def test_what_propose_left_empty_may_be_handed_back(served: Served) -> None:
    ids = torch.tensor([[7, 8, 9], [-1, -1, -1]])
    rows = Rows([20, 30], num_drafts=[3, 0], post_transfer=[False, True])
    batch = served.batch(rows, draft_token_ids=ids, post_transfer_policy=PostTransferPolicy.PADDED)
    assert served.dispatcher.run(batch).shapes.target.family is Family.TARGET_WITH_SPEC


@pytest.mark.parametrize("bad", [-1, 1 << 20, (1 << 32) + 5])
def test_an_id_outside_the_vocabulary(served: Served, bad: int) -> None:
    rows = Rows([20, 30], num_drafts=[K, K])
    tokens = served.batch(rows, token_ids=torch.tensor([5, bad]))
    drafts = served.batch(rows, draft_token_ids=torch.tensor([[1, 2, 3], [1, bad, 3]]))
    for batch in (tokens, drafts):
        error = refused(served, lambda batch=batch: served.dispatcher.run(batch))
        assert f"token id {bad} is not in the vocabulary" in error.message


def test_ids_that_are_no_integers(served: Served) -> None:
    batch = served.batch(Rows([20, 30]), token_ids=torch.tensor([5.5, 6.0]))
    assert (
        "float32; allowed: integers"
        in refused(served, lambda: served.dispatcher.run(batch)).message
    )


@pytest.mark.parametrize(
    "parts",
    [
        {"token_ids": zeros(2, 1)},
        {"token_ids": zeros(1)},
        {"token_ids": zeros(3)},
        {"block_table": zeros(1, COLUMNS)},
        {"block_table": zeros(COLUMNS)},
        {"block_table": zeros(2, 1)},
    ],
)
def test_parts_of_other_sizes(served: Served, parts: dict[str, Tensor]) -> None:
    batch = served.batch(Rows([20, 30]), **parts)
    assert "[" in refused(served, lambda: served.dispatcher.run(batch)).message


def test_a_table_of_more_rows_than_are_live(served: Served) -> None:
    rows = Rows([20])
    of_one = served.dispatcher.run(served.batch(rows)).outputs["logits"]
    of_all = served.dispatcher.run(served.batch(rows, block_table=served.table)).outputs["logits"]
    assert torch.equal(of_one, of_all)


@BOTH
def test_numbers_below_zero(served: Served) -> None:
    for rows in (Rows([20, -1]), Rows([20, 30], num_drafts=[3, -1])):
        batch = served.batch(rows)
        assert "-1" in refused(served, lambda batch=batch: served.dispatcher.run(batch)).message


@BOTH
def test_a_prepared_step_holds_what_it_was_prepared_with(served: Served) -> None:
    dispatcher = served.dispatcher
    prepared = dispatcher.prepare(1, Step(Rows([20, 30], num_drafts=[K, K])))
    for rows in (
        Rows([20, 30], num_drafts=[K + 1, 0]),
        Rows([20, 0], num_drafts=[K, K]),
        Rows([20, 30], num_new_tokens=[1, 5], num_drafts=[K, K]),
        Rows([20] * 5, num_drafts=[K] * 5),
        Rows([20, MAX_MODEL_LEN], num_drafts=[K, K]),
    ):
        batch = served.batch(rows, block_table=served.table.repeat(3, 1)[: len(rows)])
        refused(served, lambda batch=batch: dispatcher.run(batch, prepared))


@pytest.mark.parametrize(
    "parts",
    [
        {"starts": torch.tensor([20])},
        {"query_lens": zeros(1)},
        {"query_lens": torch.tensor([3, 1], dtype=torch.int32)},
        {"query_lens": torch.tensor([2, -1], dtype=torch.int32)},
        {"token_ids": zeros(2)},
        {"token_ids": zeros(1, 2)},
        {"token_ids": zeros(2, K + 2)},
        {"auxiliary_hidden_states": torch.ones(1, 2, 192)},
        {"auxiliary_hidden_states": torch.ones(2, 1, 192)},
        {"auxiliary_hidden_states": torch.ones(2, 2, 191)},
        {"block_table": zeros(1, COLUMNS)},
        {"starts": torch.tensor([20, MAX_MODEL_LEN])},
        {"starts": torch.tensor([20, -1])},
        {"starts": torch.tensor([20.0, 30.0])},
        {"starts": torch.tensor([20, 2**63 - 1])},
        {"token_ids": torch.tensor([[5, -1], [7, 0]])},
        {"token_ids": torch.tensor([[5, (1 << 32) + 6], [7, 0]])},
    ],
)
def test_a_drafts_batch(served: Served, parts: dict[str, Tensor]) -> None:
    refused(
        served, lambda: served.dispatcher.propose(served.draft_shape(), served.draft_batch(**parts))
    )


def test_a_drafts_batch_that_fits(served: Served) -> None:
    states = torch.ones(ROWS, 2, 192, requires_grad=True)
    padded = torch.tensor([[5, 6], [7, -1]])  # the second row adds one token only
    batch = served.draft_batch(auxiliary_hidden_states=states, token_ids=padded)
    drafts = served.dispatcher.propose(served.draft_shape(), batch)
    assert drafts.shape == (ROWS, K)
    assert not drafts.requires_grad
    buffers = served.dispatcher.program(served.draft_shape()).buffers
    assert buffers.inputs.auxiliary_hidden_states.grad_fn is None


@pytest.mark.parametrize("added", [1, 2])
def test_a_draft_goes_on_within_its_context(served: Served, added: int) -> None:
    """K tokens: the first after what was added, each of the others a position further."""
    shape = served.draft_shape()
    last = shape.context_len - (K - 1) - added
    lens = torch.tensor([added, 0], dtype=torch.int32)
    for start in (last, last + 1):
        # The second row gets no drafts, wherever it is.
        batch = served.draft_batch(starts=torch.tensor([start, 1 << 40]), query_lens=lens)
        if start == last:
            assert served.dispatcher.propose(shape, batch)[0].min() >= 0
        else:
            error = refused(served, lambda batch=batch: served.dispatcher.propose(shape, batch))
            assert f"allowed: up to position {last}" in error.message


def test_an_idle_rank_may_run_its_part_as_a_batch_without_rows(served: Served) -> None:
    prepared = served.dispatcher.prepare(1, Step(Rows([20], num_drafts=[K])))
    batch = served.batch(Rows([]), draft_token_ids=None)
    assert served.dispatcher.run(batch, prepared).verified == []


def test_a_targets_shape_proposes_nothing(served: Served) -> None:
    shape = served.bucketer.decode_shape(
        Family.TARGET_WITH_SPEC, num_seqs=ROWS, context_need=40, query_len=1 + K
    )
    with pytest.raises(ConfigError, match="draft"):
        served.dispatcher.propose(shape, served.draft_batch())


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint32, np.int32])
def test_columns_of_narrow_arrays_do_not_wrap_around(served: Served, dtype: type) -> None:
    near = np.array([MAX_MODEL_LEN - 2], dtype=dtype)
    plain = served.dispatcher.select(Step([Row(MAX_MODEL_LEN - 2)]))
    assert served.dispatcher.select(Step(Rows(near))) == plain
    with pytest.raises(AboveLadder):
        served.dispatcher.select(Step(Rows(np.array([127], dtype=dtype))))


def test_a_policy_by_its_name(served: Served) -> None:
    rows = Rows([20, 30], num_drafts=[K, K], post_transfer=[True, False])
    by_name, by_member = (
        served.dispatcher.run(served.batch(rows, post_transfer_policy=policy))
        for policy in ("padded", PostTransferPolicy.PADDED)
    )
    assert by_name[:2] == by_member[:2]


def test_an_unknown_policy(served: Served) -> None:
    rows = Rows([20, 30], post_transfer=[True, False])
    batch = served.batch(rows, post_transfer_policy="nope")
    error = refused(served, lambda: served.dispatcher.run(batch))
    assert error.field == "post_transfer_policy"


def test_an_unknown_fallback(served: Served) -> None:
    with pytest.raises(ConfigError, match="'smaller'; allowed: None, 'larger'"):
        Dispatcher(served.bucketer, None, {}, fallback="smaller")


def test_a_number_of_numpys_is_one_of_a_step(served: Served) -> None:
    step = Step(Rows([20]))
    assert served.dispatcher.prepare(np.int64(3), step) == served.dispatcher.prepare(3, step)


@pytest.mark.parametrize("number", [-1, 1.5, None])
def test_a_number_that_is_none_of_a_step(served: Served, number: Any) -> None:
    with pytest.raises(ConfigError, match="allowed: integers from 0"):
        served.dispatcher.prepare(number, Step(Rows([20])))
