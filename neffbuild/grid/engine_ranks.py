"""Which programs each rank of an engine finds in a cache.

Ranks have keys in common, and one compile is for all of them: what lies at the root is every rank's. So is an
entry that has folders of ranks inside: they are what ranks captured for it, which its compile removes. Where
ranks have folders at the root, `[SERVER.]rank<N>`, each looks in its own. Ranks of one server compile the
same, and so do servers of one phase; one that has nothing of a phase skips it, as where prefill and decode
are served apart and share a cache. A rank without a folder may be on another host.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from neffbuild.grid.conformance import Difference, Shapes

ROOT = ""
_NAMED = 4


def rank_folder(entry: str) -> str:
    """The folder of the rank that an entry is of, by its name; `ROOT` for one of all ranks."""
    return entry.rpartition("/")[0]


def found_by_ranks(held: Mapping[str, Shapes]) -> dict[str, Shapes]:
    """What each rank that should have the programs of a phase finds of it, by its folder; `held` is what lies
    in the folders."""
    common = held.get(ROOT, frozenset())
    servers = {_server(folder) for folder, shapes in held.items() if folder and shapes}
    ranks = {
        folder: shapes | common
        for folder, shapes in held.items()
        if folder and _server(folder) in servers
    }
    return ranks or {ROOT: common}


def with_ranks(differences: Iterable[Difference], found: Mapping[str, Shapes]) -> list[Difference]:
    """The differences, with the ranks that lack what others have."""
    return [_with_ranks(one, found) for one in differences]


def _with_ranks(difference: Difference, found: Mapping[str, Shapes]) -> Difference:
    lacking = [folder for folder, shapes in found.items() if difference.plan not in shapes]
    if difference.plan is None or len(lacking) in (0, len(found)):
        return difference
    lacking.sort(key=_order)
    more = f" and {len(lacking) - _NAMED} more" if len(lacking) > _NAMED else ""
    return replace(
        difference, detail=f"{difference.detail}: not in {', '.join(lacking[:_NAMED])}{more}"
    )


def _server(folder: str) -> str:
    return folder.rpartition(".")[0]


def _order(folder: str) -> tuple[str, int]:
    return _server(folder), int(folder.rpartition("rank")[2])
