"""Decode steps from stored programs: what a small bucket saves, and what dispatch costs.

One step at the smallest context through its own program and through the one at `max_model_len`; then the
step dispatched (shapes selected, inputs padded, block tables trimmed) against the loaded program called
directly, and against the same program behind `torch.compile`'s guards. All in turns in one process;
medians and ratios.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from warm_store import CONFIG, warm_store

from neffbuild.cache.directory import DirectoryStore
from neffbuild.config.build import BuildConfig
from neffbuild.config.load import load_config
from neffbuild.grid.bucketer import Bucketer
from neffbuild.grid.kv_blocks import kv_bytes_per_position, kv_traffic, num_kv_blocks
from neffbuild.grid.shapes import Family
from neffbuild.grid.step import Rows
from neffbuild.models.decode import (
    allocate_kv_caches,
    build_decoder,
    mark_num_blocks_symbolic,
    model_dtype,
    named_kv_caches,
    named_tensors,
)
from neffbuild.runtime.batch import DecodeBatch
from neffbuild.runtime.dispatcher import Dispatcher
from neffbuild.runtime.loader import Loader
from neffbuild.toolchain.inductor.capture import one_shape_callable
from neffbuild.toolchain.registry import load_toolchain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", type=Path, help="neffbuild cache to use and fill")
    parser.add_argument("--steps", type=int, default=300)
    chosen = parser.parse_args()
    with warm_store(chosen.cache) as cache:
        _measure(load_config(CONFIG), cache, chosen.steps)


def _measure(config: BuildConfig, cache: Path, steps: int) -> None:
    toolchain = load_toolchain(config.toolchain.name)
    bucketer = Bucketer.from_config(
        config, query_len_support=toolchain.capabilities.query_len_support
    )
    served = _Served(config, bucketer, cache)
    print(f"{torch.get_num_threads()} threads")
    for num_seqs in bucketer.decode[Family.TARGET].num_seqs.rungs:
        _measure_batch(served, num_seqs, steps)


class _Served:
    """A model with random weights, its KV caches, and a dispatcher with every program loaded."""

    def __init__(self, config: BuildConfig, bucketer: Bucketer, cache: Path) -> None:
        serve = config.serve
        self.config = config
        self.bucketer = bucketer
        self.model = build_decoder(config, Family.TARGET)
        for parameter in self.model.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.02)
        self.kv_caches = allocate_kv_caches(
            self.model.architecture, model_dtype(config), num_kv_blocks(serve), serve.block_size
        )
        tensors = named_tensors(self.model) | named_kv_caches(self.kv_caches)
        loader = Loader.from_config(config, DirectoryStore(cache))
        self.dispatcher = Dispatcher(bucketer, loader, tensors)
        self.dispatcher.warm_up()
        os.environ |= {"NEFFBUILD_CACHE": str(cache), "NEFFBUILD_STRICT": "1"}

    def batch(self, num_seqs: int, need: int) -> DecodeBatch:
        columns = -(-self.config.serve.max_model_len // self.config.serve.block_size)
        table = 1 + torch.arange(num_seqs * columns, dtype=torch.int32).view(num_seqs, columns)
        return DecodeBatch(Rows([need - 1] * num_seqs), torch.arange(num_seqs), table)


def _measure_batch(served: _Served, num_seqs: int, steps: int) -> None:
    bucketer, dispatcher = served.bucketer, served.dispatcher
    need = bucketer.decode[Family.TARGET].context_len.rungs[0]
    batch = served.batch(num_seqs, need)
    small = bucketer.decode_shape(Family.TARGET, num_seqs=num_seqs, context_need=need)
    full = replace(small, context_len=bucketer.max_model_len)
    own, longest = dispatcher.program(small), dispatcher.program(full)
    compared = _in_turns(
        {
            "small": lambda: dispatcher.run_in(own, batch),
            "full": lambda: dispatcher.run_in(longest, batch),
        },
        steps // 10,
    )
    inputs = [tensor.clone() for tensor in own.buffers.inputs]
    guarded = torch.compile(one_shape_callable(served.model), backend="neffbuild", dynamic=False)
    mark_num_blocks_symbolic(served.kv_caches)
    with torch.no_grad():
        seconds = _in_turns(
            {
                "direct": lambda: own.call({}),
                "dispatched": lambda: dispatcher.run(batch),
                "guarded": lambda: guarded(*inputs, served.kv_caches),
            },
            steps,
        )
    traffic = kv_traffic(bucketer, small, [need - 1] * num_seqs)
    kv_bytes = kv_bytes_per_position(served.config.serve, served.config.model)
    overhead = seconds["dispatched"] - seconds["direct"]
    print(
        f"{small.bucket_name}: {compared['small'] * 1e3:.3f} ms, {traffic.read * kv_bytes} KV bytes; "
        f"through {full.bucket_name} {compared['full'] * 1e3:.3f} ms, "
        f"{traffic.full_length * kv_bytes} KV bytes: {compared['full'] / compared['small']:.1f} times "
        f"faster, {traffic.full_length / traffic.read:.0f} times fewer bytes\n"
        f"  called directly {seconds['direct'] * 1e6:.0f} µs, dispatched "
        f"{seconds['dispatched'] * 1e6:.0f} µs (+{overhead * 1e6:.0f} µs, {overhead * 1e5:.1f} % of a "
        f"1 ms step), behind torch.compile's guards {seconds['guarded'] * 1e6:.0f} µs",
        flush=True,
    )


def _in_turns(ways: Mapping[str, Callable[[], object]], steps: int) -> dict[str, float]:
    """Median seconds of each way. One after the other in every round, so that all see the same noise."""
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for call in ways.values():
        call()
    for _ in range(steps):
        for way, call in ways.items():
            began = time.perf_counter()
            call()
            seconds[way].append(time.perf_counter() - began)
    return {way: median(measured) for way, measured in seconds.items()}


if __name__ == "__main__":
    main()
