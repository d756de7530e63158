"""The compile cache of vLLM Neuron, looked through for what its entries are programs of.

What is an entry, and whether it is finished, is judged as everywhere (`neffbuild.cache.layouts`); nothing in
the tree is believed or followed. The texts that an entry keeps for people lie in its folder, or where capture
leaves them, in a folder of each rank below it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from neffbuild.cache.layouts.adopting import examined
from neffbuild.cache.layouts.layout import Found, State
from neffbuild.cache.layouts.tree import Names, Tree, Unsafe
from neffbuild.cache.layouts.vllm_neuron import KERNEL_RESULTS, VllmNeuron, rank_folders
from neffbuild.cache.layouts.vllm_neuron_rules import SENTINEL
from neffbuild.grid.engine_entries import EngineEntry

_MOST_BYTES = 64 << 20
"""Of one text. A graph of many layers has some megabytes."""


def engine_entries(root: Path) -> Iterator[EngineEntry]:
    """The entries in an engine's cache, by name. Raises `ConfigError` for a folder that is none, `StoreError`
    for one that cannot be listed."""
    tree = Tree(root)
    tree.require()
    for found in examined(VllmNeuron(), tree):
        is_entry = not f"{found.place}/".startswith(KERNEL_RESULTS)
        # Locks stay where entries were removed.
        if is_entry and (found.state is State.LOCKED or os.path.lexists(root / found.place)):
            yield engine_entry(tree, found)


def empty_rank_folders(root: Path) -> list[str]:
    """Folders of ranks in an engine's cache that hold nothing, by name. What cannot be listed is among the
    entries."""
    tree = Tree(root)
    listed = _names(tree)
    ranks = rank_folders(listed) if listed else []
    return [rank for rank in ranks if _names(tree, rank) == Names((), (), ())]


def _names(tree: Tree, folder: str = "") -> Names | None:
    try:
        return tree.names(folder)
    except (Unsafe, OSError):
        return None


def engine_entry(tree: Tree, found: Found) -> EngineEntry:
    """What a place of the layout holds for people, and what was found of it."""
    place = found.place
    try:
        if found.state is State.REFUSED:
            raise Unsafe(found.reason)
        folders = [place, *(f"{place}/{name}" for name in tree.names(place).folders)]
        inputs = _first_text(tree, folders, "example_inputs.txt")
        graph = _first_text(tree, folders, "fxgraph.txt")
        says_finished = tree.file(f"{place}/{SENTINEL}") is not None
    except Unsafe as error:
        return EngineEntry(place, problem=f"it is refused: {error}")
    except OSError as error:
        return EngineEntry(place, problem=f"it cannot be read: {error.strerror or error}")
    if found.state is State.LOCKED and (inputs is None or graph is None):
        return EngineEntry(place, problem=f"it is not finished: {found.reason}")
    damaged = says_finished and found.state is State.INCOMPLETE
    return EngineEntry(
        place,
        example_inputs=inputs,
        graph=graph,
        finished=found.state is State.COMPLETE,
        damage=found.reason if damaged else None,
    )


def _first_text(tree: Tree, folders: list[str], name: str) -> str | None:
    for folder in folders:
        content = tree.read(f"{folder}/{name}", _MOST_BYTES)
        if content is not None:
            return content.decode("utf-8", "replace")
    return None
