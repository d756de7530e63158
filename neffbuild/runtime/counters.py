"""What a serving process counts to show that it started warm."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Programs found in the store, programs that were not there, programs compiled here, and steps that
    ran in a larger program than theirs because that was not there."""

    hits: int = 0
    misses: int = 0
    compiles: int = 0
    fallbacks: int = 0
