"""What belongs to an engine and lies beside its cache as single files: the binaries of NKI kernels, and the
traces of PyTorch's precompile cache.

Neither has anything that says it is whole: a file gets its name at once. A trace is a pickle, so reading
one is running its author's code, and its name says nothing of what is in it (it is the digest of a function's
name and line): two of one name are two different traces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from neffbuild.cache.adopted import layout_recipe
from neffbuild.cache.layouts.kernels import NKI_LAYOUT
from neffbuild.cache.layouts.layout import Found, Listed, State
from neffbuild.cache.layouts.tree import MOST_FILE_BYTES, Tree

TRACES_LAYOUT = "precompile-traces"


@dataclass(frozen=True, slots=True)
class SingleFiles:
    """Places that are files, of paths that look like `pattern`; `listed` finds those of a tree."""

    name: str
    pattern: re.Pattern[str]
    listed: Callable[[Listed], Iterator[str]]
    keys_cover_compiler: bool = False

    def places(self, tree: Listed) -> Iterator[str]:
        return self.listed(tree)

    def strays(self, tree: Listed) -> Iterator[str]:
        return iter(())

    def examine(self, tree: Tree, place: str) -> Found:
        return self.contents(tree, place)

    def contents(self, tree: Tree, place: str) -> Found:
        try:
            with tree.opened(place):
                pass
        except (FileNotFoundError, NotADirectoryError):
            return Found(place, State.INCOMPLETE, "is not there")
        file = tree.file(place)
        if file is None:
            return Found(place, State.INCOMPLETE, "is gone")
        if file.size == 0:
            return Found(place, State.INCOMPLETE, "is empty")
        if file.size > MOST_FILE_BYTES:
            return Found(place, State.REFUSED, f"has {file.size:,} bytes")
        content = {"sha256": tree.record(file).digest}
        return Found(
            place,
            State.COMPLETE,
            recipe=layout_recipe(self.name, "1", place, content),
            files={place: file},
            graph=place,
        )

    def place_of(self, name: str) -> str | None:
        return name if self.pattern.fullmatch(name) else None

    def completed(self, place: str, sizes: Mapping[str, int]) -> Mapping[str, bytes]:
        return {}

    def is_last(self, name: str) -> bool:
        return True

    def guarded(self, root: Path, place: str) -> AbstractContextManager[None]:
        return nullcontext()


def _traces(tree: Listed) -> Iterator[str]:
    for key in tree.names("dynamo").folders:
        names = tree.names(f"dynamo/{key}")
        if "entry" in (*names.files, *names.others):
            yield f"dynamo/{key}/entry"


KERNELS = SingleFiles(NKI_LAYOUT, re.compile(r"[^/].*"), lambda _: iter(()))
"""Never looked for by themselves: a graph says which ones it needs."""

TRACES = SingleFiles(TRACES_LAYOUT, re.compile(r"dynamo/[0-9a-f]{1,128}/entry"), _traces)
