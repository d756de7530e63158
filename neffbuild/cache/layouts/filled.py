"""Whether an engine's cache holds what an engine is going to look for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from neffbuild.cache import files, filesystem
from neffbuild.cache.entry import Entry
from neffbuild.cache.layouts.adopting import examined, judged
from neffbuild.cache.layouts.candidates import Candidate, places_of
from neffbuild.cache.layouts.layout import Found, Layout, State
from neffbuild.cache.layouts.tree import Tree, Unsafe


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
    tree, wanted = Tree(root), places_of(layout, entries) if entries else {}
    with files.refusals("read", root):
        there = filesystem.is_folder(root)
    if not there:
        found = [Found(place, State.INCOMPLETE, "is not there") for place in sorted(wanted)]
    elif wanted:
        found = [_compared(layout, tree, place, wanted[place]) for place in sorted(wanted)]
    else:
        found = list(examined(layout, tree))
    lacking = tuple(one for one in found if one.state is not State.COMPLETE)
    return Filled(len(found) - len(lacking), lacking)


def _compared(layout: Layout, tree: Tree, place: str, candidates: Sequence[Candidate]) -> Found:
    """What is at a place; where its name does not say what compiled it, whether that is ours."""
    found = judged(layout, tree, place)
    if found.state is not State.COMPLETE or layout.keys_cover_compiler:
        return found
    try:
        digest = tree.record(found.files[place]).digest
    except Unsafe as error:
        return replace(found, state=State.INCOMPLETE, reason=str(error))
    if any(digest == one.records[place].digest for one in candidates):
        return found
    reason = (
        "is another file than the one that is stored, and its name does not cover what compiled it"
    )
    return replace(found, state=State.REFUSED, reason=reason)
