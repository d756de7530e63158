"""The compile cache of one start of vLLM Neuron: what it is given beforehand, and what it leaves."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from neffbuild.cache.engine_cache import engine_entry
from neffbuild.cache.layouts.layout import Found, State, entry_file
from neffbuild.cache.layouts.tree import Tree
from neffbuild.cache.layouts.vllm_neuron import KERNEL_RESULTS, NAME, VllmNeuron
from neffbuild.cache.layouts.vllm_neuron_rules import XLA
from neffbuild.grid.engine_entries import Unread
from neffbuild.grid.shapes import Shape
from neffbuild.toolchain.neuronx.engine_entries import RowUnits


@dataclass(frozen=True, slots=True)
class Entry:
    """One captured graph, by the engine's key. `fault` is why the engine would not take it for finished,
    None where it would. `shapes` are the units of the row that it may be for; none either because it is
    for none of them, or because it does not say, for the reason `unstated`."""

    key: str
    found: Found
    shapes: frozenset[Shape] = frozenset()
    unstated: str | None = None

    @property
    def fault(self) -> str | None:
        if self.found.state is State.COMPLETE:
            return None
        return self.found.reason or self.found.state.value


def entries(root: Path, row: RowUnits) -> list[Entry]:
    """Every entry of a cache, finished or not, by key. What ranks have captured for one of them to
    compile is none."""
    layout, tree = VllmNeuron(), Tree(root)
    return [
        _entry(tree, layout.examine(tree, place), row)
        for place in layout.places(tree)
        if "/" not in place
    ]


def _entry(tree: Tree, found: Found, row: RowUnits) -> Entry:
    path = tree.root / found.place / XLA.graph
    try:
        graph = path.read_bytes() if path.is_file() else None
        return Entry(found.place, found, row.shapes_of(engine_entry(tree, found), graph))
    except Unread as unread:
        return Entry(found.place, found, unstated=str(unread))


def artifact_files(root: Path, entry: Entry) -> dict[str, Path]:
    """The files of a finished entry, as an artifact names them: its own, the kernel binaries that its graph
    names, and what the engine keeps of how these were built."""
    files = {entry_file(NAME, name): root / name for name in entry.found.files}
    kernels = {outside.file.name for outside in entry.found.outside}
    beside = [
        result
        for result in _kernel_results(root)
        if kernels & {outside.file.name for outside in result.outside}
    ]
    for result in beside:
        files |= {entry_file(NAME, name): root / name for name in result.files}
    for found in (entry.found, *beside):
        files |= {
            entry_file(outside.layout, outside.file.name): outside.tree.root / outside.file.name
            for outside in found.outside
        }
    return files


def copy_finished(source: Path, destination: Path) -> None:
    """Copy what is finished in one cache into another, each entry whole or not at all. Several processes
    may do so at once."""
    layout, tree = VllmNeuron(), Tree(source)
    for place in layout.places(tree):
        found = layout.examine(tree, place)
        if found.state is State.COMPLETE and not (destination / place).exists():
            _copy(source, found, destination)


def _copy(source: Path, found: Found, destination: Path) -> None:
    destination.mkdir(parents=True, exist_ok=True)
    # Beside the destination, or the last step would be no rename.
    with tempfile.TemporaryDirectory(prefix=".copy-", dir=destination) as folder:
        for name in found.files:
            target = Path(folder, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            # Bytes of its own: the engine writes to files it finds, and entries in stores are for ever.
            shutil.copyfile(source / name, target)
        place = destination / found.place
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            Path(folder, found.place).rename(place)
        except OSError:
            if not place.exists():
                raise


def _kernel_results(root: Path) -> Iterator[Found]:
    layout, tree = VllmNeuron(), Tree(root)
    for place in layout.places(tree):
        if place.startswith(KERNEL_RESULTS):
            found = layout.examine(tree, place)
            if found.state is State.COMPLETE:
                yield found
