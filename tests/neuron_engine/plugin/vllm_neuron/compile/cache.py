"""The compile cache: capture into rank folders, then one compile for each key that has no sentinel."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from vllm_neuron import envs
from vllm_neuron.compile.faults import Faults
from vllm_neuron.compile.graphs import Graph

_log = logging.getLogger("vllm_neuron")
_ARGUMENTS = (
    "--auto-cast=none",
    "--verbose=35",
    "-O1",
    "--internal-hlo2tensorizer-options=--modular-flow-mac-threshold=10",
    "--internal-backend-options=--enable-verifier=false --enable-nested-dynamic-loop",
)


def create_cache_hash(graph: Graph) -> str:
    """Neither the root nor the rank is in it."""
    arguments = _ARGUMENTS if graph.with_options else ()
    parts = [graph.fx_text, graph.inputs_text, *arguments, envs.target()]
    return hashlib.md5("|".join(parts).encode()).hexdigest()


def is_complete(folder: Path, key: str) -> bool:
    return (
        (folder / "graph.hlo").exists()
        and (folder / f"graph_{key}.neff").exists()
        and (folder / ".compilation_complete").exists()
        and (folder / ".artifact_metadata_v0.json").exists()
    )


def capture(root: Path, graph: Graph, rank: int, faults: Faults) -> None:
    key = faults.key(create_cache_hash(graph), graph.label, rank)
    folder = root / key
    if is_complete(folder, key):
        _log.info(f"Local cache hit for key: {key}. Skipping graph capture.")
        (folder / ".cache_accessed").write_text(str(int(time.time())))
        return
    _log.info(f"Compilation cache key: {key}")
    place = folder / f"rank{rank}"
    place.mkdir(parents=True, exist_ok=True)
    (place / "graph.hlo").write_bytes(graph.hlo(with_shapes=faults.states_shapes(graph.label)))
    (place / ".artifact_metadata_v0.json").write_text(_metadata(key))
    if faults.writes_texts(graph.label):
        (place / "fxgraph.txt").write_text(graph.fx_text)
        (place / "example_inputs.txt").write_text(graph.inputs_text)


def parallel_compile(root: Path, graphs: Sequence[Graph], faults: Faults) -> None:
    """By the first of the ranks. Only one at a time, whatever `envs.compile_workers` says."""
    if envs.compile_workers() != 1:
        raise RuntimeError("a farm starts the engine with one compile worker")
    labels = {create_cache_hash(graph): graph.label for graph in graphs}
    order = {key: number for number, key in enumerate(labels)}
    waiting = [one for one in root.iterdir() if one.is_dir() and not is_complete(one, one.name)]
    for folder in sorted(waiting, key=lambda one: order.get(one.name, len(order))):
        _compile(folder, labels.get(folder.name, ""), faults)


def _compile(folder: Path, label: str, faults: Faults) -> None:
    key = folder.name
    metadata = folder.parent / f".{key}.compilation_metadata"
    metadata.write_text(f"pid:{os.getpid()}\nrank:0\ntimestamp:{time.time()}\n")
    place = min(folder.glob("rank*"))
    for path in place.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    neff = f"graph_{key}.neff"
    command = [
        *("neuronx-cc", "compile", "graph.hlo", "--framework", "XLA", "--target", envs.target()),
        *("--output", neff, "--logfile", "log-neuron-cc.txt", *_ARGUMENTS),
    ]
    (folder / "command.txt").write_text(" ".join(command))
    if message := faults.at_wait(label):
        _end(message)
    faults.at_compile(label)
    done = subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL)
    status = faults.status(label) or done.returncode
    if status != 0:
        _end(f"neuronx-cc compilation failed with {status}. Check compiler logs.")
    for scratch in folder.glob("neuronxcc-*"):
        for path in scratch.iterdir():
            path.unlink()
        scratch.rmdir()
    if faults.writes_sentinel(label):
        size = (folder / neff).stat().st_size
        text = f"completed:{int(time.time())}\nneff_size:{size}\ncompleted_by_rank:0\n"
        (folder / ".compilation_complete").write_text(text)
    metadata.unlink()


def _end(message: str) -> NoReturn:
    _log.error(message)
    _log.error("Compilation failed - terminating process for cleanup")
    sys.exit(f"FATAL: {message}")


def _metadata(key: str) -> str:
    document = {
        "version": 0,
        "cache_key": key,
        "output_count": 1,
        "unused_input_indices": [],
        "has_rng_seed_parameter": False,
        "io_map": {},
    }
    return json.dumps(document)
