"""Greedy decoding of a changing batch of requests, with or without an EAGLE3 draft.

One step: the target computes each row's last token and the drafts it brings; drafts are kept as far as the
target would have said the same, and one token more is certain; the draft catches up with what was added
and proposes for the next step. The tokens are those of decoding one by one, whatever the draft says.

The KV cache of both models is paged under one block table. Keys and values of drafts that were not kept
stay where they are until the next step, which computes those positions again, overwrites them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from neffbuild.grid.acceptance import Acceptance, Budget
from neffbuild.grid.bucketer import Bucketer
from neffbuild.grid.select import StepShapes, proposes
from neffbuild.grid.step import PostTransferPolicy, Row
from neffbuild.runtime.batch import DecodeBatch, DraftBatch, StepResult
from neffbuild.runtime.dispatcher import Dispatcher


@dataclass(slots=True)
class Request:
    """A running request over prior state.

    `tokens` are all that are known, of the prompt and generated; the first `num_computed_tokens` of them
    are in the target's KV cache (and in the draft's, each with the token after it), one is not.
    `max_tokens` is how many tokens it ends with; it ends at `max_model_len` in any case. `block_table`
    `[columns]` int32 holds a block for every position up to there. `post_transfer`: its KV cache came
    from elsewhere, without auxiliary hidden states.
    """

    tokens: list[int]
    num_computed_tokens: int
    max_tokens: int
    block_table: Tensor
    post_transfer: bool = False
    drafts: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """What a step did: per row, in the order of the requests, how many of its drafts were `verified`
    (placeholders are not its own), how many of these `accepted`, and whether the draft `proposed` for its
    next step. Seconds are what the target's and the draft's part took, 0 where the draft had none."""

    shapes: StepShapes
    verified: list[int]
    accepted: list[int]
    proposed: list[bool]
    target_seconds: float
    draft_seconds: float


class GreedyDecoder:
    """Steps of any requests: who takes part is told anew each step. `acceptance` adds up over all."""

    def __init__(
        self,
        bucketer: Bucketer,
        dispatcher: Dispatcher,
        budget: Budget,
        post_transfer_policy: PostTransferPolicy = PostTransferPolicy.WITHOUT_SPEC,
    ) -> None:
        """`budget` says after each step how many drafts a row brings to its next. The draft catches up
        even where that is none, so that it has seen every token when it is asked again."""
        self.acceptance = Acceptance(bucketer.num_speculative_tokens)
        self._bucketer = bucketer
        self._dispatcher = dispatcher
        self._budget = budget
        self._policy = post_transfer_policy

    def finished(self, request: Request) -> bool:
        return len(request.tokens) >= self._length(request)

    def step(self, requests: Sequence[Request], *, force_without_spec: bool = False) -> DecodeStep:
        """Advance every request by one token and its accepted drafts, up to its end.

        None may be finished. Raises as `Dispatcher.run` and `Dispatcher.propose` do.
        """
        rows = [self._row(request) for request in requests]
        batch = DecodeBatch(
            rows,
            torch.tensor([request.tokens[-1] for request in requests]),
            torch.stack([request.block_table for request in requests]),
            self._draft_token_ids(requests),
            self._policy,
            force_without_spec,
        )
        began = time.perf_counter()
        result = self._dispatcher.run(batch)
        target_seconds = time.perf_counter() - began
        verified, accepted = self._accept(requests, result)
        proposed = [
            proposes(self._bucketer, row, result.shapes) and not self.finished(request)
            for request, row in zip(requests, rows, strict=True)
        ]
        for request in requests:
            request.drafts = []
        draft_seconds = 0.0
        if result.shapes.draft is not None:
            added = [
                1 + kept if wanted else 0 for wanted, kept in zip(proposed, accepted, strict=True)
            ]
            draft_batch = _draft_batch(requests, batch, added, result)
            began = time.perf_counter()
            drafts = self._dispatcher.propose(result.shapes.draft, draft_batch)
            draft_seconds = time.perf_counter() - began
            for row, proposal in enumerate(drafts.tolist()):
                if proposed[row]:
                    budget = self._budget(verified[row], accepted[row])
                    requests[row].drafts = proposal[:budget]
        return DecodeStep(
            result.shapes, verified, accepted, proposed, target_seconds, draft_seconds
        )

    def _length(self, request: Request) -> int:
        return min(request.max_tokens, self._bucketer.max_model_len)

    def _row(self, request: Request) -> Row:
        return Row(
            request.num_computed_tokens,
            num_new_tokens=len(request.tokens) - request.num_computed_tokens,
            num_drafts=len(request.drafts),
            post_transfer=request.post_transfer,
            # The step adds a token at least: one that is then complete needs no drafts.
            wants_to_propose=len(request.tokens) + 1 < self._length(request),
        )

    def _draft_token_ids(self, requests: Sequence[Request]) -> Tensor | None:
        """Drafts side by side; the rest is placeholders."""
        spec_tokens = self._bucketer.num_speculative_tokens
        if not spec_tokens:
            return None
        ids = torch.zeros(len(requests), spec_tokens, dtype=torch.int32)
        for row, request in enumerate(requests):
            if request.drafts:
                ids[row, : len(request.drafts)] = torch.tensor(request.drafts, dtype=torch.int32)
        return ids

    def _accept(
        self, requests: Sequence[Request], result: StepResult
    ) -> tuple[list[int], list[int]]:
        """Keep the drafts that the target would have said, and the token it says after them; per row how
        many drafts were verified and how many kept."""
        verified, accepted = [], []
        said = result.outputs["next_token_ids"].tolist()
        for request, most, next_ids in zip(requests, result.verified, said, strict=True):
            # What a row verifies beyond its own drafts are placeholders: there is nothing to accept.
            drafts = request.drafts[:most]
            kept = 0
            while kept < len(drafts) and drafts[kept] == next_ids[kept]:
                kept += 1
            self.acceptance.add(len(drafts), kept)
            request.tokens += next_ids[: kept + 1]
            del request.tokens[self._length(request) :]
            request.num_computed_tokens += kept + 1
            request.post_transfer = False
            verified.append(len(drafts))
            accepted.append(kept)
        return verified, accepted


def _draft_batch(
    requests: Sequence[Request], batch: DecodeBatch, added: Sequence[int], result: StepResult
) -> DraftBatch:
    """The positions that a step `added` to each row, each with the token after it. `batch` and `result`
    are of the step, the requests have their new tokens."""
    starts = [row.num_computed_tokens for row in batch.rows]
    ids = torch.zeros(len(requests), max(1, *added), dtype=torch.int32)
    for row, (request, start, count) in enumerate(zip(requests, starts, added, strict=True)):
        tokens = request.tokens[start + 1 : start + 1 + count]
        ids[row, :count] = torch.tensor(tokens, dtype=torch.int32)
    return DraftBatch(
        torch.tensor(starts),
        torch.tensor(added, dtype=torch.int32),
        ids,
        result.outputs["auxiliary_hidden_states"],
        batch.block_table,
    )
