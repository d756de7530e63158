"""Cached units beside the graphs that are given as files now."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from neffbuild.cache.directory import DirectoryStore
    from neffbuild.cache.plan import Plan
    from neffbuild.cli.selection import Part
    from neffbuild.toolchain.base import FiledGraph

_NAMED = 3


def changed_graphs(
    plan: Plan, part: Part, filed_graph: FiledGraph, store: DirectoryStore
) -> str | None:
    """Which units of a part are stored as compiled from another graph than is filed for them, in words;
    None for none. Keys are made without graphs, so nothing else tells."""
    from neffbuild.cache.catalog import Hit, read_entries
    from neffbuild.report.text import counted_are

    filed = {
        unit.key: (unit.bucket_name, digest)
        for unit in plan.units
        if unit.key and unit.status.value == "cached" and unit.bucket_name in part.names
        if (digest := filed_graph(plan.config, unit.bucket_name)) is not None
    }
    if not filed:
        return None
    changed = [
        filed[key][0]
        for key, found in read_entries(store, filed).items()
        if isinstance(found, Hit) and found.entry.graph_digest != filed[key][1]
    ]
    if not changed:
        return None
    names = ", ".join(changed[:_NAMED]) + (", …" if len(changed) > _NAMED else "")
    return (
        f"{counted_are(len(changed), 'cached unit')} of other graphs than toolchain.hlo_dir has now: "
        f"{names}; keys hold config and versions, no graph: where model code changed under the same "
        "versions, compile into a cache of its own (--cache)"
    )
