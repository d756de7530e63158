"""The bucketer: the one object that owns every ladder and every lookup in them."""

from __future__ import annotations

from enum import StrEnum


class QueryLenSupport(StrEnum):
    """Whether one with-spec program replays rows of different query lengths.

    `VARLEN`: one program at 1 + K serves any mix of 1 … 1 + K per row. `UNIFORM`: every row of a
    program has the same query length, so the grid has a query-length ladder.
    """

    UNIFORM = "uniform"
    VARLEN = "varlen"
