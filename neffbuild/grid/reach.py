"""Which decode steps can occur, as boxes of (live sequences, query length, context need).

Only what is provable from the engine's own rules bounds a box; KV capacity never does. In the notation
of the dispatch rules, n is the largest `num_computed_tokens` over the live rows, K is
`num_speculative_tokens`, M is `max_model_len`, L is the draft's limit, and d is K on a with-spec step
and 0 on any other.

- A live decode row has prior state, n ≥ 1, and at most M - 1 tokens: the engine stops a request whose
  tokens reach M (vLLM `check_stop`) and schedules no position M - 1 (vLLM `Scheduler.schedule`). So
  n + 1 ≤ M - 1.
- A with-spec step needs a row with n + 1 + K ≤ M.
- The proposer needs n + 1 + d + K ≤ L. A step advances a row by up to 1 + d, so a row brings drafts of
  its own only at n ≤ L - K; placeholder drafts (after a KV transfer) it brings K of, at any n.

Live sequences and context need are independent, because the context is a maximum: 8 rows at M are one
long row and seven short ones, or under data parallelism rows of different ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from neffbuild.grid.bucketer import Bucketer, QueryLenSupport
from neffbuild.grid.shapes import Family


@dataclass(frozen=True, slots=True)
class Reach:
    """A box of steps of one family that can all occur. A range may be empty: no step does."""

    num_seqs: range
    query_lens: range
    context_needs: range


def overlap(one: range, other: range) -> range:
    """The integers in both of two ranges of step 1."""
    return range(max(one.start, other.start), min(one.stop, other.stop))


def reachable(bucketer: Bucketer, family: Family) -> list[Reach]:
    """The steps of a decode family that can occur, as boxes; together they are exact. Of two boxes the
    ranges of live sequences are equal or disjoint."""
    ladder = bucketer.decode[family].num_seqs
    num_seqs = range(ladder.floor, ladder.rungs[-1] + 1)
    if family is Family.TARGET_WITH_SPEC:
        alone, together = _with_spec_steps(bucketer)
    elif family is Family.DRAFT:
        alone, together = _draft_steps(bucketer)
    else:
        alone = together = [(_closed(1, 1), _closed(2, bucketer.max_model_len - 1))]
    if alone == together or bucketer.dp_size > 1:
        return [Reach(num_seqs, *steps) for steps in together]
    one_row = overlap(num_seqs, _closed(1, 1))
    more_rows = overlap(num_seqs, range(2, num_seqs.stop))
    return [Reach(one_row, *steps) for steps in alone] + [
        Reach(more_rows, *steps) for steps in together
    ]


_Steps = list[tuple[range, range]]
"""(query lengths of the longest row, context needs) that occur together."""


def _with_spec_steps(bucketer: Bucketer) -> tuple[_Steps, _Steps]:
    """With-spec steps of a row alone, and of a row in the company of others."""
    spec_tokens, limit = bucketer.num_speculative_tokens, bucketer.draft_limit
    # A row near the limit, which verifies nothing, counts no further than the limit either.
    needs = _closed(2 + spec_tokens, bucketer.max_model_len)
    with_placeholders = (_closed(1 + spec_tokens, 1 + spec_tokens), needs)
    if bucketer.query_len_support is QueryLenSupport.VARLEN or limit < 1 + spec_tokens:
        return [with_placeholders], [with_placeholders]
    widths = _closed(2, 1 + spec_tokens)
    # A row that brings no drafts may be longer than the one that does.
    together = [(widths, needs)]
    own_drafts = overlap(needs, _closed(1, limit + 1))
    if own_drafts == needs:
        return together, together
    return [(widths, own_drafts), with_placeholders], together


def _draft_steps(bucketer: Bucketer) -> tuple[_Steps, _Steps]:
    """Proposals for a row alone, and for a row in the company of others."""
    spec_tokens, limit = bucketer.num_speculative_tokens, bucketer.draft_limit
    alone: _Steps = []
    beside_a_long_row: _Steps = []
    for drafts, widths in ((0, _closed(1, 1)), (spec_tokens, _closed(2, 1 + spec_tokens))):
        least = 1 + drafts + spec_tokens
        if least + 1 > limit:
            continue  # not even a row with one computed token may propose
        alone.append((widths, _closed(least, limit - 1)))
        longest = bucketer.max_model_len - 2
        most = min(longest + drafts + spec_tokens, limit)
        beside_a_long_row.append((widths, _closed(least, most)))
    # Uniform programs take all rows or none, so the longest row has to be within the limit; otherwise
    # each row is held to the limit by itself, and the need counts no further than the limit.
    uniform = bucketer.query_len_support is QueryLenSupport.UNIFORM
    return alone, alone if uniform else beside_a_long_row


def _closed(low: int, high: int) -> range:
    return range(low, high + 1)
