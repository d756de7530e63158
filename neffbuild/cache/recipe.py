"""The recipe: the complete, canonical description of a unit's inputs. Its SHA-256 is the key.

Every ingredient is a named part of one document, so that two recipes can be compared part by part
(`neffbuild explain`). The rule for serve options is the safe one: the whole serve config goes in and
named options are taken out, each with its reason (`neffbuild.cache.serve_options`), so an option
nobody here has heard of changes the key rather than being forgotten.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from neffbuild.cache.canonical import digest_document
from neffbuild.cache.serve_options import auxiliary_layers, graph_options, serve_ingredient
from neffbuild.config.build import BuildConfig
from neffbuild.config.serve import VLLM_VERSION
from neffbuild.grid.shapes import ALL_RANKS, Family, Shape

SCHEMA = "neffbuild.recipe/1"

_DRAFT_FAMILIES = frozenset({Family.DRAFT, Family.DRAFT_PREFILL})


@dataclass(frozen=True, slots=True)
class ToolchainIdentity:
    """What a toolchain contributes to recipes.

    `versions` are exact tool versions; `flags` the canonical compiler flags; `environment` the keyed
    environment variables that are set; `source_digest` covers the source that defines the graph.
    `symbolic_kv_blocks` says that programs do not depend on the size of the KV pool, `symbolic_shapes`
    that one program serves every step. `unresolved` names what this machine cannot know and what to
    pin for it. `kv_blocks` is the size of the pool where the engine settles it by its device and the
    config does not state it.
    """

    name: str
    route: str
    target: str
    engine: str
    versions: Mapping[str, str]
    flags: tuple[str, ...]
    source_digest: str
    symbolic_kv_blocks: bool = False
    symbolic_shapes: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    unresolved: tuple[str, ...] = ()
    kv_blocks: int | None = None

    @property
    def platform(self) -> dict[str, Any]:
        """What an artifact can run on: (target, toolchain, route, tool versions)."""
        return {
            "toolchain": self.name,
            "route": self.route,
            "target": self.target,
            "versions": dict(self.versions),
        }

    def document(self) -> dict[str, Any]:
        return {
            **self.platform,
            "engine": self.engine,
            "flags": list(self.flags),
            "source_digest": self.source_digest,
            "environment": dict(self.environment),
        }


def family_recipe(
    config: BuildConfig,
    family: Family,
    identity: ToolchainIdentity,
    *,
    num_kv_blocks: int | None,
    rank_scope: str = ALL_RANKS,
) -> dict[str, Any]:
    """What the recipes of all units of one family share; `unit_recipe` adds the shape.

    `num_kv_blocks` is the size of the KV pool in blocks, or None where programs keep it symbolic.
    `rank_scope` names the ranks that share the program (`neffbuild.grid.ranks`).
    """
    return {
        "schema": SCHEMA,
        "kind": "unit",
        "rank_scope": rank_scope,
        "model": dict(config.model.architecture),
        "auxiliary_layers": auxiliary_layers(config),
        "num_kv_blocks": "symbolic" if num_kv_blocks is None else num_kv_blocks,
        "vllm_version": VLLM_VERSION,
        "toolchain": identity.document(),
        **_of_family(config, family),
    }


def _of_family(config: BuildConfig, family: Family) -> dict[str, Any]:
    """The ingredients in which families of one config differ."""
    draft = config.draft_model if family in _DRAFT_FAMILIES else None
    return {
        "draft_model": dict(draft.architecture) if draft else None,
        "serve": serve_ingredient(config.serve, family),
    }


def unit_recipe(shared: Mapping[str, Any], shape: Shape) -> dict[str, Any]:
    """The recipe of one unit: its family's shared part and its shape."""
    return {**shared, "shape": shape.document()}


def beside_recipe(recipe: Mapping[str, Any], config: BuildConfig, shape: Shape) -> dict[str, Any]:
    """The recipe of another unit of `config` than the one that `recipe` is of, of any family: for the same
    ranks, by the same toolchain, of no filed graph."""
    return unit_recipe({**recipe, **_of_family(config, shape.family)}, shape)


def graph_recipe(
    graph_digest: str, platform: Mapping[str, Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    """The recipe of a graph: what the torch.compile backend looks up. A graph met with no unit in
    context is stored under it; for a unit's graph the manifest's graph index leads to the unit."""
    return {
        "schema": SCHEMA,
        "kind": "graph",
        "graph_digest": graph_digest,
        "platform": dict(platform),
        "options": dict(options),
    }


def recipe_key(recipe: Mapping[str, Any]) -> str:
    """SHA-256 of the canonical JSON of the recipe."""
    return digest_document(recipe)


def config_digest(config: BuildConfig) -> str:
    """Which serve config this is, wherever it is read: leads from a config to its local manifest.

    Unlike a key it holds the bucket lists (they are what a manifest covers) and no tool versions (a
    serving machine may lack the compiler); the manifest itself states the platform.
    """
    toolchain: dict[str, Any] = {
        "name": config.toolchain.name,
        "route": config.toolchain.route,
        "target": config.toolchain.target,
        "engine": config.toolchain.engine,
        "flags": list(config.toolchain.flags),
    }
    if config.toolchain.phases is not None:
        toolchain["phases"] = config.toolchain.phases
    return digest_document(
        {
            "serve": graph_options(config.serve),
            "model": dict(config.model.architecture),
            "draft_model": dict(config.draft_model.architecture) if config.draft_model else None,
            "toolchain": toolchain,
        }
    )


ABSENT = "(absent)"
"""Stands for an ingredient that only one of two recipes has."""


def difference(
    left: Mapping[str, Any], right: Mapping[str, Any], path: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """(dotted path, left, right) of every ingredient in which two recipes differ. Of flags each is one."""
    for name in dict.fromkeys([*left, *right]):
        mine, theirs = left.get(name, ABSENT), right.get(name, ABSENT)
        where = f"{path}.{name}" if path else name
        flags = (_flags(mine), _flags(theirs)) if name == "flags" else (None, None)
        # In another order they may mean something else: then the lists differ, and no flag does.
        if flags[0] is not None and flags[1] is not None and flags[0] != flags[1]:
            mine, theirs = flags
        if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
            yield from difference(mine, theirs, where)
        elif mine != theirs:
            yield where, mine, theirs


def _flags(flags: object) -> dict[str, str] | None:
    """Name → value of `name=value` flags; None for what is no list of such, each name once."""
    if not isinstance(flags, list) or not all(isinstance(flag, str) for flag in flags):
        return None
    named = {name: value for name, _, value in (flag.partition("=") for flag in flags)}
    return named if len(named) == len(flags) else None
