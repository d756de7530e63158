"""What a layout is: how one engine names what it compiled, and when it takes it for finished.

A *place* is where one unit lies below the root of a layout: a folder, or a single file. One judge looks at
places wherever they are, in a tree that is imported, in a copy that is about to get its name, and in the
tree that it gets its name in, so what is taken in and what is handed out are whole by the same rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from neffbuild.cache.layouts.tree import Names, Tree, TreeFile

ENGINE_FILES = "engine"
"""The folder of an entry that holds what engines keep in caches of their own, as
`neffbuild.toolchain.base.ENGINE_FILES` says."""


class State(StrEnum):
    """What an engine would make of a place. `refused`: nothing an engine has written."""

    COMPLETE = "complete"
    INCOMPLETE = "incomplete"
    FAILED = "failed"
    LOCKED = "locked"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Found:
    """One place, judged. `files` are those that belong to it when it is complete, by their path below
    the root; `outside` are files that it needs and that lie in another layout's root. `graph` names the one
    of `files` that was compiled, `recipe` is None where it is not complete."""

    place: str
    state: State
    reason: str | None = None
    notes: tuple[str, ...] = ()
    generation: str | None = None
    recipe: Mapping[str, Any] | None = None
    files: Mapping[str, TreeFile] = field(default_factory=dict)
    graph: str | None = None
    outside: tuple[OutsideFile, ...] = ()

    def document(self) -> dict[str, Any]:
        return {
            "place": self.place,
            "state": self.state.value,
            "reason": self.reason,
            "generation": self.generation,
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True)
class OutsideFile:
    """A file in the tree of another layout, by that layout's name."""

    layout: str
    tree: Tree
    file: TreeFile


class PlaceLocked(Exception):
    """A live process is at work on a place. The message says which, as far as is known."""


class Listed(Protocol):
    """A tree as far as its folders can be listed."""

    def names(self, folder: str = "") -> Names:
        """As `Tree.names`."""
        ...


class Layout(Protocol):
    """One engine's way to lay out what it compiled."""

    @property
    def name(self) -> str: ...

    @property
    def keys_cover_compiler(self) -> bool:
        """Whether places of one name are one program, whichever release compiled them."""
        ...

    def places(self, tree: Listed) -> Iterator[str]:
        """Where units lie, or are about to, in order. Raises `OSError`, `Unsafe`."""
        ...

    def examine(self, tree: Tree, place: str) -> Found:
        """What is at a place. Nothing is locked or changed. Raises `OSError`, `Unsafe`."""
        ...

    def contents(self, tree: Tree, place: str) -> Found:
        """`examine`, whoever has the place locked."""
        ...

    def strays(self, tree: Listed) -> Iterator[str]:
        """What lies in the tree and belongs to no place, one remark each."""
        ...

    def place_of(self, name: str) -> str | None:
        """The place that a file, by its path below the root, belongs to; None for one that no engine
        looks for, or that is never copied."""
        ...

    def completed(self, place: str, sizes: Mapping[str, int]) -> Mapping[str, bytes]:
        """What ends the writing of a place (name → content), for those of its files (name → size in
        bytes) that do not hold it: what says that the rest is whole."""
        ...

    def is_last(self, name: str) -> bool:
        """Whether a file is the one that says that the rest is whole."""
        ...

    def guarded(self, root: Path, place: str) -> AbstractContextManager[None]:
        """Keep engines from starting on a place while it is replaced. Raises `PlaceLocked` where one
        is at work on it already, `Unsafe` where its lock is none, and `OSError`."""
        ...


def entry_file(layout: str, name: str) -> str:
    """What a file below a layout's root is called in an entry."""
    return f"{ENGINE_FILES}/{layout}/{name}"


def layout_file(layout: str, name: str) -> str | None:
    """Inverse of `entry_file`; None for another file of an entry."""
    prefix = f"{ENGINE_FILES}/{layout}/"
    return name.removeprefix(prefix) if name.startswith(prefix) else None


def safe_word(text: str, most: int = 128) -> str | None:
    """A version or target as it may enter a recipe: printable ASCII without spaces or slashes."""
    good = 0 < len(text) <= most and text.isascii() and text.isprintable()
    return text if good and not set(text) & set(" /\\\"'") else None
