"""What a serve config enumerates: counts, order, labels, reasons."""

from __future__ import annotations

import time
from typing import Any

import pytest
from grid_samples import UNIFORM, VARLEN, bucketer
from hypothesis import given
from hypothesis import strategies as st

from neffbuild.grid.bucketer import QueryLenSupport
from neffbuild.grid.expand import Grid, Need, WarmUp, expand
from neffbuild.grid.phases import Phase
from neffbuild.grid.shapes import DecodeShape, Family


def names(grid: Grid) -> list[str]:
    return [gridded.shape.bucket_name for gridded in grid.shapes]


BATCHES = st.sets(st.integers(1, 300), min_size=1, max_size=9).map(lambda b: tuple(sorted(b)))
CONTEXTS = st.sets(st.integers(1, 1023), max_size=6).map(
    lambda tiles: tuple(128 * tile for tile in sorted(tiles)) or None
)


@given(
    BATCHES, CONTEXTS, st.integers(0, 7), st.sampled_from(QueryLenSupport), st.sampled_from(WarmUp)
)
def test_counts(
    num_seqs: tuple[int, ...],
    contexts: tuple[int, ...] | None,
    spec_tokens: int,
    support: QueryLenSupport,
    warm_up: WarmUp,
) -> None:
    subject = bucketer(support, num_seqs=num_seqs, contexts=contexts, spec_tokens=spec_tokens)
    grid = expand(subject, warm_up)
    pairs = len(num_seqs) * (len(contexts or ()) + 1)
    assert len(grid.shapes) == pairs * (3 if spec_tokens else 1)
    assert len(set(names(grid))) == len(grid.shapes)


@given(BATCHES, CONTEXTS, st.integers(1, 7), st.data())
def test_counts_with_a_ladder_of_query_lengths(
    num_seqs: tuple[int, ...],
    contexts: tuple[int, ...] | None,
    spec_tokens: int,
    data: st.DataObject,
) -> None:
    shorter = data.draw(st.sets(st.integers(2, 1 + spec_tokens)))
    verify = tuple(sorted(shorter | {1 + spec_tokens}))
    options: dict[str, Any] = {
        "num_seqs": num_seqs,
        "contexts": contexts,
        "spec_tokens": spec_tokens,
        "verify": verify,
    }
    pairs = len(num_seqs) * (len(contexts or ()) + 1)
    uniform = expand(bucketer(UNIFORM, **options), WarmUp.REACHABLE)
    assert len(uniform.shapes) == pairs * (2 * len(verify) + 1)
    assert len(set(names(uniform))) == len(uniform.shapes)
    assert len(expand(bucketer(VARLEN, **options), WarmUp.REACHABLE).shapes) == pairs * 3


def test_batch_is_the_outer_loop_and_context_the_inner() -> None:
    grid = expand(bucketer(num_seqs=(1, 4), contexts=(4096, 16384)), WarmUp.REACHABLE)
    assert names(grid) == [
        "decode_b1_ctx4096",
        "decode_b1_ctx16384",
        "decode_b1_ctx131072",
        "decode_b4_ctx4096",
        "decode_b4_ctx16384",
        "decode_b4_ctx131072",
    ]


def test_labels_with_speculation() -> None:
    grid = expand(bucketer(num_seqs=(4,), contexts=(16384,), spec_tokens=5), WarmUp.REACHABLE)
    assert names(grid) == [
        "decode_b4_s6_ctx16384",
        "decode_b4_s6_ctx131072",
        "decode_b4_s1_ctx16384",
        "decode_b4_s1_ctx131072",
        "draft_b4_s6_ctx16384",
        "draft_b4_s6_ctx131072",
    ]


def test_without_context_buckets_there_is_one_context_and_no_suffix() -> None:
    grid = expand(bucketer(contexts=None, num_seqs=(1, 2), spec_tokens=2), WarmUp.REACHABLE)
    assert names(grid) == [
        "decode_b1_s3", "decode_b2_s3", "decode_b1_s1", "decode_b2_s1", "draft_b1_s3", "draft_b2_s3",
    ]  # fmt: skip
    contexts = [s.shape.context_len for s in grid.shapes if isinstance(s.shape, DecodeShape)]
    assert set(contexts) == {131072}


@pytest.mark.parametrize("warm_up", WarmUp)
def test_below_a_floor_nothing_can_occur(warm_up: WarmUp) -> None:
    subject = bucketer(
        num_seqs=(1, 2, 4, 8), contexts=(4096,), spec_tokens=2, floors={Family.DRAFT: 4}
    )
    grid = expand(subject, warm_up)
    unreached = {g.shape.bucket_name: g.reason for g in grid.shapes if g.need is Need.CANNOT_OCCUR}
    reason = "draft runs from 4 live sequences up"
    assert unreached == {
        "draft_b1_s3_ctx4096": reason,
        "draft_b1_s3_ctx131072": reason,
        "draft_b2_s3_ctx4096": reason,
        "draft_b2_s3_ctx131072": reason,
    }
    assert grid.unreached == {reason: 4}


def test_a_draft_above_its_limit() -> None:
    options: dict[str, Any] = {
        "num_seqs": (1,), "contexts": (1024, 2048, 4096), "spec_tokens": 3, "draft_limit": 2048
    }  # fmt: skip
    reason = "no draft step needs more than 2047 positions: the draft's limit is 2048 positions"
    grid = expand(bucketer(UNIFORM, **options), WarmUp.FULL_PRODUCT)
    above = [g.shape.bucket_name for g in grid.shapes if g.need is Need.ENUMERATED_ONLY]
    assert above == ["draft_b1_s4_ctx4096", "draft_b1_s4_ctx131072"]
    assert grid.unreached == {reason: 2}
    assert expand(bucketer(UNIFORM, **options), WarmUp.REACHABLE).unreached == {reason: 2}


def test_prefill_is_enumerated_when_asked_for() -> None:
    subject = bucketer(
        num_seqs=(1,), contexts=None, max_model_len=1000, max_num_batched_tokens=300, spec_tokens=2
    )
    prefill = expand(subject, WarmUp.REACHABLE, (Phase.PREFILL,))
    assert names(prefill) == [
        "prefill_s128", "prefill_s256", "prefill_s300",
        "draft_prefill_s128", "draft_prefill_s256", "draft_prefill_s300",
    ]  # fmt: skip
    assert prefill.unreached == {}
    both = expand(subject, WarmUp.REACHABLE, tuple(Phase))
    assert names(both) == names(expand(subject, WarmUp.REACHABLE)) + names(prefill)


def test_no_prompt_fills_the_whole_context() -> None:
    grid = expand(bucketer(max_model_len=16385, contexts=None), WarmUp.REACHABLE, (Phase.PREFILL,))
    assert grid.with_need(Need.CANNOT_OCCUR) == [grid.shapes[-1].shape]
    assert grid.shapes[-1].shape.bucket_name == "prefill_s16385"
    assert grid.unreached == {"a prompt has at most 16384 tokens": 1}


def test_ten_thousand_units_expand_at_once() -> None:
    subject = bucketer(
        num_seqs=tuple(range(1, 105)),
        contexts=tuple(128 * tile for tile in range(1, 32)),
        spec_tokens=3,
        max_model_len=4097,
    )
    seconds = []
    for _ in range(3):
        started = time.process_time()
        grid = expand(subject, WarmUp.REACHABLE)
        seconds.append(time.process_time() - started)
    assert len(grid.shapes) == 104 * 32 * 3
    assert min(seconds) < 0.2
