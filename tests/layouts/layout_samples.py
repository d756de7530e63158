"""Stores and exports for tests that do not go through the command line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from neffbuild.cache.directory import DirectoryStore
from neffbuild.cache.entry import Entry
from neffbuild.cache.layouts.adopting import Adopted, adopt
from neffbuild.cache.layouts.exporting import export
from neffbuild.cache.layouts.known import layout_named
from neffbuild.cache.layouts.layout import Found
from neffbuild.cache.layouts.placed import Exported
from neffbuild.cache.layouts.tree import Tree


def adopted(
    tree: Path, store: Path, layout: str = "vllm-neuron", nki: Path | None = None
) -> Adopted:
    return adopt(layout_named(layout, nki or tree / "no-nki"), Tree(tree), DirectoryStore(store))


def only(tree: Path, store: Path, layout: str = "vllm-neuron") -> Found:
    """What was found of a tree with one place."""
    [found] = adopted(tree, store, layout).found
    return found


def exported(
    store: Path, entries: Mapping[str, Entry], root: Path, layout: str = "vllm-neuron"
) -> Exported:
    return export(layout_named(layout), DirectoryStore(store), entries, root)
