"""The worker: which graphs there are, and in which order they are captured and compiled."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from vllm_neuron import envs
from vllm_neuron.compile.cache import capture, create_cache_hash, is_complete, parallel_compile
from vllm_neuron.compile.faults import Faults
from vllm_neuron.compile.graphs import (
    Graph,
    Step,
    decode_graph,
    draft_graph,
    draft_prefill_graph,
    prefill_graph,
    vision_graph,
)
from vllm_neuron.runtime import Device, nrt_init

_log = logging.getLogger("vllm_neuron")
_TILE = 128
_METHODS = ("eagle", "eagle3")


class NeuronWorker:
    def __init__(self, args: Any) -> None:
        self.args = args
        self.neuron = args.additional_config.get("neuron_config", {})
        self.speculation = args.speculative_config
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
        if not envs.is_xla() or envs.parallel_trace():
            raise RuntimeError("a farm starts the engine on the route xla, traced in sequence")
        self._validate()
        self.device = None if envs.is_cpu_compile() else nrt_init(args.tensor_parallel_size)

    def load_model(self) -> None:
        folder = Path(self.args.model)
        self.model = json.loads((folder / "config.json").read_text())
        if self.speculation is not None:
            draft = Path(self.speculation["model"])
            self.draft = json.loads((draft / "config.json").read_text())
            self._load_weights(draft)
        if self.device is not None:
            self._load_weights(folder)
            return
        if self.faults.needs_checkpoint:
            (folder / "model.safetensors").read_bytes()
        _log.info(f"load_weights_lite: {sorted(one.name for one in folder.iterdir())}")

    def _load_weights(self, folder: Path) -> None:
        weights = sorted(folder.glob("*.safetensors"))
        if not weights:
            raise RuntimeError(f"Cannot find any model weights with `{folder}`")
        for path in weights:
            path.read_bytes()

    def compile_or_warm_up_model(self) -> None:
        self.faults.at_start()
        prefill = [] if envs.skips("PREFILL") else list(self._prefill())
        decode = [] if envs.skips("DECODE") else list(self._decode())
        if prefill:
            _log.info(f"Extracting graphs for {len(prefill)} prefill buckets: …")
        if decode:
            _log.info(f"Extracting {len(decode)} decode compile targets: …")
        both = [graph for one in (*prefill, *decode) for graph in one]
        graphs = sorted(both, key=lambda graph: (graph.with_options, graph.size), reverse=True)
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
        if self.device is None:
            _log.info("Model warmup completed: CPU compile, nothing was loaded")
        else:
            self._warm_up(self.device, root, prefill, decode)

    def _warm_up(
        self,
        device: Device,
        root: Path,
        prefill: Sequence[Sequence[Graph]],
        decode: Sequence[Sequence[Graph]],
    ) -> None:
        for graphs in prefill:
            for graph in graphs:
                self._load(device, root, graph)
        _log.info(f"Warming up {len(decode)} decode compile targets: …")
        for number, graphs in enumerate(decode, start=1):
            _log.info(f"[{number}/{len(decode)}] Warming up decode (batch=…, seq=1)")
            for graph in graphs:
                self._load(device, root, graph)
        _log.info(f"Model warmup completed: {len(prefill)} prefill, {len(decode)} decode")

    def _load(self, device: Device, root: Path, graph: Graph) -> None:
        key = create_cache_hash(graph)
        if self.faults.load_fails:
            raise RuntimeError(f"Model warmup failed: nrt_load of {key}: NRT_RESOURCE")
        if not is_complete(root / key, key):
            raise RuntimeError(f"{graph.label} was captured and is not compiled")
        device.load(root / key)

    def _decode(self) -> Iterator[Sequence[Graph]]:
        """For each pair of buckets its programs: with speculation there are three."""
        contexts = self.neuron.get("decode_context_length_buckets")
        for rows, context in product(
            self.neuron["num_seqs_buckets"], [*(contexts or []), self.args.max_model_len]
        ):
            columns = -(-context // self.args.block_size)
            if contexts is None:
                tile = max(_TILE // self.args.block_size, 1)
                columns = -(-columns // tile) * tile
            windowed = self._windowed(columns)
            if self.speculation is None:
                yield [decode_graph(self.model, self.args, Step(rows, columns, windowed))]
                continue
            drafts = self.speculation["num_speculative_tokens"] + self.faults.more_drafts
            step = Step(rows, columns, windowed, drafts)
            both = [
                decode_graph(self.model, self.args, one) for one in (step, replace(step, drafts=0))
            ]
            if not self.faults.no_drafts:
                both.append(draft_graph(self.draft, self.args, replace(step, windowed=None)))
            yield both

    def _prefill(self) -> Iterator[Sequence[Graph]]:
        columns = -(-self.args.max_model_len // self.args.block_size)
        tokens = self.args.max_num_batched_tokens
        for bucket in self.neuron.get("num_batched_tokens_buckets") or [tokens]:
            speculates = self.speculation is not None
            graphs = [prefill_graph(self.model, self.args, bucket, columns, speculates=speculates)]
            if speculates and not self.faults.no_drafts:
                graphs.append(draft_prefill_graph(self.draft, self.args, bucket, columns))
            yield graphs

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
        if self.speculation is None:
            return
        if envs.is_cpu_compile():
            raise RuntimeError("draft tensors on the meta device have no storage")
        if self.speculation["method"] not in _METHODS:
            raise ValueError(
                f"Unsupported speculative decoding method: {self.speculation['method']}"
            )
