"""Whatever the draft says, the tokens are those of plain decoding, and so is what the KV caches hold.

`Serving.step` checks both after every step; every truth is of the same weights, decoded without
speculation, and its two likeliest tokens are further apart than rounding.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from serving import PROMPTS, Serving, truth
from spec_models import CONTEXTS, MAX_MODEL_LEN, build_config, cyclic_pair, random_pair

from neffbuild.grid.acceptance import Budget, adaptive_budget, fixed_budget
from neffbuild.grid.bucketer import QueryLenSupport
from neffbuild.grid.step import PostTransferPolicy

SUPPORTS, POLICIES = st.sampled_from(QueryLenSupport), st.sampled_from(PostTransferPolicy)
BUDGETS = st.sampled_from(["fixed", "adaptive", "any"])
CHANCE = st.integers(0, 2**32).map(random.Random)
LENGTHS = st.one_of(
    st.integers(2, MAX_MODEL_LEN - 2),
    # Where it gets tight: around a bucket, and before the end.
    *(st.integers(edge - 14, edge + 2) for edge in CONTEXTS),
    st.integers(MAX_MODEL_LEN - 14, MAX_MODEL_LEN - 2),
)


def test_the_truth_is_worth_comparing_with():
    known = truth(random_pair)
    assert min(len(set(tokens)) for tokens in known.tokens) > 20
    assert known.smallest_gap > 1e-4


@st.composite
def joins(draw):
    """(step, prompt, known tokens, most tokens, KV received from elsewhere) of each request."""
    requests = []
    for _ in range(draw(st.integers(1, 6))):
        known = draw(LENGTHS)
        until = draw(st.one_of(st.just(MAX_MODEL_LEN), st.integers(known + 1, MAX_MODEL_LEN)))
        step, prompt = draw(st.integers(0, 25)), draw(st.integers(0, PROMPTS - 1))
        requests.append((step, prompt, known, until, draw(st.booleans())))
    return sorted(requests)


def serve(serving: Serving, requests, hurry: random.Random, after_step=lambda: None) -> None:
    """Let requests join when it is their time and there is room; some hang up early."""
    waiting, now = list(requests), 0
    while waiting or serving.running:
        while waiting and waiting[0][0] <= now and not serving.full:
            _, prompt, known, until, received = waiting.pop(0)
            serving.join(prompt, known, max_tokens=until, post_transfer=received)
        if serving.running:
            serving.step(force_without_spec=hurry.random() < 0.05)
            after_step()
            if serving.running and hurry.random() < 0.02:
                serving.leave(hurry.choice(serving.running))
        now += 1


def budgets(spec_tokens: int, chance: random.Random) -> dict[str, Budget]:
    return {
        "fixed": fixed_budget(spec_tokens),
        "adaptive": adaptive_budget(spec_tokens),
        "any": lambda verified, accepted: chance.randint(0, spec_tokens),
    }


def count_events(serving: Serving) -> None:
    for step in serving.steps:
        event(step.shapes.target_reason.value)
        event(step.shapes.draft_reason.value)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(1, 5), SUPPORTS, POLICIES, joins(), BUDGETS, CHANCE, st.data())
def test_a_random_draft_changes_no_token(
    spec_tokens, support, policy, requests, kind, chance, data
):
    limit = data.draw(st.one_of(st.none(), st.integers(1, MAX_MODEL_LEN)), label="draft limit")
    ladder = data.draw(st.sets(st.integers(2, 1 + spec_tokens)), label="query lengths")
    config = build_config(
        spec_tokens, draft_limit=limit, verify=tuple(sorted(ladder | {1 + spec_tokens}))
    )
    budget = budgets(spec_tokens, chance)[kind]
    serving = Serving(random_pair, config, budget, policy=policy, support=support)
    serve(serving, requests, chance)
    count_events(serving)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(1, 5), SUPPORTS, POLICIES, joins(), BUDGETS, CHANCE)
def test_a_foreseeing_draft_is_accepted_whole_and_changes_no_token(
    spec_tokens, support, policy, requests, kind, chance
):
    """The draft's program runs as ever; then its proposals are replaced by the target's future."""
    budget = budgets(spec_tokens, chance)[kind]
    serving = Serving(
        random_pair, build_config(spec_tokens), budget, policy=policy, support=support
    )
    serve(serving, requests, chance, serving.foresee)
    acceptance = serving.decoder.acceptance
    assert acceptance.accepted == acceptance.verified
    count_events(serving)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(1, 5), SUPPORTS, POLICIES, joins(), BUDGETS, CHANCE)
def test_a_draft_that_knows_the_target_is_right_wherever_its_buckets_change(
    spec_tokens, support, policy, requests, kind, chance
):
    """All its drafts are its own: one key or value in a wrong place and it would propose another token."""
    budget = budgets(spec_tokens, chance)[kind]
    serving = Serving(
        cyclic_pair, build_config(spec_tokens), budget, policy=policy, support=support
    )
    serve(serving, requests, chance)
    acceptance = serving.decoder.acceptance
    assert acceptance.accepted == acceptance.verified
    count_events(serving)


@pytest.mark.parametrize("support", QueryLenSupport)
@pytest.mark.parametrize("spec_tokens", [2, 5])
@pytest.mark.parametrize(
    ("make_pair", "kind"),
    [
        (random_pair, "fixed"),
        (random_pair, "adaptive"),
        (cyclic_pair, "fixed"),
        (cyclic_pair, "adaptive"),
    ],
)
def test_from_the_first_tokens_to_max_model_len(make_pair, kind, spec_tokens, support):
    """Every bucket of both models, and steps in which theirs differ."""
    budget = budgets(spec_tokens, random.Random(0))[kind]
    serving = Serving(make_pair, build_config(spec_tokens), budget, support=support)
    first = serving.join(0, 2)
    late = None
    while serving.running:
        serving.step()
        if late is None and first.request.num_computed_tokens > 40:
            late = serving.join(1, 3)
    assert late is not None
    for one in (first, late):
        assert len(one.request.tokens) == MAX_MODEL_LEN
    targets = [step.shapes.target for step in serving.steps]
    drafts = [step.shapes.draft for step in serving.steps]
    for shapes in (targets, drafts):
        assert {shape.context_len for shape in shapes if shape} == {*CONTEXTS, MAX_MODEL_LEN}
    apart = [
        draft.context_len > target.context_len
        for target, draft in zip(targets, drafts, strict=True)
        if draft
    ]
    acceptance = serving.decoder.acceptance
    if make_pair is cyclic_pair:
        assert acceptance.accepted == acceptance.verified
    else:
        assert any(apart)
        assert sum(acceptance.accepted) < 0.05 * sum(acceptance.verified)
