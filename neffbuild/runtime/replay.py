"""Executing a replay: the synthetic workload run for real, from stored programs alone."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from neffbuild.cache.directory import DirectoryStore
from neffbuild.config.build import BuildConfig
from neffbuild.config.errors import ToolchainRefusal
from neffbuild.grid.bucketer import Bucketer
from neffbuild.grid.kv_blocks import kv_bytes_per_position, kv_traffic, num_kv_blocks
from neffbuild.grid.replay import ReplayTally, replay_steps
from neffbuild.grid.select import Row
from neffbuild.grid.shapes import DecodeShape, Family
from neffbuild.models.decode import (
    allocate_kv_caches,
    build_decoder,
    model_dtype,
    named_kv_caches,
    named_tensors,
)
from neffbuild.runtime.dispatcher import DecodeBatch, Dispatcher
from neffbuild.runtime.loader import Loader
from neffbuild.toolchain.registry import load_toolchain

SEED = 0
_COMPARED_STEPS = 30
_INITIALIZER_RANGE = 0.02


def execute_replay(config: BuildConfig, store: DirectoryStore, steps: int) -> dict[str, Any]:
    """Run `steps` decode steps of the synthetic workload in strict mode, with random weights.

    Returns the `neffbuild.replay/1` document with three things more: `ready_seconds`, how long loading
    every program of the manifest took; for each unit the median of its steps, `median_step_seconds`; and
    `small_step`, one step at the smallest context run in turns through its own program and through the
    one at `max_model_len` (None where there is only one context length).

    Raises `MissingUnit` when a unit of the config is not stored, `ToolchainRefusal` for a config with
    speculation or artifacts this host cannot run, `IntegrityError` for damaged ones.
    """
    if config.serve.speculative_config is not None:
        raise ToolchainRefusal(
            "replay executes configs without speculation only: there is no draft program to run",
            field="serve.speculative_config",
            hint="`neffbuild replay` without --execute counts the steps",
        )
    toolchain = load_toolchain(config.toolchain.name)
    bucketer = Bucketer.from_config(
        config, query_len_support=toolchain.capabilities.query_len_support
    )
    loader = Loader.from_config(config, store)
    workload = _Workload(config)
    dispatcher = Dispatcher(bucketer, loader, workload.tensors)
    began = time.perf_counter()
    dispatcher.warm_up()
    ready = time.perf_counter() - began

    tally = ReplayTally(bucketer, kv_bytes_per_position(config.serve, config.model))
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    for step in replay_steps(bucketer, steps):
        batch = workload.batch(step.rows)
        began = time.perf_counter()
        result = dispatcher.run(batch)
        elapsed = time.perf_counter() - began
        assert result.shapes.target is not None
        seconds[result.shapes.target.bucket_name].append(elapsed)
        tally.add(step, result.shapes)
        workload.accept(result.outputs["next_token_ids"])

    counters = loader.counters
    document = tally.document(compiles=counters.compiles, hits=steps, misses=counters.misses)
    for unit in document["units"]:
        unit["median_step_seconds"] = median(seconds[unit["bucket_name"]])
    document["ready_seconds"] = ready
    document["small_step"] = _compare_small_step(config, bucketer, dispatcher, workload)
    return document


class _Workload:
    """A model with random weights, a KV pool with random content, and rows that own random blocks."""

    def __init__(self, config: BuildConfig) -> None:
        serve = config.serve
        generator = torch.Generator().manual_seed(SEED)
        model = build_decoder(config, Family.TARGET)
        spread = float(config.model.text.get("initializer_range") or _INITIALIZER_RANGE)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, spread, generator=generator)
        kv_caches = allocate_kv_caches(
            model.architecture, model_dtype(config), num_kv_blocks(serve), serve.block_size
        )
        for tensor in named_kv_caches(kv_caches).values():
            tensor.normal_(generator=generator)
        self.tensors = {**named_tensors(model), **named_kv_caches(kv_caches)}
        columns = -(-serve.max_model_len // serve.block_size)
        # Scattered over the pool as blocks of a running engine are; never the null block.
        shuffled = torch.randperm(serve.max_num_seqs * columns, generator=generator)
        usable = num_kv_blocks(serve) - 1
        self._block_table = (shuffled % usable + 1).to(torch.int32).view(-1, columns)
        self._tokens = torch.zeros(serve.max_num_seqs, dtype=torch.int32)

    def batch(self, rows: Sequence[Row]) -> DecodeBatch:
        """The rows with the tokens they computed last."""
        return DecodeBatch(rows, self._tokens[: len(rows)], self._block_table[: len(rows)])

    def accept(self, next_token_ids: Tensor) -> None:
        self._tokens[: len(next_token_ids)] = next_token_ids[:, 0]


def _compare_small_step(
    config: BuildConfig, bucketer: Bucketer, dispatcher: Dispatcher, workload: _Workload
) -> dict[str, Any] | None:
    """One step in its own program and in the one at `max_model_len`, in turns."""
    ladders = bucketer.decode[Family.TARGET]
    if len(ladders.context_len.rungs) == 1:
        return None
    num_seqs, need = ladders.num_seqs.rungs[-1], ladders.context_len.rungs[0]
    batch = workload.batch([Row(need - 1)] * num_seqs)
    small = bucketer.decode_shape(Family.TARGET, num_seqs=num_seqs, context_need=need)
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
