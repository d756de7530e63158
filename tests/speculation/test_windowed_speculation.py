"""Speculation over sliding windows: the tokens are those of plain decoding, whatever slides out meanwhile."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from eager_programs import EagerLoader
from spec_models import BLOCK_SIZE, DRAFT, MAX_MODEL_LEN, TARGET, VOCABULARY, build_config

from neffbuild.config.model import ModelConfig
from neffbuild.grid.acceptance import fixed_budget
from neffbuild.grid.bucketer import Bucketer, QueryLenSupport
from neffbuild.grid.shapes import Family
from neffbuild.models.decode import (
    allocate_kv_caches,
    build_decoder,
    build_draft,
    named_kv_caches,
    named_tensors,
)
from neffbuild.runtime.block_table import NULL_BLOCK
from neffbuild.runtime.dispatcher import Dispatcher
from neffbuild.runtime.speculation import GreedyDecoder, Request

WINDOW, SPEC_TOKENS, ROWS = 21, 3, 2
COLUMNS = MAX_MODEL_LEN // BLOCK_SIZE
EVERYWHERE = {"sliding_window": WINDOW}
ONE_LAYER = EVERYWHERE | {"layer_types": ["full_attention", "sliding_attention"]}


class Engine:
    """A few requests decoded to their end. With `frees` the blocks before the window are given up in each
    step, as an engine may where no layer sees beyond it."""

    def __init__(self, spec_tokens, target, draft, *, support, frees) -> None:
        config = build_config(
            spec_tokens, num_seqs=(1, ROWS),
            verify=(2, 1 + spec_tokens) if spec_tokens and support == "uniform" else None,
        )  # fmt: skip
        config = replace(config, model=ModelConfig("target", TARGET | target))
        if spec_tokens:
            config = replace(config, draft_model=ModelConfig("draft", DRAFT | draft))
        bucketer = Bucketer.from_config(config, query_len_support=QueryLenSupport(support))
        torch.manual_seed(0)
        models = [build_decoder(config, Family.TARGET)]
        models += [build_draft(config)] if spec_tokens else []
        tensors = []
        for model in models:
            for parameter in model.parameters():
                parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.15)
            caches = allocate_kv_caches(
                model.architecture, torch.float32, ROWS * COLUMNS + 1, BLOCK_SIZE
            )
            tensors.append(named_tensors(model) | named_kv_caches(caches))
        self._caches = [
            tensor for kept in tensors for name, tensor in kept.items() if "kv_caches" in name
        ]
        self._frees = frees
        self._decoder = GreedyDecoder(
            bucketer,
            Dispatcher(bucketer, EagerLoader(config), *tensors),
            fixed_budget(bucketer.num_speculative_tokens),
        )
        table = torch.randperm(ROWS * COLUMNS).view(ROWS, COLUMNS).int() + 1
        self.requests = [
            Request([5 + row, 9], 1, MAX_MODEL_LEN - 9 * row, table[row]) for row in range(ROWS)
        ]
        self.accepted = 0

    def run(self, truth=None) -> list[list[int]]:
        """With `truth` some drafts are what the target will say: the others are the draft's own."""
        chance = random.Random(3)
        while running := [one for one in self.requests if not self._decoder.finished(one)]:
            for request in running:
                self._free(request)
                if truth and chance.random() < 0.6:
                    tokens = truth[self.requests.index(request)]
                    ahead = tokens[len(request.tokens) :][: len(request.drafts)]
                    request.drafts[: len(ahead)] = ahead
            step = self._decoder.step(running)
            self.accepted += sum(step.accepted)
        return [request.tokens for request in self.requests]

    def _free(self, request: Request) -> None:
        gone = max(request.num_computed_tokens - WINDOW + 1, 0) // BLOCK_SIZE
        for column in range(gone if self._frees else 0):
            if block := int(request.block_table[column]):
                for tensor in self._caches:
                    tensor[block] = 1e4
            request.block_table[column] = NULL_BLOCK


MODELS = {
    "windows everywhere": (EVERYWHERE, EVERYWHERE, True),
    "a target of both kinds of layers, a windowed draft": (ONE_LAYER, EVERYWHERE, False),
    "a windowed target, a draft that sees everything": (EVERYWHERE, {}, False),
    "a target that sees everything, a windowed draft": ({}, EVERYWHERE, False),
}


@pytest.mark.parametrize("support", ["varlen", "uniform"])
@pytest.mark.parametrize(("target", "draft", "frees"), MODELS.values(), ids=MODELS)
def test_tokens_are_those_of_plain_decoding(target, draft, frees, support):
    plain = Engine(0, target, draft, support=support, frees=frees)
    truth = plain.run()
    assert min(len(set(tokens)) for tokens in truth) > 15
    assert max(max(tokens) for tokens in truth) < VOCABULARY
    speculating = Engine(SPEC_TOKENS, target, draft, support=support, frees=frees)
    assert speculating.run(truth) == truth
    assert speculating.accepted > 40
    if target:
        wide = Engine(0, {}, draft, support=support, frees=False)
        assert wide.run() != truth, "the window makes no difference: the comparison proves little"
