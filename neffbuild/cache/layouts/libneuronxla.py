"""The older cache of torch-xla and libneuronxla: `neuronxcc-<version>/MODULE_<hlo>+<flags>/`.

A module is finished where it has `model.neff` and `model.done`; `model.log` without a NEFF is a failure that
the engine remembers and does not compile again, so it must never travel. A lock that nobody holds is left of
a killed compile: others wait for it for ever, and neffbuild names it and does not.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from neffbuild.cache.adopted import layout_recipe
from neffbuild.cache.layouts.layout import Found, Listed, PlaceLocked, State
from neffbuild.cache.layouts.locks import lock_holder
from neffbuild.cache.layouts.neff import HEADER_BYTES, neff_fault
from neffbuild.cache.layouts.tree import NO_FOLDER, Tree

NAME = "libneuronxla"
GENERATION = "legacy"
NEFF = "model.neff"
DONE = "model.done"
LOG = "model.log"
GRAPHS = ("model.hlo_module.pb", "model.hlo.pb")

_COMPILER = re.compile(r"neuronxcc-([A-Za-z0-9][A-Za-z0-9.+_-]{0,63})")
_MODULE = re.compile(r"MODULE_[A-Za-z0-9]{1,64}\+[A-Za-z0-9]{1,64}")
_KNOWN = frozenset({NEFF, DONE, *GRAPHS, "compile_flags.json", "wrapped_neff.hlo"})


class Libneuronxla:
    """See the module."""

    name = NAME
    keys_cover_compiler = True

    def places(self, tree: Listed) -> Iterator[str]:
        for compiler in filter(_COMPILER.fullmatch, tree.names().folders):
            names = tree.names(compiler)
            for name in (*names.folders, *names.files, *names.others):
                if name.startswith("MODULE_"):
                    yield f"{compiler}/{name}"

    def strays(self, tree: Listed) -> Iterator[str]:
        names = tree.names()
        for name in (*names.files, *names.others, *names.folders):
            if not (_COMPILER.fullmatch(name) and name in names.folders):
                yield f"{name!r} is nothing that is known of this layout, and passed over"

    def examine(self, tree: Tree, place: str) -> Found:
        found = self.contents(tree, place)
        if found.state is State.REFUSED:
            return found
        locks = [name for name in tree.below(place) if name.endswith(".lock")]
        for name in locks:
            holder = lock_holder(tree.root / name)
            if holder is not None:
                return Found(place, State.LOCKED, f"process {holder or 'unknown'} holds {name}")
        stale = (f"stale lock {name}: no process of this host holds it" for name in locks)
        return replace(found, notes=(*stale, *found.notes))

    def contents(self, tree: Tree, place: str) -> Found:
        compiler, _, module = place.partition("/")
        version = _COMPILER.fullmatch(compiler)
        if version is None or not _MODULE.fullmatch(module):
            return Found(place, State.REFUSED, "is not named MODULE_<hlo hash>+<flags hash>")
        if tree.is_no_folder(place):
            return Found(place, State.REFUSED, NO_FOLDER)
        everything = tree.below(place)
        inside = {name.removeprefix(f"{place}/"): file for name, file in everything.items()}
        if NEFF not in inside and LOG in inside:
            reason = f"its compile failed ({LOG} and no {NEFF}); the engine would not try again"
            return Found(place, State.FAILED, reason, generation=GENERATION)
        files = {name: file for name, file in everything.items() if self.place_of(name) is not None}
        fault = _fault(tree, place, set(inside))
        if fault is not None:
            return Found(place, State.INCOMPLETE, fault, generation=GENERATION)
        unknown = {name.removeprefix(f"{place}/") for name in files} - _KNOWN
        notes = (f"carried along, and unknown: {', '.join(sorted(unknown))}",) if unknown else ()
        graph = next((name for name in GRAPHS if name in inside), NEFF)
        return Found(
            place,
            State.COMPLETE,
            notes=notes,
            generation=GENERATION,
            recipe=layout_recipe(NAME, GENERATION, module, {"version": version[1]}),
            files=files,
            graph=f"{place}/{graph}",
        )

    def place_of(self, name: str) -> str | None:
        compiler, _, rest = name.partition("/")
        module, _, leaf = rest.partition("/")
        if not (_COMPILER.fullmatch(compiler) and _MODULE.fullmatch(module) and leaf):
            return None
        if leaf.endswith(".lock") or leaf == LOG:
            return None
        return f"{compiler}/{module}"

    def completed(self, place: str, sizes: Mapping[str, int]) -> Mapping[str, bytes]:
        done = f"{place}/{DONE}"
        return {} if done in sizes else {done: b""}

    def is_last(self, name: str) -> bool:
        return name.rpartition("/")[2] == DONE

    @contextmanager
    def guarded(self, root: Path, place: str) -> Iterator[None]:
        for graph in GRAPHS:
            holder = lock_holder(root / place / f"{graph}.lock")
            if holder is not None:
                raise PlaceLocked(f"process {holder or 'unknown'} holds {graph}.lock")
        yield


def _fault(tree: Tree, place: str, inside: set[str]) -> str | None:
    for name in (NEFF, DONE):
        if name not in inside:
            return f"there is no {name}"
    with tree.opened(f"{place}/{NEFF}") as descriptor:
        head, size = os.pread(descriptor, HEADER_BYTES, 0), os.fstat(descriptor).st_size
    fault = neff_fault(head, size)
    return f"{NEFF} {fault}" if fault else None
