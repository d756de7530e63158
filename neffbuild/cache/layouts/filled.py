"""Whether an engine's cache holds what an engine is going to look for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from neffbuild.cache import files, filesystem
from neffbuild.cache.entry import Entry
from neffbuild.cache.layouts.adopting import examined, judged
from neffbuild.cache.layouts.candidates import places_of
from neffbuild.cache.layouts.layout import Found, Layout, State
from neffbuild.cache.layouts.tree import Tree


@dataclass(frozen=True, slots=True)
class Filled:
    """`hits` counts places that are complete, `lacking` are the others of those that were looked for."""

    hits: int
    lacking: tuple[Found, ...]

    @property
    def ready(self) -> bool:
        return self.hits > 0 and not self.lacking


def filled(layout: Layout, root: Path, entries: Mapping[str, Entry] | None) -> Filled:
    """How far the cache at `root` holds what `entries` have for the layout; where there are none to go by,
    everything in it. Raises `StoreError` where it cannot be read."""
    tree = Tree(root)
    with files.refusals("read", root):
        there = filesystem.is_folder(root)
    if not there:
        found = [
            Found(place, State.INCOMPLETE, "is not there") for place in _wanted(layout, entries)
        ]
    elif wanted := _wanted(layout, entries):
        found = [judged(layout, tree, place) for place in wanted]
    else:
        found = list(examined(layout, tree))
    lacking = tuple(one for one in found if one.state is not State.COMPLETE)
    return Filled(len(found) - len(lacking), lacking)


def _wanted(layout: Layout, entries: Mapping[str, Entry] | None) -> list[str]:
    return sorted(places_of(layout, entries)) if entries else []
