"""Which failed units are tried again in the same run, when, and how."""

from __future__ import annotations

from dataclasses import dataclass, replace

from neffbuild.farm.admission import Claim
from neffbuild.farm.outcomes import Cause, CauseKind, UnitResult

TRANSIENT = frozenset({CauseKind.LOST_WORKER, CauseKind.STORE})
"""Failures that say more about the moment than about the unit: tried again after a pause."""
CROWDED = frozenset({CauseKind.OUT_OF_MEMORY, CauseKind.DISK_FULL})
"""Failures that what ran beside the unit may have caused: tried again once, alone."""
_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Retry:
    """Try a unit again after `pause` seconds; `alone` with all the host has rather than beside others."""

    pause: float
    alone: bool


def retry_of(
    cause: Cause,
    *,
    failures: int,
    was_alone: bool,
    over_own_limit: bool,
    retries: int,
    chance: float,
) -> Retry | None:
    """What to do about a unit that has failed `failures` times in this run, this time with `cause`;
    None when its failure is final.

    `over_own_limit` says that it used more than its own memory limit allows, `was_alone` that nothing
    ran beside it: it would fail the same way again. `retries` bounds all tries after the first. `chance`
    in [0, 1) spreads pauses over half their length, so that what failed together does not come back
    together. Everything else (a compiler's error, a timeout, a crash) is taken for deterministic.
    """
    if failures > retries:
        return None
    if cause.kind in TRANSIENT:
        pause = min(_FIRST_PAUSE_SECONDS * 2.0 ** min(failures - 1, 32), _LONGEST_PAUSE_SECONDS)
        return Retry(pause * (0.5 + chance / 2), alone=False)
    if cause.kind in CROWDED and not was_alone and not over_own_limit:
        return Retry(0.0, alone=True)
    return None


def enlarged(claim: Claim, failed: UnitResult) -> Claim:
    """What a unit reserves when it is tried again: after it ran out of memory twice its peak, or twice
    what it had reserved where that is more."""
    if failed.cause is None or failed.cause.kind is not CauseKind.OUT_OF_MEMORY:
        return claim
    memory = 2 * max(claim.needs.memory, failed.peak_memory_bytes or 0)
    return replace(claim, needs=replace(claim.needs, memory=memory))
