"""TorchNeuron's NEFF directory: `ab/cd/<32 hex digits>.neff`, one file a graph.

Written to the published sources of a build before its release: no sentinel and no checksum, a file with
anything in it is a hit. Its key covers neither compiler version nor release, so both are told apart here by
what the NEFF itself states. Locks are files of the host, not of the directory.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from neffbuild.cache.adopted import layout_recipe
from neffbuild.cache.layouts.layout import Found, Listed, State
from neffbuild.cache.layouts.locks import lock_holder
from neffbuild.cache.layouts.neff import HEADER_BYTES, neff_build_version, neff_fault
from neffbuild.cache.layouts.tree import MOST_FILE_BYTES, Tree, Unsafe

NAME = "torch-neuronx"
GENERATION = "native-2.33"

_HEX = re.compile(r"[0-9a-f]{2}")
_PLACE = re.compile(r"([0-9a-f]{2})/([0-9a-f]{2})/(\1\2[0-9a-f]{28})\.neff")


class TorchNeuronx:
    """See the module. `locks` is the folder of its locks, `$TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR/locks`."""

    name = NAME
    keys_cover_compiler = False

    def __init__(self, locks: Path | None = None) -> None:
        local = os.environ.get("TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR") or "/tmp/local_cache"
        self._locks = locks or Path(local) / "locks"

    def places(self, tree: Listed) -> Iterator[str]:
        for first in filter(_HEX.fullmatch, tree.names().folders):
            for second in filter(_HEX.fullmatch, tree.names(first).folders):
                names = tree.names(f"{first}/{second}")
                for name in (*names.files, *names.others):
                    if name.endswith(".neff"):
                        yield f"{first}/{second}/{name}"

    def strays(self, tree: Listed) -> Iterator[str]:
        names = tree.names()
        for name in (*names.files, *names.others, *names.folders):
            if not (_HEX.fullmatch(name) and name in names.folders):
                yield f"{name!r} is nothing that is known of this layout, and passed over"

    def examine(self, tree: Tree, place: str) -> Found:
        key = place.rpartition("/")[2].removesuffix(".neff")
        holder = lock_holder(self._locks / f"{key}.lock")
        if holder is not None:
            return Found(place, State.LOCKED, f"process {holder or 'unknown'} holds its lock")
        return self.contents(tree, place)

    def contents(self, tree: Tree, place: str) -> Found:
        match = _PLACE.fullmatch(place)
        if match is None:
            return Found(place, State.REFUSED, "is not named ab/cd/<32 hex digits>.neff")
        try:
            with tree.opened(place) as descriptor:
                head = os.pread(descriptor, HEADER_BYTES, 0)
        except Unsafe as error:
            return Found(place, State.REFUSED, str(error))
        except FileNotFoundError:
            return Found(place, State.INCOMPLETE, "is not there")
        file = tree.file(place)
        if file is None or (fault := neff_fault(head, file.size)):
            return Found(place, State.INCOMPLETE, fault if file else "is not there")
        if file.size > MOST_FILE_BYTES:
            return Found(place, State.REFUSED, f"has {file.size:,} bytes")
        version = neff_build_version(head)
        unknown = "its NEFF states no compiler version, and its key does not cover one"
        return Found(
            place,
            State.COMPLETE,
            notes=() if version else (unknown,),
            generation=GENERATION,
            recipe=layout_recipe(NAME, GENERATION, match[3], {"version": version}),
            files={place: file},
            graph=place,
        )

    def place_of(self, name: str) -> str | None:
        return name if _PLACE.fullmatch(name) else None

    def completed(self, place: str, sizes: Mapping[str, int]) -> Mapping[str, bytes]:
        return {}

    def is_last(self, name: str) -> bool:
        return True

    def guarded(self, root: Path, place: str) -> AbstractContextManager[None]:
        # A file that gets its name at once needs no lock, and the engine writes it the same way.
        return nullcontext()
