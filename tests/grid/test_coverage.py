"""Coverage by interval."""

from __future__ import annotations

import time

from grid_samples import UNIFORM, bucketer

from neffbuild.grid.bucketer import Bucketer
from neffbuild.grid.coverage import check_coverage
from neffbuild.grid.expand import Need, WarmUp, expand
from neffbuild.grid.phases import Phase
from neffbuild.grid.shapes import DecodeShape, Family, Shape


def required(subject: Bucketer, *phases: Phase) -> list[Shape]:
    return expand(subject, WarmUp.REACHABLE, phases or (Phase.DECODE,)).with_need(Need.REQUIRED)


def test_a_missing_shape_is_an_interval_of_states() -> None:
    subject = bucketer(num_seqs=(1, 4, 8))
    missing = DecodeShape(Family.TARGET, 4, 1, 8192)
    coverage = check_coverage(subject, set(required(subject)) - {missing})
    (states,) = coverage.uncovered
    assert states.family is Family.TARGET
    assert (states.num_seqs, states.context_need) == ((2, 4), (4097, 8192))
    assert (states.missing, states.reason) == (missing, "decode_b4_ctx8192 is missing")
    assert coverage.states_checked == 8 * (131071 - 1)


def test_a_floor_takes_states_out() -> None:
    subject = bucketer(num_seqs=(1, 4, 8), spec_tokens=2, floors={Family.DRAFT: 3})
    nothing = check_coverage(subject, [])
    draft = [states.num_seqs for states in nothing.uncovered if states.family is Family.DRAFT]
    assert set(draft) == {(3, 4), (5, 8)}


def test_one_missing_query_length() -> None:
    subject = bucketer(UNIFORM, num_seqs=(2,), spec_tokens=3, verify=(2, 4))
    missing = subject.decode_shape(Family.DRAFT, num_seqs=2, query_len=4, context_need=5000)
    coverage = check_coverage(subject, set(required(subject)) - {missing})
    assert [(s.num_seqs, s.context_need, s.missing) for s in coverage.uncovered] == [
        ((1, 2), (4097, 8192), missing)
    ]


def test_prefill_gaps_are_listed_beside() -> None:
    subject = bucketer(max_num_batched_tokens=256, spec_tokens=2, max_model_len=32768)
    coverage = check_coverage(subject, required(subject))
    assert coverage.uncovered == ()
    assert [gap.family for gap in coverage.prefill_gaps] == [Family.PREFILL, Family.DRAFT_PREFILL]
    gap = coverage.prefill_gaps[0]
    assert gap.context_need == (1, 32767)
    assert gap.reason.startswith("prefill_s128, prefill_s256 missing")
    whole = check_coverage(subject, required(subject, *Phase))
    assert whole.prefill_gaps == ()


def test_a_large_deployment_is_checked_at_once() -> None:
    subject = bucketer(
        num_seqs=tuple(range(1, 257)),
        contexts=(4096, 16384, 65536),
        spec_tokens=5,
    )
    started = time.process_time()
    coverage = check_coverage(subject, required(subject))
    assert time.process_time() - started < 2
    assert coverage.uncovered == ()
    assert coverage.states_checked > 256 * 131000 * 3 - 256 * 5000
