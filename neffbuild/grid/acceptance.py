"""How many drafts to bring to the next step, and what became of those that were verified.

Pure arithmetic over counts; K is `num_speculative_tokens`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Budget = Callable[[int, int], int]
"""(drafts a row verified in a step, drafts of these it accepted) → most drafts it brings to the next."""


def fixed_budget(drafts: int) -> Budget:
    """As many every time."""
    return lambda verified, accepted: drafts


def adaptive_budget(spec_tokens: int) -> Budget:
    """As many as were accepted, and one more, up to K, where that was all of them.

    A row whose drafts fail verifies one at a time, every other step; one whose drafts hold is back at K
    after K steps.
    """
    return lambda verified, accepted: min(spec_tokens, accepted + (accepted == verified))


class Acceptance:
    """Counts by position of a draft in its row, the first being position 1. A draft is accepted when the
    target agrees with it and with all before it."""

    def __init__(self, spec_tokens: int) -> None:
        self.verified = [0] * spec_tokens
        self.accepted = [0] * spec_tokens

    def add(self, verified: int, accepted: int) -> None:
        """Count one row of one step."""
        for position in range(verified):
            self.verified[position] += 1
            self.accepted[position] += position < accepted

    def document(self) -> list[dict[str, Any]]:
        """`acceptance` of `neffbuild.replay/1`; a rate is None where nothing was verified."""
        return [
            {
                "position": position,
                "verified": verified,
                "accepted": accepted,
                "rate": accepted / verified if verified else None,
            }
            for position, (verified, accepted) in enumerate(
                zip(self.verified, self.accepted, strict=True), start=1
            )
        ]
