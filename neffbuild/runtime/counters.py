"""What a serving process counts to show that it started warm."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Programs found in the store, programs that were not there, and programs compiled here."""

    hits: int = 0
    misses: int = 0
    compiles: int = 0
