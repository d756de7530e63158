"""The runtime's choice per step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from grid_samples import UNIFORM, VARLEN, bucketer
from hypothesis import given
from hypothesis import strategies as st

from neffbuild.config.errors import AboveLadder, ConfigError
from neffbuild.grid.bucketer import Bucketer, QueryLenSupport
from neffbuild.grid.expand import Need, WarmUp, expand
from neffbuild.grid.select import (
    IDLE,
    DraftReason,
    Override,
    StepShapes,
    StepState,
    TargetReason,
    next_larger,
    proposes,
    select_shapes,
    step_state,
    verified_drafts,
)
from neffbuild.grid.shapes import DecodeShape, Family
from neffbuild.grid.step import PostTransferPolicy, Row, Rows, Step, is_decode_row

PADDED, WITHOUT_SPEC = PostTransferPolicy.PADDED, PostTransferPolicy.WITHOUT_SPEC
BOTH = pytest.mark.parametrize("support", QueryLenSupport)


def select(subject: Bucketer, step: Step) -> StepShapes:
    return select_shapes(subject, step_state(subject, step))


def picked(subject: Bucketer, *rows: Row, **step: Any) -> tuple[str | None, str | None, str, str]:
    shapes = select(subject, Step(rows, **step))
    return (
        shapes.target.bucket_name if shapes.target else None,
        shapes.draft.bucket_name if shapes.draft else None,
        shapes.target_reason,
        shapes.draft_reason,
    )


def spec(support: QueryLenSupport = VARLEN, **options: Any) -> Bucketer:
    """K = 5 over contexts 128, 256, 1024."""
    defaults = {"contexts": (128, 256), "max_model_len": 1024, "spec_tokens": 5}
    return bucketer(support, **{**defaults, **options})


@pytest.mark.parametrize(
    ("computed", "name"),
    [
        (1, "decode_b1_ctx4096"),
        (4095, "decode_b1_ctx4096"),
        (4096, "decode_b1_ctx8192"),
        (16384, "decode_b1_ctx131072"),
        (131071, "decode_b1_ctx131072"),
    ],
)
def test_without_speculation_a_row_needs_its_next_position(computed: int, name: str) -> None:
    assert picked(bucketer(), Row(computed)) == (name, None, "no_speculation", "no_speculation")


@BOTH
@pytest.mark.parametrize(
    ("computed", "target", "draft"),
    [
        (100, "128", "128"),
        (118, "128", "128"),  # the draft needs exactly 118 + 5 + 5
        (119, "128", "256"),
        (122, "128", "256"),  # the target needs exactly 122 + 1 + 5
        (123, "256", "256"),
        (246, "256", "256"),
        (247, "256", "1024"),
    ],
)
def test_target_and_draft_cover_their_own_needs(
    support: QueryLenSupport, computed: int, target: str, draft: str
) -> None:
    assert picked(spec(support), Row(computed, num_drafts=5)) == (
        f"decode_b1_s6_ctx{target}",
        f"draft_b1_s6_ctx{draft}",
        "drafts_to_verify",
        "proposes",
    )


@BOTH
@pytest.mark.parametrize(
    ("computed", "target", "draft"), [(123, "128", "128"), (124, "128", "256"), (128, "256", "256")]
)
def test_nothing_drafted(support: QueryLenSupport, computed: int, target: str, draft: str) -> None:
    assert picked(spec(support), Row(computed)) == (
        f"decode_b1_s1_ctx{target}",
        f"draft_b1_s6_ctx{draft}",
        "nothing_drafted",
        "proposes",
    )


@BOTH
@pytest.mark.parametrize(
    ("computed", "expected"),
    [
        (1013, ("decode_b1_s6_ctx1024", "draft_b1_s6_ctx1024", "drafts_to_verify", "proposes")),
        (1014, ("decode_b1_s6_ctx1024", None, "drafts_to_verify", "near_draft_limit")),
        (1018, ("decode_b1_s6_ctx1024", None, "drafts_to_verify", "near_draft_limit")),
        (1019, ("decode_b1_s1_ctx1024", None, "near_max_model_len", "near_draft_limit")),
        (1022, ("decode_b1_s1_ctx1024", None, "near_max_model_len", "near_draft_limit")),
    ],
)
def test_near_the_limit_alone(
    support: QueryLenSupport, computed: int, expected: tuple[str, ...]
) -> None:
    assert picked(spec(support), Row(computed, num_drafts=5)) == expected


def test_near_the_limit_uniform_programs_hold_the_whole_batch_to_the_longest_row() -> None:
    rows = Row(1019, num_drafts=5), Row(10, num_drafts=5)
    assert picked(spec(UNIFORM), *rows) == (
        "decode_b2_s1_ctx1024",
        None,
        "near_max_model_len",
        "near_draft_limit",
    )


def test_near_the_limit_variable_length_programs_hold_each_row_by_itself() -> None:
    subject = spec(VARLEN)
    long, short = Row(1019, num_drafts=5), Row(10, num_drafts=3)
    step = Step([long, short])
    shapes = select(subject, step)
    assert shapes.target is not None
    assert shapes.target.bucket_name == "decode_b2_s6_ctx1024"
    assert shapes.draft is not None
    assert shapes.draft.bucket_name == "draft_b2_s6_ctx1024"
    assert verified_drafts(subject, step, shapes) == [0, 3]
    assert [proposes(subject, row, shapes) for row in step.rows] == [False, True]


def test_a_draft_need_beyond_its_limit_counts_up_to_the_limit() -> None:
    subject = spec(VARLEN, draft_limit=256)
    assert picked(subject, Row(900, num_drafts=1), Row(10)) == (
        "decode_b2_s6_ctx1024",
        "draft_b2_s6_ctx256",
        "drafts_to_verify",
        "proposes",
    )


@BOTH
def test_a_draft_limit_of_its_own(support: QueryLenSupport) -> None:
    subject = spec(support, draft_limit=200)
    assert picked(subject, Row(189, num_drafts=5))[1] == "draft_b1_s6_ctx256"
    assert picked(subject, Row(190, num_drafts=5))[1::2] == (None, "near_draft_limit")
    assert picked(subject, Row(194))[1] == "draft_b1_s6_ctx256"
    assert picked(subject, Row(195))[1::2] == (None, "near_draft_limit")


@BOTH
def test_first_decode_step_after_a_transfer(support: QueryLenSupport) -> None:
    subject = spec(support)
    rows = Row(100, num_drafts=5), Row(50, post_transfer=True)
    assert picked(subject, *rows)[0::2] == ("decode_b2_s1_ctx128", "post_transfer_without_spec")
    padded = picked(subject, *rows, post_transfer_policy=PADDED)
    assert padded[0::2] == ("decode_b2_s6_ctx128", "post_transfer_padded")
    step = Step(rows, PADDED)
    shapes = select(subject, step)
    assert verified_drafts(subject, step, shapes) == [5, 5]
    step = Step(rows, WITHOUT_SPEC)
    shapes = select(subject, step)
    assert verified_drafts(subject, step, shapes) == [0, 0]


@BOTH
def test_placeholders_near_the_limit_are_no_reason_to_go_beyond_it(
    support: QueryLenSupport,
) -> None:
    row = Row(1019, post_transfer=True)
    assert picked(spec(support), row, post_transfer_policy=PADDED)[0::2] == (
        "decode_b1_s1_ctx1024",
        "near_max_model_len",
    )


@BOTH
def test_forced_without_spec(support: QueryLenSupport) -> None:
    assert picked(spec(support), Row(100, num_drafts=5), force_without_spec=True) == (
        "decode_b1_s1_ctx128",
        "draft_b1_s6_ctx128",
        "forced_without_spec",
        "proposes",
    )


@BOTH
def test_no_row_wants_to_propose(support: QueryLenSupport) -> None:
    row = Row(100, num_drafts=5, wants_to_propose=False)
    assert picked(spec(support), row)[1::2] == (None, "not_wanted")
    other = picked(spec(support), row, Row(20))
    assert other[1::2] == ("draft_b2_s6_ctx128", "proposes")


@pytest.mark.parametrize(("drafts", "width"), [(0, 1), (1, 2), (2, 4), (3, 4), (4, 6), (5, 6)])
def test_uniform_widths_cover_the_longest_row(drafts: int, width: int) -> None:
    subject = spec(UNIFORM, verify=(2, 4, 6))
    target, draft, *_ = picked(subject, Row(10), Row(10, num_drafts=drafts))
    assert target == f"decode_b2_s{width}_ctx128"
    assert draft == f"draft_b2_s{max(width, 2)}_ctx128"


@pytest.mark.parametrize("drafts", range(1, 6))
def test_variable_length_width_is_the_configured_maximum(drafts: int) -> None:
    target, draft, *_ = picked(spec(VARLEN, verify=(2, 4, 6)), Row(10, num_drafts=drafts))
    assert (target, draft) == ("decode_b1_s6_ctx128", "draft_b1_s6_ctx128")


@BOTH
@pytest.mark.parametrize("override", Override)
def test_wider_than_one_plus_k_is_refused(support: QueryLenSupport, override: Override) -> None:
    with pytest.raises(AboveLadder, match="up to 6 tokens per row") as refused:
        select_shapes(spec(support), StepState(1, 10, query_len=7, override=override))
    assert refused.value.value == 7
    with pytest.raises(AboveLadder, match="up to 1 tokens per row"):
        select_shapes(bucketer(support), StepState(1, 10, query_len=2))


@BOTH
@pytest.mark.parametrize("query_len", [1, 6])
def test_above_max_model_len_is_an_error(support: QueryLenSupport, query_len: int) -> None:
    subject = spec(support)
    at_limit = StepState(1, 1023, query_len)
    assert select_shapes(subject, at_limit).target is not None
    with pytest.raises(AboveLadder, match="1025"):
        select_shapes(subject, at_limit._replace(num_computed_tokens=1024))


def test_more_rows_than_max_num_seqs_is_an_error() -> None:
    assert picked(bucketer(), *[Row(10)] * 4)[0] == "decode_b4_ctx4096"
    with pytest.raises(AboveLadder, match="a step needs 5"):
        select(bucketer(), Step([Row(10)] * 5))


@pytest.mark.parametrize(
    ("row", "decodes"),
    [
        (
            Row(num_computed_tokens=9, num_new_tokens=1),
            True,
        ),  # the last prompt token, or a sampled one
        (Row(num_computed_tokens=0, num_new_tokens=1), False),  # a prompt of one token
        (Row(num_computed_tokens=9, num_new_tokens=2), False),  # one of two may be scheduled
        (Row(num_computed_tokens=0, num_new_tokens=10), False),  # a prompt, or recomputation
    ],
)
def test_which_rows_decode(row: Row, decodes: bool) -> None:
    assert is_decode_row(row) is decodes


@pytest.mark.parametrize("subject", [bucketer(), spec(UNIFORM), spec(VARLEN)])
def test_a_batch_with_a_prefill_row_matches_no_decode_program(subject: Bucketer) -> None:
    prefill = Row(num_computed_tokens=0, num_new_tokens=1)
    assert picked(subject, Row(10), prefill) == (None, None, "holds_prefill", "holds_prefill")
    mine = step_state(subject, Step([Row(10)]))
    other = step_state(subject, Step([prefill]))
    for state in (reduced(mine, other), reduced(other, mine)):
        assert select_shapes(subject, state).target is None


def reduced(*states: StepState) -> StepState:
    return StepState(*map(max, zip(*states, strict=True)))


def test_an_idle_rank_follows_the_busy_one() -> None:
    subject = spec(VARLEN)
    busy = step_state(subject, Step([Row(300, num_drafts=2), Row(4)]))
    assert reduced(busy, IDLE) == busy
    alone = select_shapes(subject, IDLE).target
    assert alone is not None
    assert alone.bucket_name == "decode_b1_s1_ctx128"


@BOTH
def test_one_rank_forces_the_group(support: QueryLenSupport) -> None:
    subject = spec(support)
    drafting = step_state(subject, Step([Row(100, num_drafts=5)]))
    received = step_state(subject, Step([Row(50, post_transfer=True)]))
    shapes = select_shapes(subject, reduced(drafting, received))
    assert shapes.target_reason is TargetReason.POST_TRANSFER_WITHOUT_SPEC
    assert shapes.draft_reason is DraftReason.PROPOSES


ROWS = st.builds(
    Row,
    num_computed_tokens=st.integers(1, 1022),
    num_new_tokens=st.just(1),
    num_drafts=st.integers(0, 5),
    post_transfer=st.booleans(),
    wants_to_propose=st.booleans(),
)
STEPS = st.builds(
    Step,
    st.lists(ROWS, min_size=1, max_size=8),
    st.sampled_from(PostTransferPolicy),
    st.booleans(),
)
LADDERS = st.fixed_dictionaries(
    {
        "num_seqs": st.sampled_from([(8,), (1, 2, 4, 8), (3, 8)]),
        "contexts": st.sampled_from([None, (128,), (128, 256, 896)]),
        "verify": st.sampled_from([None, (2, 6), (3, 4, 6)]),
        "draft_limit": st.sampled_from([None, 1024, 500, 256]),
    }
)


@given(STEPS, LADDERS, st.sampled_from(QueryLenSupport))
def test_the_rules_of_dispatch_spelled_out(
    step: Step, ladders: dict[str, Any], support: QueryLenSupport
) -> None:
    """An own statement of the rules, in terms of rows."""
    subject = spec(support, **ladders)
    limit, draft_limit = 1024, ladders["draft_limit"] or 1024
    contexts = [*(ladders["contexts"] or ()), limit]
    computed = [row.num_computed_tokens for row in step.rows]
    longest = max(computed)
    received = any(row.post_transfer for row in step.rows)
    fits = [n + 1 + 5 <= limit for n in computed]
    budgets = [
        5 if row.post_transfer and step.post_transfer_policy is PADDED else row.num_drafts
        for row in step.rows
    ]
    if support is VARLEN:
        budgets = [budget if fit else 0 for budget, fit in zip(budgets, fits, strict=True)]
    with_spec = (
        not step.force_without_spec
        and not (received and step.post_transfer_policy is WITHOUT_SPEC)
        and any(budgets)
        and (support is VARLEN or all(fits))
    )
    d = 5 if with_spec else 0
    wishing = [row.num_computed_tokens for row in step.rows if row.wants_to_propose]
    if support is VARLEN:
        proposing = [n for n in wishing if n + 1 + d + 5 <= draft_limit]
    else:
        proposing = wishing if longest + 1 + d + 5 <= draft_limit else []

    shapes = select(subject, step)
    assert shapes.target is not None
    assert shapes.target.num_seqs == min(b for b in ladders["num_seqs"] if b >= len(step.rows))
    assert shapes.target.context_len == min(c for c in contexts if c >= min(longest + 1 + d, limit))
    if with_spec:
        rungs = (ladders["verify"] or (6,)) if support is UNIFORM else (6,)
        assert shapes.target.query_len == min(q for q in rungs if q >= 1 + max(budgets))
        verified = budgets
    else:
        assert shapes.target.query_len == 1
        verified = [0] * len(budgets)
    assert verified_drafts(subject, step, shapes) == verified
    assert (shapes.draft is not None) == bool(proposing)
    if shapes.draft is not None:
        need = min(longest + d + 5, draft_limit)
        assert shapes.draft.context_len == min(c for c in contexts if c >= need)
        asked = [row.num_computed_tokens for row in step.rows if proposes(subject, row, shapes)]
        assert sorted(asked) == sorted(proposing)


@given(
    st.lists(STEPS, min_size=2, max_size=4),
    LADDERS,
    st.sampled_from(QueryLenSupport),
    st.sampled_from(PostTransferPolicy),
)
def test_ranks_choose_as_if_their_rows_were_one_batch(
    steps: list[Step],
    ladders: dict[str, Any],
    support: QueryLenSupport,
    policy: PostTransferPolicy,
) -> None:
    subject = spec(support, **ladders)
    steps = [replace(step, post_transfer_policy=policy) for step in steps]
    group = reduced(*(step_state(subject, step) for step in steps))
    rows = [row for step in steps for row in step.rows]
    together = step_state(
        subject, Step(rows, policy, any(step.force_without_spec for step in steps))
    )
    largest = max(len(step.rows) for step in steps)
    assert group == together._replace(num_seqs=largest)


@given(STEPS, LADDERS, st.sampled_from(QueryLenSupport))
def test_what_is_dispatched_is_required(
    step: Step, ladders: dict[str, Any], support: QueryLenSupport
) -> None:
    subject = spec(support, data_parallel_size=2, **ladders)
    required = set(expand(subject, WarmUp.REACHABLE).with_need(Need.REQUIRED))
    shapes = select(subject, step)
    assert {shapes.target, shapes.draft} - {None} <= required


@given(
    st.lists(st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([128, 256, 512])), max_size=6),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([128, 256, 512]),
)
def test_the_next_larger_program_reads_the_least_of_those_that_hold_the_step(
    available: list[tuple[int, int]], num_seqs: int, context: int
) -> None:
    shapes = [DecodeShape(Family.TARGET, rows, 1, length) for rows, length in available]
    others = [DecodeShape(Family.DRAFT, 4, 1, 512), DecodeShape(Family.TARGET, 4, 2, 512)]
    wanted = DecodeShape(Family.TARGET, num_seqs, 1, context)
    found = next_larger(wanted, [*others, *shapes])
    holding = [one for one in available if one[0] >= num_seqs and one[1] >= context]
    if not holding:
        assert found is None
    else:
        assert found is not None
        assert (found.num_seqs, found.context_len) in holding
        assert found.num_seqs * found.context_len == min(r * c for r, c in holding)


def test_a_rank_without_rows_has_nothing_to_verify_in_its_peers_step():
    subject = spec()
    shapes = select(subject, Step([Row(20, num_drafts=3)]))
    assert shapes.target.family is Family.TARGET_WITH_SPEC
    assert verified_drafts(subject, Step([]), shapes) == []


_ROWS = st.lists(
    st.builds(
        Row,
        st.integers(0, 1023),
        st.integers(1, 3),
        st.integers(0, 5),
        st.booleans(),
        st.booleans(),
    ),
    max_size=4,
)


@given(_ROWS, st.sampled_from(PostTransferPolicy), st.sampled_from(QueryLenSupport))
def test_rows_by_column_are_the_same_rows(
    rows: list[Row], policy: PostTransferPolicy, support: QueryLenSupport
) -> None:
    subject = spec(support)
    columns = Rows(*zip(*rows, strict=True)) if rows else Rows([])
    assert list(columns) == rows
    assert list(columns[1:]) == rows[1:]
    one, other = Step(rows, policy), Step(columns, policy)
    state = step_state(subject, one)
    assert step_state(subject, other) == state
    shapes = select_shapes(subject, state)
    assert verified_drafts(subject, one, shapes) == verified_drafts(subject, other, shapes)


def test_columns_left_out_have_the_defaults_of_a_row() -> None:
    assert list(Rows([7, 300])) == [Row(7), Row(300)]
    assert list(Rows([7, 300], num_drafts=[2, 0])) == [Row(7, num_drafts=2), Row(300)]
    assert len(Rows([])) == 0


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'num_computed_tokens': 2.*'num_drafts': 1"):
        Rows([7, 300], num_drafts=[2])
