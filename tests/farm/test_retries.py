"""Which failures are tried again, and when."""

from __future__ import annotations

from pathlib import Path

import farmtools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neffbuild.farm.admission import Claim, Resources
from neffbuild.farm.outcomes import Cause, CauseKind, Outcome, UnitResult
from neffbuild.farm.retries import CROWDED, TRANSIENT, Retry, enlarged, retry_of

OOM = Cause(CauseKind.OUT_OF_MEMORY, "")
LOST = Cause(CauseKind.LOST_WORKER, "")


def decided(
    cause: Cause,
    failures: int = 1,
    *,
    alone: bool = False,
    over: bool = False,
    retries: int = 3,
    chance: float = 0.0,
) -> Retry | None:
    return retry_of(
        cause,
        failures=failures,
        was_alone=alone,
        over_own_limit=over,
        retries=retries,
        chance=chance,
    )


@given(
    st.sampled_from(CauseKind),
    st.integers(1, 2000),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2000),
    st.floats(0, 1, exclude_max=True),
)
def test_what_is_tried_again(
    kind: CauseKind, failures: int, alone: bool, over: bool, retries: int, chance: float
) -> None:
    retry = decided(
        Cause(kind, ""), failures, alone=alone, over=over, retries=retries, chance=chance
    )
    if failures > retries or kind not in TRANSIENT | CROWDED:
        assert retry is None
    elif kind in TRANSIENT:
        assert retry is not None
        assert not retry.alone
        assert 0.5 <= retry.pause < 60
    elif alone or over:
        assert retry is None
    else:
        assert retry == Retry(0.0, alone=True)


def test_deterministic_failures_are_final() -> None:
    for kind in (
        CauseKind.COMPILER_ERROR,
        CauseKind.TIMEOUT,
        CauseKind.SIGNAL,
        CauseKind.MISSING_DEPENDENCY,
        CauseKind.REFUSED,
        CauseKind.CANCELLED,
    ):
        assert decided(Cause(kind, "")) is None


def test_pauses_double_and_are_spread_and_bounded() -> None:
    def pauses(chance: float) -> list[float]:
        found = [decided(LOST, n, retries=99, chance=chance) for n in range(1, 10)]
        return [retry.pause for retry in found if retry is not None]

    assert pauses(0.0) == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert pauses(0.5) == [0.75, 1.5, 3, 6, 12, 24, 45, 45, 45]


@pytest.mark.parametrize(
    ("kind", "peak", "reserved"),
    [
        (CauseKind.OUT_OF_MEMORY, 300, 600),
        (CauseKind.OUT_OF_MEMORY, 50, 200),
        (CauseKind.OUT_OF_MEMORY, None, 200),
        (CauseKind.DISK_FULL, 300, 100),
    ],
)
def test_a_unit_that_ran_out_of_memory_reserves_more(
    kind: CauseKind, peak: int | None, reserved: int
) -> None:
    (unit,) = farmtools.make_units(Path("/nowhere"), 1)
    failed = UnitResult.of(unit, Outcome.FAILED, cause=Cause(kind, ""), peak_memory_bytes=peak)
    assert enlarged(Claim(Resources(1, 100), 5), failed).needs == Resources(1, reserved)
