"""Which slots of both KV caches a step writes, and that buckets change nothing about it."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import Serving, close
from spec_models import BLOCK_SIZE, CONTEXTS, MAX_MODEL_LEN, build_config, cyclic_pair, random_pair
from test_lossless import BUDGETS, POLICIES, SUPPORTS, budgets, joins

from neffbuild.grid.bucketer import QueryLenSupport
from neffbuild.grid.shapes import Family
from neffbuild.grid.step import PostTransferPolicy
from neffbuild.models.llama import KVCache

UNIFORM, VARLEN = QueryLenSupport.UNIFORM, QueryLenSupport.VARLEN


@settings(max_examples=14, deadline=None, derandomize=True)
@given(
    st.sampled_from([random_pair, cyclic_pair]),
    st.integers(1, 5), SUPPORTS, POLICIES, joins(), BUDGETS, st.integers(0, 2**32),
)  # fmt: skip
def test_a_bucketed_run_leaves_what_an_unbucketed_one_leaves(
    make_pair, spec_tokens, support, policy, requests, kind, seed
):
    """Slot for slot after every step: the same slots written, with the same keys and values."""
    runs = []
    for contexts, num_seqs in ((CONTEXTS, (1, 2, 4)), (None, (4,))):
        config = build_config(spec_tokens, contexts=contexts, num_seqs=num_seqs)
        budget = budgets(spec_tokens, random.Random(seed))[kind]
        runs.append(Serving(make_pair, config, budget, policy=policy, support=support))
    bucketed, plain = runs
    untouched = [tensor.clone() for tensor in plain.pool.tensors]
    waiting, now, smaller = list(requests), 0, 0
    while waiting or plain.running:
        while waiting and waiting[0][0] <= now and not plain.full:
            _, prompt, known, until, received = waiting.pop(0)
            for run in runs:
                run.join(prompt, known, max_tokens=until, post_transfer=received)
        now += 1
        if not plain.running:
            continue
        steps = [run.step() for run in runs]
        assert steps[0].accepted == steps[1].accepted
        smaller += steps[0].shapes.target.context_len < MAX_MODEL_LEN
        for ours, theirs, before in zip(
            bucketed.pool.tensors, plain.pool.tensors, untouched, strict=True
        ):
            assert torch.equal(ours != before, theirs != before)
            close(ours, theirs)
    assert plain.bucketer.context_bucketed is False
    assert smaller or min(known for _, _, known, _, _ in requests) > CONTEXTS[-1] - 2 * spec_tokens


class Written:
    """The slots of both pools that a step changes, the null block's left out.

    Before the step, slots beyond the computed positions get new noise: nothing there may matter, and
    what is written there differs from it.
    """

    def __init__(self, serving: Serving) -> None:
        pool = serving.pool
        self._pools = (_tensors(pool.target), _tensors(pool.draft))
        for one in serving.running:
            table, computed = one.request.block_table, one.request.num_computed_tokens
            beyond = sorted(slots_of(table, range(computed, MAX_MODEL_LEN)))
            for tensor in pool.tensors:
                tensor.flatten(0, 1)[beyond] = torch.randn(len(beyond), *tensor.shape[2:])
        self._before = [[tensor.clone() for tensor in tensors] for tensors in self._pools]

    def slots(self) -> tuple[set[int], set[int]]:
        """Of the target's pool and of the draft's; every layer's keys and values have to agree."""
        found = []
        for tensors, before in zip(self._pools, self._before, strict=True):
            changed = {frozenset(_changed(*pair)) for pair in zip(tensors, before, strict=True)}
            [slots] = changed
            found.append(set(slots))
            for tensor in tensors:
                assert not tensor[0].any(), "pad tokens write zeros to the null block"
        return found[0], found[1]


def _tensors(caches: list[KVCache]) -> list[torch.Tensor]:
    return [tensor for pages in caches for tensor in pages]


def _changed(tensor: torch.Tensor, before: torch.Tensor) -> list[int]:
    slots = (tensor != before).flatten(2).any(-1).flatten().nonzero()[:, 0].tolist()
    return [slot for slot in slots if slot >= BLOCK_SIZE]


def slots_of(table: torch.Tensor, positions: range) -> set[int]:
    return {int(table[p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE for p in positions}


@pytest.mark.parametrize("support", QueryLenSupport)
@pytest.mark.parametrize("policy", PostTransferPolicy)
@pytest.mark.parametrize("make_pair", [random_pair, cyclic_pair])
def test_a_step_writes_its_own_tokens_drafts_and_placeholders_and_nothing_else(
    make_pair, policy, support
):
    """The target n … n + what a row verified (n + the program's width where every row is as wide); the
    draft, of a row it proposes for, n … n + accepted + K - 1. Pad rows and pad tokens: the null block."""
    spec_tokens = 3
    chance = random.Random(7)
    config = build_config(spec_tokens, verify=(2, 4))
    budget = budgets(spec_tokens, chance)["any"]
    serving = Serving(make_pair, config, budget, policy=policy, support=support)
    serving.join(0, 2)
    serving.join(1, MAX_MODEL_LEN - 12)
    serving.join(2, 28, post_transfer=True)
    widths: set[int] = set()
    while serving.running:
        if len(serving.steps) == 6:
            serving.join(3, 50, post_transfer=True)
        rows = [
            (one.request, one.request.num_computed_tokens, one.request.post_transfer)
            for one in serving.running
        ]
        written = Written(serving)
        step = serving.step()
        target, draft = set(), set()
        for (request, n, received), verified, accepted, proposed in zip(
            rows, step.verified, step.accepted, step.proposed, strict=True
        ):
            with_spec = step.shapes.target.family is Family.TARGET_WITH_SPEC
            if support is UNIFORM and with_spec:
                verified = step.shapes.target.query_len - 1
            elif received and with_spec:  # placeholders
                verified = spec_tokens
            target |= slots_of(request.block_table, range(n, n + verified + 1))
            if proposed:
                draft |= slots_of(request.block_table, range(n, n + accepted + spec_tokens))
            widths.add(verified)
        assert written.slots() == (target, draft)
    assert widths == ({0, 1, 3} if support is UNIFORM else {0, 1, 2, 3})


def test_a_checker_that_sees_nothing_would_be_no_checker():
    """Every way a step could go wrong that lossless output hides is seen by the comparison above."""
    serving = Serving(random_pair, build_config(3), budgets(3, random.Random(0))["fixed"])
    one = serving.join(0, 30)
    serving.step()
    spoil: list[Callable[[], None]] = [
        lambda: serving.pool.target[0][0].flatten(0, 1)[_slot(one, 7)].add_(1),
        lambda: serving.pool.draft[0][1].flatten(0, 1)[_slot(one, 7)].add_(1),
        lambda: one.request.tokens.append(one.request.tokens.pop() ^ 1),
    ]
    for damage in spoil:
        damage()
        with pytest.raises(AssertionError):
            serving.check(one)


def _slot(one, position: int) -> int:
    [slot] = slots_of(one.request.block_table, range(position, position + 1))
    return slot
