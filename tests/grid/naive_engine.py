"""A serving engine in a few lines, to find out which steps occur by letting them.

It knows how requests live (join, decode, accept, propose, finish), not how the grid reasons about them:
no interval, no ladder. Every state it can get into for a small `max_model_len` is visited. The only thing
it takes from the product is the choice of shapes, which decides, as in a real engine, what happens next;
each choice is checked against the KV positions the step really touches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import NamedTuple

from neffbuild.grid.bucketer import Bucketer, QueryLenSupport
from neffbuild.grid.select import (
    StepShapes,
    StepState,
    proposes,
    select_shapes,
    step_state,
    verified_drafts,
)
from neffbuild.grid.shapes import DecodeShape, Family
from neffbuild.grid.step import PostTransferPolicy, Row, Step


class Request(NamedTuple):
    """A running request: `computed` tokens in the KV cache and one more known, some drafts for the
    tokens after it, and whether its cache was just received from elsewhere."""

    computed: int
    drafts: int = 0
    received: bool = False


Rank = tuple[Request, ...]


@dataclass
class Seen:
    """`dispatched` are the shapes picked; `states` are (family, live sequences, positions needed)."""

    dispatched: set[DecodeShape] = field(default_factory=set)
    states: set[tuple[Family, int, int]] = field(default_factory=set)
    reasons: set[str] = field(default_factory=set)


def explore(
    bucketer: Bucketer, policy: PostTransferPolicy, max_num_seqs: int, ranks: int = 1
) -> Seen:
    """Visit every state of `ranks` ranks with up to `max_num_seqs` requests each."""
    seen = Seen()
    start: tuple[Rank, ...] = ((),) * ranks
    visited, waiting = {start}, [start]
    while waiting:
        state = waiting.pop()
        for following in _following(bucketer, policy, max_num_seqs, state, seen):
            if following not in visited:
                visited.add(following)
                waiting.append(following)
    return seen


def _following(
    bucketer: Bucketer,
    policy: PostTransferPolicy,
    max_num_seqs: int,
    state: tuple[Rank, ...],
    seen: Seen,
) -> Iterator[tuple[Rank, ...]]:
    for index, rank in enumerate(state):
        others = state[:index], state[index + 1 :]
        for request in set(rank):  # ends by itself, or its client hangs up
            rest = list(rank)
            rest.remove(request)
            yield (*others[0], tuple(rest), *others[1])
        if len(rank) < max_num_seqs:
            for request in arrivals(bucketer):
                yield (*others[0], tuple(sorted((*rank, request))), *others[1])
    if any(state):
        for forced in (False, True) if bucketer.num_speculative_tokens else (False,):
            yield from _after_step(bucketer, policy, state, forced, seen)


def arrivals(bucketer: Bucketer) -> Iterator[Request]:
    """Requests as they start to decode. A prompt leaves room for one more token."""
    spec = bucketer.num_speculative_tokens
    for prompt in range(1, bucketer.max_model_len):
        if prompt > 1:
            yield Request(prompt - 1)  # all but the last prompt token came from the prefix cache
            yield Request(prompt - 1, received=True)
        if prompt + 2 <= bucketer.max_model_len:  # prefilled here, and a token sampled
            drafted = spec if prompt + spec <= bucketer.draft_limit else 0
            for drafts in range(drafted + 1):
                yield Request(prompt, drafts)


def _after_step(
    bucketer: Bucketer,
    policy: PostTransferPolicy,
    state: tuple[Rank, ...],
    forced: bool,
    seen: Seen,
) -> Iterator[tuple[Rank, ...]]:
    steps = [
        Step([Row(r.computed, 1, r.drafts, r.received) for r in rank], policy, forced)
        for rank in state
    ]
    states = [step_state(bucketer, step) for step in steps]
    shapes = select_shapes(bucketer, StepState(*map(max, zip(*states, strict=True))))
    _record(bucketer, state, shapes, seen)
    outcomes = []
    for rank, step in zip(state, steps, strict=True):
        ways = [
            _ways_on(bucketer, request, row, step, shapes)
            for request, row in zip(rank, step.rows, strict=True)
        ]
        outcomes.append(
            {tuple(sorted(r for r in outcome if r is not None)) for outcome in product(*ways)}
        )
    yield from product(*outcomes)


def _record(bucketer: Bucketer, state: tuple[Rank, ...], shapes: StepShapes, seen: Seen) -> None:
    target, draft = shapes.target, shapes.draft
    assert target is not None
    seen.dispatched |= {target} if draft is None else {target, draft}
    seen.reasons |= {shapes.target_reason.value, shapes.draft_reason.value}
    spec = bucketer.num_speculative_tokens
    live = max(len(rank) for rank in state)
    longest = max(request.computed for rank in state for request in rank)
    verified = spec if target.family is Family.TARGET_WITH_SPEC else 0
    need = min(longest + 1 + verified, bucketer.max_model_len)
    seen.states.add((target.family, live, need))
    if draft is not None:
        need = min(longest + verified + spec, bucketer.draft_limit)
        seen.states.add((draft.family, live, need))


def _ways_on(
    bucketer: Bucketer, request: Request, row: Row, step: Step, shapes: StepShapes
) -> set[Request | None]:
    """All that one step can make of a request; None where it is finished."""
    spec, uniform = (
        bucketer.num_speculative_tokens,
        bucketer.query_len_support is QueryLenSupport.UNIFORM,
    )
    target, draft = shapes.target, shapes.draft
    assert target is not None
    [drafts] = verified_drafts(bucketer, replace(step, rows=[row]), shapes)
    placeholders = request.received and drafts > 0
    assert 1 + drafts <= target.query_len
    # Uniform programs write for every token of their width, placeholders too.
    last_written = request.computed + (target.query_len - 1 if uniform else drafts)
    assert last_written < bucketer.max_model_len
    assert last_written < target.context_len

    ways: set[Request | None] = set()
    proposed = proposes(bucketer, row, shapes)
    for accepted in range(1 if placeholders else drafts + 1):
        computed = request.computed + 1 + accepted
        if proposed:
            assert draft is not None
            assert draft.query_len >= 1 + drafts
            # It writes what was accepted, then one position for each draft after the first.
            last_drafted = request.computed + accepted + spec - 1
            assert last_drafted < bucketer.draft_limit
            assert last_drafted < draft.context_len
        if computed + 1 >= bucketer.max_model_len:
            ways.add(None)
            continue
        for budget in range(spec + 1 if proposed else 1):
            ways.add(Request(computed, budget))
    return ways
