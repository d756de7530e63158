"""What a step of the greedy decoder runs in, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from eager_programs import EagerLoader
from serving import Serving
from spec_models import MAX_MODEL_LEN, build_config, cyclic_pair, random_pair

from neffbuild.config.errors import AboveLadder, ConfigError
from neffbuild.grid.acceptance import fixed_budget
from neffbuild.grid.bucketer import QueryLenSupport
from neffbuild.grid.select import DraftReason, TargetReason
from neffbuild.grid.shapes import Family
from neffbuild.grid.step import PostTransferPolicy, Row, Step
from neffbuild.models.decode import named_kv_caches
from neffbuild.runtime.batch import DecodeBatch
from neffbuild.runtime.dispatcher import Dispatcher
from neffbuild.runtime.speculation import GreedyDecoder

UNIFORM, VARLEN = QueryLenSupport.UNIFORM, QueryLenSupport.VARLEN
BOTH = pytest.mark.parametrize("support", QueryLenSupport)


def serving(spec_tokens: int = 3, make_pair=random_pair, verify=None, **options) -> Serving:
    config = build_config(spec_tokens, verify=verify)
    return Serving(make_pair, config, fixed_budget(spec_tokens), **options)


def warmed_up(subject: Serving, *known: int) -> Serving:
    """With requests that have been through a step, so that each brings K drafts."""
    for prompt, tokens in enumerate(known):
        subject.join(prompt, tokens)
    subject.step()
    return subject


def test_a_request_that_joins_brings_no_drafts_and_gets_some():
    subject = serving()
    one = subject.join(0, 20)
    step = subject.step()
    assert step.shapes.target.family is Family.TARGET_WITHOUT_SPEC
    assert (step.shapes.target_reason, step.shapes.draft_reason) == (
        TargetReason.NOTHING_DRAFTED, DraftReason.PROPOSES,
    )  # fmt: skip
    assert (step.verified, step.accepted, step.proposed) == ([0], [0], [True])
    assert len(one.request.drafts) == 3
    assert subject.step().verified == [3]


@BOTH
def test_a_received_request_takes_the_whole_batch_out_of_speculation(support):
    subject = warmed_up(serving(support=support), 20, 30)
    subject.join(2, 40, post_transfer=True)
    step = subject.step()
    assert step.shapes.target_reason is TargetReason.POST_TRANSFER_WITHOUT_SPEC
    assert step.verified == [0, 0, 0]
    assert step.proposed == [True, True, True]
    # Once: after it there are auxiliary hidden states to draft from.
    assert subject.step().verified == [3, 3, 3]


@BOTH
def test_a_received_request_gets_placeholders_and_leaves_the_others_their_drafts(support):
    subject = warmed_up(serving(support=support, policy=PostTransferPolicy.PADDED), 20, 30)
    subject.join(2, 40, post_transfer=True)
    step = subject.step()
    assert step.shapes.target_reason is TargetReason.POST_TRANSFER_PADDED
    assert step.shapes.target.family is Family.TARGET_WITH_SPEC
    assert step.verified == [3, 3, 0]  # placeholders are nobody's drafts
    assert step.accepted[2] == 0
    assert subject.decoder.acceptance.verified == [2, 2, 2]
    assert subject.step().verified == [3, 3, 3]


def test_a_placeholder_that_happens_to_be_right_is_not_accepted():
    subject = serving(make_pair=cyclic_pair, policy=PostTransferPolicy.PADDED)
    # Placeholders are token 0; take a request up where that is what comes next.
    prompt, known = next(
        (prompt, tokens.index(0, 2))
        for prompt, tokens in enumerate(subject.truth.tokens)
        if 0 in tokens[2:60]
    )
    one = subject.join(prompt, known, post_transfer=True)
    subject.step()
    assert len(one.request.tokens) == known + 1


@BOTH
def test_an_engine_may_force_a_step_without_drafts(support):
    subject = warmed_up(serving(support=support), 20)
    step = subject.step(force_without_spec=True)
    assert step.shapes.target_reason is TargetReason.FORCED_WITHOUT_SPEC
    assert (step.verified, step.proposed) == ([0], [True])


def test_a_uniform_step_runs_in_the_smallest_width_that_holds_its_longest_row():
    subject = warmed_up(serving(5, support=UNIFORM, verify=(2, 4, 6)), 10, 20, 30)
    widths = []
    for drafts in ([1, 0, 0], [1, 1, 1], [0, 2, 1], [3, 3, 3], [1, 4, 0], [5, 5, 5], [0, 0, 0]):
        for one, count in zip(subject.running, drafts, strict=True):
            one.request.drafts = one.request.drafts[:count]
        shapes = subject.step().shapes
        widths.append((shapes.target.query_len, shapes.draft.query_len))
    assert widths == [(2, 2), (2, 2), (4, 4), (4, 4), (6, 6), (6, 6), (1, 2)]


def test_one_program_serves_every_ragged_mix():
    subject = warmed_up(serving(5, support=VARLEN, verify=(2, 4, 6)), 10, 20, 30)
    for drafts in ([1, 0, 0], [0, 2, 1], [1, 4, 0], [5, 5, 5]):
        for one, count in zip(subject.running, drafts, strict=True):
            one.request.drafts = one.request.drafts[:count]
        step = subject.step()
        assert step.verified == drafts
        assert (step.shapes.target.query_len, step.shapes.draft.query_len) == (6, 6)


def test_a_row_near_the_limit_verifies_nothing_and_the_others_go_on():
    subject = warmed_up(serving(), MAX_MODEL_LEN - 6, 20)
    while len(subject.running) == 2:
        near = subject.running[0].request.num_computed_tokens + 1 + 3 > MAX_MODEL_LEN
        step = subject.step()
        assert step.verified[0] == 0 or not near
        assert step.verified[1] == 3
    assert subject.step().verified == [3]


@BOTH
@pytest.mark.parametrize("drafts", [4, 7, 100])
def test_a_batch_wider_than_one_and_k_is_refused(support, drafts):
    """A profiling or dummy batch, say: no program is that wide, and none is picked for it."""
    subject = serving(support=support)
    table = subject.pool.take().unsqueeze(0)
    ids = torch.zeros(1, drafts, dtype=torch.int32)
    batch = DecodeBatch([Row(20, num_drafts=drafts)], torch.tensor([1]), table, ids)
    with pytest.raises(AboveLadder, match="up to 4 tokens per row") as refused:
        subject.dispatcher.run(batch)
    assert "profiling and dummy batches" in refused.value.hint


@pytest.mark.parametrize(("rows", "tokens", "tables"), [(2, 1, 2), (2, 2, 1), (1, 2, 2), (9, 9, 9)])
def test_a_batch_whose_parts_do_not_belong_together_is_refused(rows, tokens, tables):
    subject = serving()
    table = subject.pool.take().expand(tables, -1)
    batch = DecodeBatch([Row(20)] * rows, torch.ones(tokens, dtype=torch.int32), table)
    prepared = subject.dispatcher.prepare(0, Step([Row(20)]))
    before = [tensor.clone() for tensor in subject.pool.tensors]
    sizes = rf"batch of {rows} rows has token_ids \[{tokens}\] and block_table \[{tables}, "
    with pytest.raises(ConfigError, match=sizes):
        subject.dispatcher.run(batch, prepared)
    assert all(map(torch.equal, before, subject.pool.tensors))


def test_a_step_that_outgrew_what_it_was_prepared_for_is_refused():
    subject = serving()
    shapes = subject.dispatcher.prepare(0, Step([Row(20)]))
    grown = Row(shapes.target.context_len)
    assert subject.dispatcher.prepare(0, Step([grown])) == shapes
    batch = DecodeBatch([grown], torch.tensor([1]), subject.pool.take().unsqueeze(0))
    with pytest.raises(
        ConfigError, match=f"prepared for contexts of up to {shapes.target.context_len}"
    ):
        subject.dispatcher.run(batch, shapes)


@pytest.mark.parametrize(
    ("computed", "new"), [(0, 1), (0, 5), (10, 2)], ids=["a prompt of one", "a prompt", "a chunk"]
)
def test_a_prefill_row_is_refused(computed, new):
    subject = serving()
    one = subject.join(0, 11)
    one.request.num_computed_tokens, one.request.tokens = computed, [1] * (computed + new)
    before = [tensor.clone() for tensor in subject.pool.tensors]
    with pytest.raises(ConfigError, match="prefill row"):
        subject.step()
    assert all(map(torch.equal, before, subject.pool.tensors))


def test_the_last_token_of_a_prompt_is_decoded_over_what_a_cache_had():
    subject = serving()
    one = subject.join(0, 11)
    assert subject.step().proposed == [True]
    assert one.request.tokens == subject.truth.tokens[0][:12]


def test_a_draft_that_was_not_handed_over_is_named():
    subject = serving()
    one = subject.join(0, 11)
    tensors = random_pair().tensors | named_kv_caches(subject.pool.target)
    lacking = Dispatcher(subject.bucketer, EagerLoader(build_config(3)), tensors)
    decoder = GreedyDecoder(subject.bucketer, lacking, fixed_budget(3))
    with pytest.raises(ConfigError, match=r"draft_b1_s4_ctx32 needs fc\.weight"):
        decoder.step([one.request])
