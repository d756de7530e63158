"""The plan: every shape of a serve config with its key, and what the store has of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from neffbuild.cache.adopted import adopted_before
from neffbuild.cache.catalog import entry_name, manifest_name, read_hits, write_manifest
from neffbuild.cache.lease import leased_if_writable
from neffbuild.cache.manifest import Manifest, ManifestUnit
from neffbuild.cache.recipe import (
    ToolchainIdentity,
    config_digest,
    family_recipe,
    recipe_key,
    unit_recipe,
)
from neffbuild.cache.records import write_pointer
from neffbuild.cache.serve_options import graph_options
from neffbuild.cache.store import Store
from neffbuild.config.build import BuildConfig
from neffbuild.grid.bucketer import Bucketer
from neffbuild.grid.coverage import plan_coverage
from neffbuild.grid.expand import Grid, GridShape, Need
from neffbuild.grid.kv_blocks import num_kv_blocks
from neffbuild.grid.ranks import shapes_on_every_rank
from neffbuild.grid.shapes import ALL_RANKS, Shape, unit_name


class Status(StrEnum):
    """What a plan says of a unit."""

    CACHED = "cached"
    MISSING = "missing"
    UNRESOLVED = "unresolved"
    CANNOT_OCCUR = "cannot_occur"


@dataclass(frozen=True, slots=True)
class PlannedUnit:
    """One shape of the grid for one rank scope. `key` and `recipe` are None where the shape cannot occur; an
    unresolved unit has neither, because a key made from a guess would be a stale hit waiting. `needs` is the
    device that has to be beside its compile, None where any host does it."""

    shape: Shape
    need: Need
    status: Status
    key: str | None = None
    recipe: Mapping[str, Any] | None = None
    reason: str | None = None
    rank_scope: str = ALL_RANKS
    needs: str | None = None

    @property
    def bucket_name(self) -> str:
        return unit_name(self.shape, self.rank_scope)


@dataclass(frozen=True, slots=True)
class Plan:
    """All units of one serve config on one platform."""

    config: BuildConfig
    identity: ToolchainIdentity
    bucketer: Bucketer
    units: tuple[PlannedUnit, ...]

    def with_status(self, status: Status) -> list[PlannedUnit]:
        return [unit for unit in self.units if unit.status is status]

    def without(self, lost: Mapping[str, str]) -> Plan:
        """This plan where the units of these keys (key → reason) turned out to be missing."""
        units = tuple(
            replace(unit, status=Status.MISSING, reason=lost[unit.key])
            if unit.key is not None and unit.key in lost
            else unit
            for unit in self.units
        )
        return replace(self, units=units)

    @property
    def counts(self) -> dict[str, Any]:
        """`counts` of `neffbuild.plan/1`; shapes that cannot occur are not units."""
        by_status = Counter(unit.status for unit in self.units)
        occurring = [unit for unit in self.units if unit.status is not Status.CANNOT_OCCUR]
        by_family = Counter(unit.shape.family.value for unit in occurring)
        by_rank_scope = Counter(unit.rank_scope for unit in occurring)
        return {
            "units": len(occurring),
            "cached": by_status[Status.CACHED],
            "missing": by_status[Status.MISSING],
            "unresolved": by_status[Status.UNRESOLVED],
            "cannot_occur": by_status[Status.CANNOT_OCCUR],
            "by_family": dict(by_family),
            "by_rank_scope": dict(by_rank_scope),
        }


StoredKeys = Callable[[Iterable[str]], Mapping[str, str | None]]
"""Keys asked for → for each key the store knows something of: None for a whole entry, else why not
(a last failure, a broken entry). A key it knows nothing of is absent."""


FiledGraph = Callable[[str], str | None]
"""A unit's name → the digest of the graph that lies in a file for it; None where none does."""


def make_plan(
    config: BuildConfig,
    identity: ToolchainIdentity,
    bucketer: Bucketer,
    grid: Grid,
    stored: StoredKeys,
    *,
    rank_scopes: Sequence[str] = (ALL_RANKS,),
    filed_graph: FiledGraph = lambda _: None,
) -> Plan:
    """Key every shape that can occur, once for each rank scope, and ask the store, once, which of the
    keys it has. A graph that is given as a file is an ingredient: nothing else tells which it is."""
    unresolved = "; ".join(identity.unresolved)
    pool = None
    if not identity.symbolic_kv_blocks:
        pool = identity.kv_blocks or num_kv_blocks(config.serve)
    recipes = {} if unresolved else _recipes(config, identity, grid, rank_scopes, pool, filed_graph)
    keys = {unit: recipe_key(recipe) for unit, recipe in recipes.items()}
    known = stored(keys.values())

    def planned(gridded: GridShape, rank_scope: str) -> PlannedUnit:
        shape, need = gridded.shape, gridded.need
        if need is Need.CANNOT_OCCUR:
            return PlannedUnit(shape, need, Status.CANNOT_OCCUR, reason=gridded.reason)
        if unresolved:
            return PlannedUnit(
                shape, need, Status.UNRESOLVED, reason=unresolved, rank_scope=rank_scope
            )
        key = keys[shape, rank_scope]
        cached = key in known and known[key] is None
        return PlannedUnit(
            shape,
            need,
            Status.CACHED if cached else Status.MISSING,
            key,
            recipes[shape, rank_scope],
            gridded.reason if cached else known.get(key) or gridded.reason,
            rank_scope,
        )

    units = (
        planned(gridded, rank_scope)
        for gridded in grid.shapes
        for rank_scope in (rank_scopes if gridded.need is not Need.CANNOT_OCCUR else (ALL_RANKS,))
    )
    return Plan(config, identity, bucketer, tuple(units))


def _recipes(
    config: BuildConfig,
    identity: ToolchainIdentity,
    grid: Grid,
    rank_scopes: Sequence[str],
    pool: int | None,
    filed_graph: FiledGraph,
) -> dict[tuple[Shape, str], dict[str, Any]]:
    shapes = [gridded.shape for gridded in grid.shapes if gridded.need is not Need.CANNOT_OCCUR]
    recipes: dict[tuple[Shape, str], dict[str, Any]] = {}
    for rank_scope in rank_scopes:
        shared = {
            family: family_recipe(
                config, family, identity, num_kv_blocks=pool, rank_scope=rank_scope
            )
            for family in dict.fromkeys(shape.family for shape in shapes)
        }
        for shape in shapes:
            recipe = unit_recipe(shared[shape.family], shape)
            if (graph := filed_graph(unit_name(shape, rank_scope))) is not None:
                recipe["filed_graph"] = graph
            recipes[shape, rank_scope] = recipe
    return recipes


def store_plan_manifest(plan: Plan, store: Store, adopted: Iterable[str] = ()) -> Manifest:
    """Write the manifest of what is stored of a plan, and the pointer from its config to it.

    `adopted` are keys of entries without a unit that go with it, beside those of the manifest before it.
    """
    keys = {unit.key: unit.shape for unit in plan.units if unit.key is not None}
    config = config_digest(plan.config)
    entries = read_hits(store, keys)
    beside = {*adopted, *adopted_before(store, config, plan.identity.platform)}
    entries_beside = read_hits(store, sorted(beside - keys.keys()))
    covered = plan_coverage(plan.bucketer, keys.values(), shapes_on_every_rank(keys, entries))
    manifest = Manifest(
        config=config,
        serve=graph_options(plan.config.serve),
        platform=plan.identity.platform,
        units=tuple(
            ManifestUnit(unit.shape, unit.key, unit.need.value, unit.rank_scope)
            for unit in plan.units
        ),
        entries={**entries, **entries_beside},
        coverage={
            "states_checked": covered.states_checked,
            "uncovered_states": [state.document() for state in covered.uncovered],
            "prefill_gaps": [state.document() for state in covered.prefill_gaps],
        },
    )
    names = [manifest_name(manifest.digest), *map(entry_name, manifest.entries)]
    with leased_if_writable(store, documents=names, blobs=manifest.blobs):
        write_pointer(store, manifest.config, write_manifest(store, manifest))
    return manifest
