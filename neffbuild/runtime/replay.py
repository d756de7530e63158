"""Executing a replay: the synthetic workload run for real, from stored programs alone."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from neffbuild.cache.directory import DirectoryStore
from neffbuild.config.build import BuildConfig
from neffbuild.config.model import ModelConfig
from neffbuild.grid.acceptance import fixed_budget
from neffbuild.grid.bucketer import Bucketer
from neffbuild.grid.kv_blocks import kv_bytes_per_position, kv_traffic, num_kv_blocks
from neffbuild.grid.replay import ReplayTally, replay_stretches
from neffbuild.grid.shapes import DecodeShape, Family
from neffbuild.grid.step import Row, Step
from neffbuild.models.decode import (
    allocate_kv_caches,
    build_decoder,
    build_draft,
    model_dtype,
    named_kv_caches,
    named_tensors,
)
from neffbuild.models.eagle3 import Proposer
from neffbuild.models.llama import Decoder
from neffbuild.runtime.batch import DecodeBatch
from neffbuild.runtime.dispatcher import Dispatcher
from neffbuild.runtime.loader import Loader
from neffbuild.runtime.speculation import GreedyDecoder, Request
from neffbuild.toolchain.registry import load_toolchain

SEED = 0
_COMPARED_STEPS = 30
_INITIALIZER_RANGE = 0.02


def execute_replay(config: BuildConfig, store: DirectoryStore, steps: int) -> dict[str, Any]:
    """Run `steps` decode steps of the synthetic workload in strict mode, with random weights.

    Requests decode greedily; with speculation each brings all the drafts its draft program proposed, and
    grows by those the target accepts.

    Returns the `neffbuild.replay/1` document with more in it: `ready_seconds`, how long loading every
    program of the manifest took; for each unit the median of its steps, `median_step_seconds`;
    `small_step`, one step at the smallest context run in turns through its own program and through the
    one at `max_model_len` (None where there is only one context length); with speculation `acceptance`,
    by position of a draft.

    Raises `MissingUnit` when a unit of the config is not stored, `ToolchainRefusal` for artifacts this
    host cannot run, `IntegrityError` for damaged ones.
    """
    toolchain = load_toolchain(config.toolchain.name)
    bucketer = Bucketer.from_config(
        config,
        query_len_support=toolchain.capabilities.query_len_support,
    )
    loader = Loader.from_config(config, store)
    workload = _Workload(config)
    dispatcher = Dispatcher(bucketer, loader, workload.tensors, workload.draft_tensors)
    began = time.perf_counter()
    dispatcher.warm_up()
    ready = time.perf_counter() - began

    decoder = GreedyDecoder(bucketer, dispatcher, fixed_budget(bucketer.num_speculative_tokens))
    tally = ReplayTally(bucketer, kv_bytes_per_position(config.serve, config.model))
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    requests: list[Request] = []
    for stretch in replay_stretches(bucketer, steps):
        contexts = list(stretch.contexts)
        for index in range(stretch.steps):
            if index in stretch.joins:
                requests = [workload.request(row, n) for row, n in enumerate(contexts)]
            step = decoder.step(requests)
            tally.add(Step([Row(n) for n in contexts]), step.shapes)
            for shape, elapsed in zip(
                (step.shapes.target, step.shapes.draft),
                (step.target_seconds, step.draft_seconds),
                strict=True,
            ):
                if shape is not None:
                    seconds[shape.bucket_name].append(elapsed)
            for row, request in enumerate(requests):
                if decoder.finished(request):
                    requests[row] = workload.request(row, 1)
            contexts = [request.num_computed_tokens for request in requests]

    counters = loader.counters
    document = tally.document(compiles=counters.compiles, hits=steps, misses=counters.misses)
    for unit in document["units"]:
        unit["median_step_seconds"] = median(seconds[unit["bucket_name"]])
    document["ready_seconds"] = ready
    document["small_step"] = _compare_small_step(config, bucketer, dispatcher, workload)
    if bucketer.num_speculative_tokens:
        document["acceptance"] = decoder.acceptance.document()
    return document


class _Workload:
    """Models with random weights, KV pools with random content, and rows that own random blocks."""

    def __init__(self, config: BuildConfig) -> None:
        serve = config.serve
        self._generator = torch.Generator().manual_seed(SEED)
        target = build_decoder(config, Family.TARGET)
        self.tensors = self._random_tensors(config, config.model, target)
        self.draft_tensors: dict[str, Tensor] = {}
        if config.draft_model is not None:
            draft = build_draft(config)
            self.draft_tensors = self._random_tensors(config, config.draft_model, draft)
        columns = -(-serve.max_model_len // serve.block_size)
        # Scattered over the pool as blocks of a running engine are; never the null block.
        shuffled = torch.randperm(serve.max_num_seqs * columns, generator=self._generator)
        usable = num_kv_blocks(serve) - 1
        self.block_table = (shuffled % usable + 1).to(torch.int32).view(-1, columns)
        self._max_model_len = serve.max_model_len

    def request(self, row: int, num_computed_tokens: int) -> Request:
        """A request in a row's blocks; the same token over and over stands for what it has computed."""
        return Request(
            tokens=[0] * (num_computed_tokens + 1),
            num_computed_tokens=num_computed_tokens,
            max_tokens=self._max_model_len,
            block_table=self.block_table[row],
        )

    def _random_tensors(
        self, config: BuildConfig, model: ModelConfig, module: Decoder | Proposer
    ) -> dict[str, Tensor]:
        """Weights and KV pool by the names programs know them under. A vocabulary map stays as it is
        made, one draft token for each of the first target tokens."""
        spread = float(model.text.get("initializer_range") or _INITIALIZER_RANGE)
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, spread, generator=self._generator)
        kv_caches = allocate_kv_caches(
            module.architecture,
            model_dtype(config),
            num_kv_blocks(config.serve),
            config.serve.block_size,
        )
        pool = named_kv_caches(kv_caches)
        for tensor in pool.values():
            tensor.normal_(generator=self._generator)
        return {**named_tensors(module), **pool}


def _compare_small_step(
    config: BuildConfig, bucketer: Bucketer, dispatcher: Dispatcher, workload: _Workload
) -> dict[str, Any] | None:
    """One step in its own program and in the one at `max_model_len`, in turns."""
    family = Family.TARGET_WITHOUT_SPEC if bucketer.num_speculative_tokens else Family.TARGET
    ladders = bucketer.decode[family]
    if len(ladders.context_len.rungs) == 1:
        return None
    num_seqs, need = ladders.num_seqs.rungs[-1], ladders.context_len.rungs[0]
    tokens = torch.zeros(num_seqs, dtype=torch.int32)
    batch = DecodeBatch([Row(need - 1)] * num_seqs, tokens, workload.block_table)
    small = bucketer.decode_shape(family, num_seqs=num_seqs, context_need=need)
    full = replace(small, context_len=bucketer.max_model_len)
    seconds: dict[DecodeShape, list[float]] = {small: [], full: []}
    for _ in range(_COMPARED_STEPS):
        for shape, measured in seconds.items():
            program = dispatcher.program(shape)
            began = time.perf_counter()
            dispatcher.run_in(program, batch)
            measured.append(time.perf_counter() - began)
    traffic = kv_traffic(bucketer, small, [row.num_computed_tokens for row in batch.rows])
    kv_bytes = kv_bytes_per_position(config.serve, config.model)
    return {
        "num_seqs": num_seqs,
        "context_need": need,
        "bucket_name": small.bucket_name,
        "bucket_name_full_length": full.bucket_name,
        "kv_bytes": traffic.read * kv_bytes,
        "kv_bytes_full_length": traffic.full_length * kv_bytes,
        "kv_bytes_ratio": traffic.full_length / traffic.read,
        "step_seconds": median(seconds[small]),
        "step_seconds_full_length": median(seconds[full]),
        "time_ratio": median(seconds[full]) / median(seconds[small]),
    }
