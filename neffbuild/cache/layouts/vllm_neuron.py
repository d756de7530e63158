"""vLLM Neuron's compile cache: `<root>/<32 hex digits>/`, local or on a shared file system alike.

Written to the published behaviour (vLLM Neuron 0.21 to 0.24 for the XLA route); an entry counts where it has
the graph, the NEFF, artifact metadata whose `cache_key` is the folder's name, and last of all
`.compilation_complete`. What the native route names its files is not documented: `module.mlir` and
`module.neff` are taken for a generation of their own that says so.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

from neffbuild.cache.adopted import layout_recipe
from neffbuild.cache.layouts.command_file import compile_target
from neffbuild.cache.layouts.kernels import (
    NKI_LAYOUT,
    NKI_ROOT,
    below_nki_root,
    kernel_paths,
    path_strings,
)
from neffbuild.cache.layouts.layout import (
    Found,
    Listed,
    OutsideFile,
    State,
)
from neffbuild.cache.layouts.tree import (
    LONGEST_NAME,
    MOST_FILE_BYTES,
    NO_FOLDER,
    Names,
    Tree,
    TreeFile,
)
from neffbuild.cache.layouts.vllm_neuron_lock import LOCK_NAME, guarded, lock_state
from neffbuild.cache.layouts.vllm_neuron_rules import (
    GENERATIONS,
    METADATA_NAME,
    MOST_SMALL,
    SENTINEL,
    XLA,
    build_version,
    fault_of,
)

NAME = "vllm-neuron"
KERNEL_RESULTS = "nki/"
"""Places below it are results of kernels, no graphs."""

_KEY = re.compile(r"[0-9a-f]{32}")
_RANK = re.compile(r"(?:[A-Za-z0-9_-][A-Za-z0-9._-]*\.)?rank\d+")
_NKI_RESULT = re.compile(r"nki/[A-Za-z0-9_-][A-Za-z0-9._-]*\.json")
_KNOWN = re.compile(
    r"command\.txt|log-neuron-cc\.txt|fxgraph\.txt|example_inputs\.txt|hlo_passes/[^/]+"
)
_NEVER = frozenset({".cache_accessed"})
_MOST_GRAPH = 1 << 28
"""Bytes of a graph that is searched for kernels, in memory. Weights are in none."""


def rank_folders(names: Names) -> list[str]:
    """Those of the folders in a cache's root in which ranks have caches of their own."""
    return [name for name in names.folders if _RANK.fullmatch(name)]


class VllmNeuron:
    """See the module. `nki_root` is where the kernel binaries lie that graphs name below `NKI_ROOT`."""

    name = NAME
    keys_cover_compiler = True

    def __init__(self, nki_root: Path = Path(NKI_ROOT)) -> None:
        self._kernels = Tree(nki_root)

    def places(self, tree: Listed) -> Iterator[str]:
        names = tree.names()
        locked = {match[1] for name in names.files if (match := LOCK_NAME.fullmatch(name))}
        keys = set(filter(_KEY.fullmatch, (*names.folders, *names.files, *names.others)))
        yield from sorted(keys | locked)
        for rank in rank_folders(names):
            below = tree.names(rank)
            inside = sorted((*below.folders, *below.files, *below.others))
            yield from (f"{rank}/{name}" for name in inside if _KEY.fullmatch(name))
        yield from (f"nki/{name}" for name in tree.names("nki").files if name.endswith(".json"))

    def strays(self, tree: Listed) -> Iterator[str]:
        names = tree.names()
        for name in names.others:
            if not _KEY.fullmatch(name):
                yield f"{name!r} is a link, device, pipe or socket, and passed over"
        for name in (*names.files, *names.folders):
            if _RANK.fullmatch(name):
                inside = tree.names(name)
                if any(not _KEY.fullmatch(one) for one in (*inside.folders, *inside.files)):
                    yield f"{name} holds graphs that were captured and not compiled"
            elif not (_KEY.fullmatch(name) or LOCK_NAME.fullmatch(name) or name == "nki"):
                yield f"{name!r} is nothing that is known of this layout, and passed over"

    def examine(self, tree: Tree, place: str) -> Found:
        if place.startswith(KERNEL_RESULTS):
            return self._examine_kernel_result(tree, place)
        locked, stale = lock_state(tree, place)
        if locked is not None:
            return Found(place, State.LOCKED, locked)
        found = self.contents(tree, place)
        return replace(found, notes=(stale, *found.notes)) if stale else found

    def contents(self, tree: Tree, place: str) -> Found:
        if place.startswith(KERNEL_RESULTS):
            return self._examine_kernel_result(tree, place)
        key = place.rpartition("/")[2]
        if tree.is_no_folder(place):
            return Found(place, State.REFUSED, NO_FOLDER)
        notes: list[str] = []
        files = {
            name: file
            for name, file in tree.below(place).items()
            if self.place_of(name) is not None
        }
        inside = {name.removeprefix(f"{place}/"): file for name, file in files.items()}
        generation = next((one for one in GENERATIONS if one.graph in inside), None) or next(
            (one for one in GENERATIONS if one.neff.format(key=key) in inside), XLA
        )
        fault = fault_of(tree, place, generation, inside)
        if fault is not None:
            return Found(place, State.INCOMPLETE, fault, generation=generation.name)
        if not generation.verified:
            notes.append(
                "unverified: the native route's file names are not documented; taken for "
                f"{generation.graph} and {generation.neff}"
            )
        required = {generation.graph, generation.neff.format(key=key), SENTINEL}
        unknown = [
            name
            for name in inside
            if name not in required
            and not (METADATA_NAME.fullmatch(name) or _KNOWN.fullmatch(name))
            and not _RANK.fullmatch(name.partition("/")[0])
        ]
        if unknown:
            notes.append(f"carried along, and unknown: {', '.join(sorted(unknown))}")
        outside, remarks = self._kernels_of(tree, files[f"{place}/{generation.graph}"])
        neff = files[f"{place}/{generation.neff.format(key=key)}"]
        return Found(
            place,
            State.COMPLETE,
            notes=(*notes, *remarks),
            generation=generation.name,
            recipe=layout_recipe(
                NAME,
                generation.name,
                place,
                {
                    "version": build_version(tree, neff),
                    "target": compile_target(tree.read(f"{place}/command.txt", MOST_SMALL) or b""),
                },
            ),
            files=files,
            graph=f"{place}/{generation.graph}",
            outside=outside,
        )

    def place_of(self, name: str) -> str | None:
        if _NKI_RESULT.fullmatch(name):
            return name
        first, _, rest = name.partition("/")
        place = first
        if _RANK.fullmatch(first):
            second, _, rest = rest.partition("/")
            place, first = f"{first}/{second}", second
        leaf = rest.rpartition("/")[2]
        if not _KEY.fullmatch(first) or not rest:
            return None
        if leaf in _NEVER or leaf.endswith(".lock") or LOCK_NAME.fullmatch(leaf):
            return None
        return place

    def completed(self, place: str, sizes: Mapping[str, int]) -> Mapping[str, bytes]:
        sentinel = f"{place}/{SENTINEL}"
        if place.startswith(KERNEL_RESULTS) or sentinel in sizes:
            return {}
        key = place.rpartition("/")[2]
        for one in GENERATIONS:
            size = sizes.get(f"{place}/{one.neff.format(key=key)}")
            if size is not None:
                text = f"completed:{int(time.time())}\nneff_size:{size}\n"
                return {sentinel: text.encode()}
        return {}

    def is_last(self, name: str) -> bool:
        return name.rpartition("/")[2] == SENTINEL and name.count("/") <= 2

    def guarded(self, root: Path, place: str) -> AbstractContextManager[None]:
        return nullcontext() if place.startswith(KERNEL_RESULTS) else guarded(root, place)

    def _examine_kernel_result(self, tree: Tree, place: str) -> Found:
        if not _NKI_RESULT.fullmatch(place):
            return Found(place, State.REFUSED, "is not the name of a kernel's result")
        file = tree.file(place)
        try:
            document = json.loads(tree.read(place, MOST_SMALL) or b"")
        except (ValueError, RecursionError):
            return Found(place, State.INCOMPLETE, "is no whole JSON document")
        if file is None:
            return Found(place, State.INCOMPLETE, "is gone")
        outside, remarks = self._binaries(path_strings(document))
        return Found(
            place,
            State.COMPLETE,
            notes=remarks,
            generation=XLA.name,
            recipe=layout_recipe(NAME, XLA.name, place, {}),
            files={place: file},
            graph=place,
            outside=outside,
        )

    def _kernels_of(
        self, tree: Tree, graph: TreeFile
    ) -> tuple[tuple[OutsideFile, ...], tuple[str, ...]]:
        if graph.size > _MOST_GRAPH:
            return (), (f"{graph.name} is too large to be searched for kernels",)
        return self._binaries(kernel_paths(tree.read(graph.name, _MOST_GRAPH) or b""))

    def _binaries(self, paths: set[str]) -> tuple[tuple[OutsideFile, ...], tuple[str, ...]]:
        outside, remarks = [], []
        for path in sorted(paths):
            below = below_nki_root(path)
            try:
                file = self._kernels.file(below) if below else None
            except OSError:
                file = None
            if below is None:
                remarks.append(
                    f"names the kernel {path}, which is not below {NKI_ROOT}: not shipped (its NEFF is, "
                    "and needs it no more; compiling its graph again does)"
                )
            elif file is None:
                remarks.append(
                    f"names the kernel {path}, which is not there: not shipped (its NEFF needs it no more; "
                    "compiling its graph again does)"
                )
            elif len(below.encode()) > LONGEST_NAME or file.size > MOST_FILE_BYTES:
                remarks.append(
                    f"names the kernel {path}, whose path or content is longer than entries hold: "
                    "not shipped (its NEFF needs it no more; compiling its graph again does)"
                )
            else:
                outside.append(OutsideFile(NKI_LAYOUT, self._kernels, file))
        return tuple(outside), tuple(remarks)
