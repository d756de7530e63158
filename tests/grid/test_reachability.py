"""Every state a small engine can get into, against what the grid claims can and cannot occur."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
from grid_samples import UNIFORM, VARLEN, bucketer
from naive_engine import Seen, explore

from neffbuild.grid.bucketer import Bucketer, QueryLenSupport
from neffbuild.grid.coverage import check_coverage
from neffbuild.grid.expand import Need, WarmUp, expand
from neffbuild.grid.shapes import Family
from neffbuild.grid.step import PostTransferPolicy


@dataclass(frozen=True, eq=False)
class Case:
    name: str
    support: QueryLenSupport = VARLEN
    num_seqs: tuple[int, ...] = (1, 2)
    ranks: int = 1
    options: dict[str, Any] = field(default_factory=dict)

    def bucketer(self) -> Bucketer:
        return bucketer(
            self.support, num_seqs=self.num_seqs, data_parallel_size=self.ranks, **self.options
        )


def case(name: str, support: QueryLenSupport = VARLEN, *, ranks: int = 1, **options: Any) -> Any:
    num_seqs = options.pop("num_seqs", (1, 2))
    return pytest.param(Case(name, support, num_seqs, ranks, options), id=name)


CASES = [
    case("no speculation", num_seqs=(1, 2, 3), contexts=(3, 5), max_model_len=9),
    case("no speculation, M one above", num_seqs=(1, 2), contexts=(4, 8), max_model_len=9),
    case("no speculation, contexts off", num_seqs=(2, 3), contexts=None, max_model_len=6),
    case("one position", num_seqs=(1,), contexts=None, max_model_len=2),
    *(
        case(f"{support}, {name}", support, **options)
        for support in (UNIFORM, VARLEN)
        for name, options in {
            "K 1, three rows": {
                "num_seqs": (1, 2, 3), "contexts": (3, 6), "max_model_len": 7, "spec_tokens": 1
            },
            "K 1, M one above": {"contexts": (4, 8), "max_model_len": 9, "spec_tokens": 1},
            "K 2, M one above": {"contexts": (4, 8), "max_model_len": 9, "spec_tokens": 2},
            "K 3, M two above": {"contexts": (2, 9), "max_model_len": 11, "spec_tokens": 3},
            "contexts off": {"contexts": None, "max_model_len": 8, "spec_tokens": 2},
            "one rung of two rows": {
                "num_seqs": (2,), "contexts": (4, 8), "max_model_len": 9, "spec_tokens": 1
            },
            "short draft": {
                "contexts": (3, 6, 8), "max_model_len": 10, "spec_tokens": 2, "draft_limit": 7
            },
            "short draft, one above": {
                "contexts": (3, 6, 8), "max_model_len": 10, "spec_tokens": 2,
                "draft_max_positions": 7,
            },
            "draft too short for a wide step": {
                "contexts": (2, 3, 4), "max_model_len": 9, "spec_tokens": 2, "draft_limit": 5
            },
            "draft too short to run": {
                "contexts": (4,), "max_model_len": 8, "spec_tokens": 3, "draft_limit": 4
            },
            "three positions": {"contexts": (2,), "max_model_len": 3, "spec_tokens": 1},
            "too short to speculate": {"contexts": (3,), "max_model_len": 4, "spec_tokens": 3},
            "short and wide": {"contexts": (4, 5), "max_model_len": 6, "spec_tokens": 3},
            "two ranks": {
                "ranks": 2, "num_seqs": (1,), "contexts": (4, 8), "max_model_len": 9,
                "spec_tokens": 2,
            },
        }.items()
    ),
    case("query ladder", UNIFORM, contexts=(4, 7), max_model_len=9, spec_tokens=3, verify=(2, 4)),
    case(
        "query ladder, own drafts end one above the draft's limit", UNIFORM,
        contexts=(6, 7), max_model_len=10, spec_tokens=3, verify=(3, 4), draft_limit=6,
    ),
    case(
        "query ladder, draft too short to run", UNIFORM,
        contexts=(6,), max_model_len=9, spec_tokens=3, verify=(2, 4), draft_limit=3,
    ),
    case("every width", UNIFORM, contexts=(4, 8), max_model_len=9, spec_tokens=2, verify=(2, 3)),
    case(
        "query ladder, short draft", UNIFORM,
        contexts=(4, 6, 8), max_model_len=10, spec_tokens=3, verify=(3, 4), draft_limit=7,
    ),
]  # fmt: skip


@cache
def simulate(case: Case) -> Seen:
    """What occurs under one policy or the other."""
    seen = Seen()
    for policy in PostTransferPolicy:
        found = explore(case.bucketer(), policy, case.num_seqs[-1], case.ranks)
        seen.dispatched |= found.dispatched
        seen.states |= found.states
        seen.reasons |= found.reasons
    return seen


@pytest.mark.parametrize("case", CASES)
def test_every_claim_of_the_grid_against_every_state_of_an_engine(case: Case) -> None:
    subject = case.bucketer()
    seen = simulate(case)
    grid = expand(subject, WarmUp.REACHABLE)
    required = set(grid.with_need(Need.REQUIRED))
    cannot_occur = set(grid.with_need(Need.CANNOT_OCCUR))
    assert {shape.bucket_name for shape in seen.dispatched - required} == set()
    assert {shape.bucket_name for shape in required - seen.dispatched} == set()
    assert not seen.dispatched & cannot_occur
    assert len(required) + len(cannot_occur) == len(grid.shapes)

    warmed = expand(subject, WarmUp.FULL_PRODUCT)
    assert set(warmed.with_need(Need.REQUIRED)) == required
    assert set(warmed.with_need(Need.ENUMERATED_ONLY)) == cannot_occur


@pytest.mark.parametrize("case", CASES)
def test_coverage_counts_exactly_the_states_of_an_engine(case: Case) -> None:
    subject = case.bucketer()
    seen = simulate(case)
    covered = check_coverage(subject, seen.dispatched)
    assert covered.states_checked == len(seen.states)
    assert covered.uncovered == ()

    nothing = check_coverage(subject, [])
    listed = [
        (states.family, num_seqs, need)
        for states in nothing.uncovered
        for num_seqs in range(states.num_seqs[0], states.num_seqs[1] + 1)
        for need in range(states.context_need[0], states.context_need[1] + 1)
    ]
    assert set(listed) == seen.states
    assert {states.missing for states in nothing.uncovered} == seen.dispatched


def test_the_engine_meets_every_reason() -> None:
    reasons = set()
    for parameters in CASES:
        case = parameters.values[0]
        reasons |= simulate(case).reasons
    expected = {
        "no_speculation", "drafts_to_verify", "post_transfer_padded", "post_transfer_without_spec",
        "forced_without_spec", "near_max_model_len", "nothing_drafted", "proposes",
        "near_draft_limit",
    }  # fmt: skip
    assert expected <= reasons


def test_the_unreachable_examples() -> None:
    subject = bucketer(num_seqs=(1, 2), contexts=(16384,), max_model_len=16385, spec_tokens=5)
    grid = expand(subject, WarmUp.REACHABLE)
    unreached = [
        (gridded.shape.bucket_name, gridded.reason) for gridded in grid.shapes if gridded.reason
    ]
    stopped = (
        "no target-without-spec step needs more than 16384 positions: "
        "max_model_len is 16385, where a request is stopped"
    )
    limited = "no draft step needs more than 16384 positions: the draft's limit is 16385 positions"
    assert unreached == [
        ("decode_b1_s1_ctx16385", stopped),
        ("decode_b2_s1_ctx16385", stopped),
        # With two rows, one may draft beside another at the very limit.
        ("draft_b1_s6_ctx16385", limited),
    ]
    assert grid.unreached == {stopped: 2, limited: 1}


def test_full_context_is_kept_for_the_largest_batch() -> None:
    subject = bucketer(num_seqs=(1, 8), max_model_len=131072, num_gpu_blocks_override=64)
    eight_rows = subject.decode_shape(Family.TARGET, num_seqs=8, context_need=131071)
    assert eight_rows.bucket_name == "decode_b8_ctx131072"
    assert eight_rows in expand(subject, WarmUp.REACHABLE).with_need(Need.REQUIRED)
