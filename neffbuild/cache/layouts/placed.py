"""What becomes of the places of an engine's cache that is written."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Outcome(StrEnum):
    """What became of a place. After `written` and `present` it is a hit."""

    WRITTEN = "written"
    PRESENT = "present"
    LOCKED = "locked"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Placed:
    """A place, and why it is no hit or what is to be known of it."""

    place: str
    outcome: Outcome
    reason: str | None = None
    notes: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        return {
            "place": self.place,
            "outcome": self.outcome.value,
            "reason": self.reason,
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True)
class Exported:
    """What became of every place that entries have for a layout."""

    layout: str
    placed: tuple[Placed, ...] = ()
    bytes_written: int = 0

    @property
    def hits(self) -> bool:
        """Whether the engine finds all of it."""
        return not any(one.outcome in (Outcome.LOCKED, Outcome.REFUSED) for one in self.placed)

    @property
    def counts(self) -> dict[str, int]:
        outcomes = Counter(one.outcome for one in self.placed)
        return {outcome.value: outcomes[outcome] for outcome in Outcome}
