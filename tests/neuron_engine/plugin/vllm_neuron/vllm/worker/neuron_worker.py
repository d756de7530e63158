"""The worker: which graphs there are, and in which order they are captured and compiled."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from vllm_neuron import envs
from vllm_neuron.compile.cache import capture, parallel_compile
from vllm_neuron.compile.faults import Faults
from vllm_neuron.compile.graphs import Graph, decode_graph, prefill_graph, vision_graph

_log = logging.getLogger("vllm_neuron")
_TILE = 128


class NeuronWorker:
    def __init__(self, args: Any) -> None:
        self.args = args
        self.neuron = args.additional_config.get("neuron_config", {})
        self.faults = Faults.read(args.additional_config.get("control"))
        self.faults.journal(
            {
                "options": vars(args),
                "environment": {
                    name: value
                    for name, value in sorted(os.environ.items())
                    if name.startswith(envs.SHOWN)
                },
            }
        )
        if not envs.is_cpu_compile() and not any(Path("/dev").glob("neuron*")):
            raise RuntimeError("no Neuron device: nrt_init failed")
        if not envs.is_xla() or envs.parallel_trace():
            raise RuntimeError("a farm starts the engine on the route xla, traced in sequence")
        self._validate()

    def load_model(self) -> None:
        folder = Path(self.args.model)
        self.model = json.loads((folder / "config.json").read_text())
        if self.faults.needs_checkpoint:
            (folder / "model.safetensors").read_bytes()
        _log.info(f"load_weights_lite: {sorted(one.name for one in folder.iterdir())}")

    def compile_or_warm_up_model(self) -> None:
        self.faults.at_start()
        prefill = [] if envs.skips("PREFILL") else list(self._prefill())
        decode = [] if envs.skips("DECODE") else list(self._decode())
        if prefill:
            _log.info(f"Extracting graphs for {len(prefill)} prefill buckets: …")
        if decode:
            _log.info(f"Extracting {len(decode)} decode compile targets: …")
        graphs = sorted([*prefill, *decode], key=lambda graph: graph.size, reverse=True)
        if not envs.skips("ENCODER"):
            graphs.append(vision_graph(2048))
        if self.faults.other_order:
            graphs.reverse()
        if self.faults.extra:
            graphs.insert(0, vision_graph(4096))
        root = envs.cache_dir()
        for rank, graph in product(range(self.args.tensor_parallel_size), graphs):
            self.faults.at_trace(graph.label, rank)
            capture(root, graph, rank, self.faults)
        parallel_compile(root, graphs, self.faults)
        _log.info("Model warmup completed: CPU compile, nothing was loaded")

    def _decode(self) -> Iterator[Graph]:
        contexts = self.neuron.get("decode_context_length_buckets")
        for rows, context in product(
            self.neuron["num_seqs_buckets"], [*(contexts or []), self.args.max_model_len]
        ):
            columns = -(-context // self.args.block_size)
            if contexts is None:
                tile = max(_TILE // self.args.block_size, 1)
                columns = -(-columns // tile) * tile
            yield decode_graph(self.model, self.args, rows, columns, self._windowed(columns))

    def _prefill(self) -> Iterator[Graph]:
        columns = -(-self.args.max_model_len // self.args.block_size)
        tokens = self.args.max_num_batched_tokens
        for bucket in self.neuron.get("num_batched_tokens_buckets") or [tokens]:
            yield prefill_graph(self.model, self.args, bucket, columns)

    def _windowed(self, columns: int) -> int | None:
        window = self.model.get("sliding_window")
        if not window:
            return None
        block, tile = self.args.block_size, max(_TILE // self.args.block_size, 1)
        return min(-(-(window // block + 1) // tile) * tile, columns)

    def _validate(self) -> None:
        seqs, most = self.neuron["num_seqs_buckets"], self.args.max_num_seqs
        if seqs[-1] != most:
            raise ValueError(
                f"Last bucket in num_seqs_buckets must equal max_num_seqs ({most}), got {seqs[-1]}"
            )
        if self.args.num_gpu_blocks_override is None:
            raise RuntimeError("this stand-in has no table of device memory")
        if self.args.speculative_config is not None and envs.is_cpu_compile():
            raise RuntimeError("draft tensors on the meta device have no storage")
