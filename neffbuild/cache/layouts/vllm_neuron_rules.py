"""When vLLM Neuron takes an entry of its cache for finished, by the published code of 0.21 to 0.24.

The graph, the NEFF, metadata that states the folder's name as its key, and a last file that was written when
all that was whole. The engine asks no more; a NEFF that is cut short is refused here all the same.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from neffbuild.cache.layouts.neff import HEADER_BYTES, neff_build_version, neff_fault
from neffbuild.cache.layouts.tree import Tree, TreeFile
from neffbuild.cache.layouts.vllm_neuron_lock import stated_lines

SENTINEL = ".compilation_complete"
METADATA_NAME = re.compile(r"\.artifact_metadata_v\d+\.json")
MOST_SMALL = 1 << 24
"""Bytes of a file that is read as a whole."""


@dataclass(frozen=True, slots=True)
class Generation:
    """The file names of one route and SDK generation; `{key}` stands for the folder's name."""

    name: str
    graph: str
    neff: str
    verified: bool


XLA = Generation("xla-2.32", "graph.hlo", "graph_{key}.neff", verified=True)
NATIVE = Generation("native-unverified", "module.mlir", "module.neff", verified=False)
GENERATIONS = (XLA, NATIVE)


def fault_of(
    tree: Tree, place: str, generation: Generation, inside: Mapping[str, TreeFile]
) -> str | None:
    """Why the engine would not take the folder for a hit, or must not."""
    key = place.rpartition("/")[2]
    neff_name = generation.neff.format(key=key)
    for name in (generation.graph, neff_name, SENTINEL):
        if name not in inside:
            return f"there is no {name}"
        if inside[name].size == 0:
            return f"{name} is empty"
    metadata = [name for name in inside if METADATA_NAME.fullmatch(name)]
    if not metadata:
        return "there is no .artifact_metadata_v*.json"
    for name in metadata:
        fault = _metadata_fault(tree.read(f"{place}/{name}", MOST_SMALL) or b"", key)
        if fault is not None:
            return f"{name} {fault}"
    neff = inside[neff_name]
    stated = stated_lines(tree.read(f"{place}/{SENTINEL}", MOST_SMALL) or b"").get("neff_size")
    if stated != str(neff.size):
        return f"{SENTINEL} states neff_size {stated}, and {neff_name} has {neff.size}"
    fault = neff_fault(_head(tree, neff), neff.size)
    return f"{neff_name} {fault}" if fault else None


def _metadata_fault(data: bytes, key: str) -> str | None:
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return "is no JSON"
    stated = document.get("cache_key") if isinstance(document, dict) else None
    return None if stated == key else f"states the cache_key {stated!r:.80}, not that of its folder"


def _head(tree: Tree, file: TreeFile) -> bytes:
    with tree.opened(file.name) as descriptor:
        return os.pread(descriptor, HEADER_BYTES, 0)


def build_version(tree: Tree, neff: TreeFile) -> str | None:
    return neff_build_version(_head(tree, neff))
