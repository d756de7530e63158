"""Requests served over one KV pool by a pair of models, and what they must come out as."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import torch
from eager_programs import EagerLoader
from spec_models import BLOCK_SIZE, MAX_MODEL_LEN, MAX_NUM_SEQS, Pair, build_config
from torch import Tensor

from neffbuild.config.build import BuildConfig
from neffbuild.grid.acceptance import Budget, fixed_budget
from neffbuild.grid.bucketer import Bucketer, QueryLenSupport
from neffbuild.grid.step import PostTransferPolicy
from neffbuild.models.decode import allocate_kv_caches, named_kv_caches
from neffbuild.models.llama import KVCache, LlamaDecoder
from neffbuild.runtime.dispatcher import Dispatcher
from neffbuild.runtime.loader import Loader
from neffbuild.runtime.speculation import DecodeStep, GreedyDecoder, Request

COLUMNS = MAX_MODEL_LEN // BLOCK_SIZE
PROMPTS = 8
"""How many sequences are known in full; a request is one of them, taken up at some position."""

MakePair = Callable[[], Pair]


class Pool:
    """KV caches of both models under one block table, blocks handed out in a scattered order. What was
    never written holds noise, as in the blocks of a running engine."""

    def __init__(self, pair: Pair, rows: int = MAX_NUM_SEQS) -> None:
        generator = torch.Generator().manual_seed(4)
        blocks = rows * COLUMNS

        def allocate(architecture) -> list[KVCache]:
            caches = allocate_kv_caches(architecture, torch.float32, blocks + 1, BLOCK_SIZE)
            for tensor in named_kv_caches(caches).values():
                tensor[1:].normal_(generator=generator)
            return caches

        self.target = allocate(pair.target.architecture)
        self.draft = allocate(pair.draft.architecture)
        tables = torch.randperm(blocks, generator=generator).view(rows, COLUMNS) + 1
        self._free = list(tables.to(torch.int32))

    def take(self) -> Tensor:
        return self._free.pop()

    def give_back(self, block_table: Tensor) -> None:
        self._free.insert(0, block_table)

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for pages in (*self.target, *self.draft) for tensor in pages]


def read(caches: list[KVCache], block_table: Tensor, positions: int) -> Tensor:
    """Keys and values of a row's first positions, of all layers `[positions, 2 layers, heads, D]`."""
    slots = slots_of(block_table, positions)
    return torch.stack([t.flatten(0, 1)[slots] for pages in caches for t in pages], dim=1)


def write(caches: list[KVCache], block_table: Tensor, contents: Tensor) -> None:
    slots = slots_of(block_table, len(contents))
    for index, tensor in enumerate(t for pages in caches for t in pages):
        tensor.flatten(0, 1)[slots] = contents[:, index]


def slots_of(block_table: Tensor, positions: int) -> Tensor:
    at = torch.arange(positions)
    return block_table.long()[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE


@dataclass(frozen=True)
class Truth:
    """What greedy decoding, one token a step, makes of the prompts: `tokens` `[PROMPTS][MAX_MODEL_LEN]`,
    and per prompt what both KV caches have to hold, of every position but the last."""

    tokens: list[list[int]]
    target_kv: list[Tensor]
    draft_kv: list[Tensor]
    smallest_gap: float


@cache
def truth(make_pair: MakePair) -> Truth:
    """Decoded through the dispatcher without speculation, in programs at `max_model_len`; KV contents and
    the gaps between the two likeliest tokens recomputed, each sequence in one pass."""
    pair = make_pair()
    config = build_config(contexts=None, num_seqs=(PROMPTS,))
    bucketer = Bucketer.from_config(config, query_len_support=QueryLenSupport.VARLEN)
    pool = Pool(pair, PROMPTS)
    tensors = pair.tensors | named_kv_caches(pool.target)
    decoder = GreedyDecoder(
        bucketer, Dispatcher(bucketer, EagerLoader(config), tensors), fixed_budget(0)
    )
    requests = []
    for prompt in range(PROMPTS):
        token = 15 * prompt + int(pair.draft.d2t[15 * prompt])
        request = Request([token], 1, MAX_MODEL_LEN, pool.take())
        # Without prior state a row is prefilled.
        request.tokens.append(int(_target_pass(pair.target, pool, request)[0][-1]))
        requests.append(request)
    while not decoder.finished(requests[0]):
        decoder.step(requests)

    target_kv, draft_kv, gaps = [], [], []
    for request in requests:
        next_ids, logits, states = _target_pass(pair.target, pool, request)
        assert next_ids.tolist() == request.tokens[1:]
        best = logits.topk(2).values
        gaps.append(float((best[:, 0] - best[:, 1]).min()))
        _draft_pass(pair, pool, request, states)
        target_kv.append(read(pool.target, request.block_table, MAX_MODEL_LEN - 1))
        draft_kv.append(read(pool.draft, request.block_table, MAX_MODEL_LEN - 1))
    return Truth([request.tokens for request in requests], target_kv, draft_kv, min(gaps))


def _target_pass(
    target: LlamaDecoder, pool: Pool, request: Request
) -> tuple[Tensor, Tensor, Tensor]:
    """All tokens but the last (or the only one) in one pass: next tokens, logits, auxiliary states."""
    tokens = request.tokens[: max(1, len(request.tokens) - 1)]
    with torch.inference_mode():
        outputs = target(
            torch.tensor([tokens], dtype=torch.int32), *_places(request, len(tokens)), pool.target
        )
    return tuple(output[0] for output in outputs)


def _draft_pass(pair: Pair, pool: Pool, request: Request, states: Tensor) -> None:
    tokens = request.tokens[1:]
    with torch.inference_mode():
        pair.draft(
            torch.tensor([tokens], dtype=torch.int32),
            *_places(request, len(tokens)),
            states[None],
            pool.draft,
        )


def _places(request: Request, count: int) -> tuple[Tensor, ...]:
    """Positions, slots, block table and length of a row's first tokens."""
    return (
        torch.arange(count)[None],
        slots_of(request.block_table, count)[None],
        request.block_table[None],
        torch.tensor([count], dtype=torch.int32),
    )


@dataclass(eq=False)
class Running:
    """A request and which prompt it is of; `caught_up` are the positions the draft has seen."""

    prompt: int
    request: Request
    caught_up: set[int] = field(default_factory=set)


class Serving:
    """An engine in a few lines: requests join and leave, all that run take part in every step."""

    def __init__(
        self,
        make_pair: MakePair,
        config: BuildConfig,
        budget: Budget,
        *,
        policy: PostTransferPolicy = PostTransferPolicy.WITHOUT_SPEC,
        support: QueryLenSupport = QueryLenSupport.VARLEN,
        loader: Loader | None = None,
    ) -> None:
        """Programs come from `loader`; without one they are computed uncompiled."""
        pair = make_pair()
        self.truth = truth(make_pair)
        self.bucketer = Bucketer.from_config(config, query_len_support=support)
        self.pool = Pool(pair)
        self.dispatcher = Dispatcher(
            self.bucketer,
            loader or EagerLoader(config),
            pair.tensors | named_kv_caches(self.pool.target),
            pair.draft_tensors | named_kv_caches(self.pool.draft),
        )
        self.decoder = GreedyDecoder(self.bucketer, self.dispatcher, budget, policy)
        self.running: list[Running] = []
        self.steps: list[DecodeStep] = []

    @property
    def full(self) -> bool:
        return len(self.running) == MAX_NUM_SEQS

    def join(
        self,
        prompt: int,
        known: int,
        *,
        max_tokens: int = MAX_MODEL_LEN,
        post_transfer: bool = False,
    ) -> Running:
        """A request that knows its first `known` tokens, at least two, all but the last computed."""
        table = self.pool.take()
        tokens = self.truth.tokens[prompt][:known]
        write(self.pool.target, table, self.truth.target_kv[prompt][: known - 1])
        write(self.pool.draft, table, self.truth.draft_kv[prompt][: known - 1])
        request = Request(list(tokens), known - 1, max_tokens, table, post_transfer)
        joined = Running(prompt, request, set(range(known - 1)))
        self.running.append(joined)
        return joined

    def leave(self, leaving: Running) -> None:
        self.running.remove(leaving)
        self.pool.give_back(leaving.request.block_table)

    def step(self, *, force_without_spec: bool = False) -> DecodeStep:
        """One step of all, its outcome checked; what is complete leaves."""
        before = [one.request.num_computed_tokens for one in self.running]
        step = self.decoder.step(
            [one.request for one in self.running], force_without_spec=force_without_spec
        )
        self.steps.append(step)
        for one, first, proposed in zip(self.running, before, step.proposed, strict=True):
            if proposed:
                one.caught_up.update(range(first, one.request.num_computed_tokens))
            self.check(one)
        for one in [one for one in self.running if self.decoder.finished(one.request)]:
            self.leave(one)
        return step

    def check(self, one: Running) -> None:
        """Its tokens are those of plain decoding, and so are keys and values of the computed positions."""
        request, prompt = one.request, one.prompt
        assert request.tokens == self.truth.tokens[prompt][: len(request.tokens)]
        computed = min(request.num_computed_tokens, MAX_MODEL_LEN - 1)
        assert computed >= len(request.tokens) - 1
        close(
            read(self.pool.target, request.block_table, computed),
            self.truth.target_kv[prompt][:computed],
        )
        caught_up = [position for position in sorted(one.caught_up) if position < computed]
        close(
            read(self.pool.draft, request.block_table, computed)[caught_up],
            self.truth.draft_kv[prompt][caught_up],
        )

    def foresee(self) -> None:
        """Turn the drafts of every request into what the target will say."""
        for one in self.running:
            request = one.request
            known, count = len(request.tokens), len(request.drafts)
            ahead = self.truth.tokens[one.prompt][known : known + count]
            request.drafts = ahead + [0] * (count - len(ahead))


def close(ours: Tensor, theirs: Tensor) -> None:
    if not torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3):  # the quicker one of the two
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
