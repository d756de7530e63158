"""Entries that were taken over from an engine's own cache, and that no plan has a unit for.

They have recipes of a kind of their own, as graphs have that were met without a unit, and go with the
manifest of the config they were adopted for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from neffbuild.cache.catalog import read_manifest
from neffbuild.cache.manifest import Manifest
from neffbuild.cache.recipe import SCHEMA
from neffbuild.cache.records import read_pointer
from neffbuild.cache.store import Store
from neffbuild.config.errors import IntegrityError


def layout_recipe(
    layout: str, generation: str, key: str, compiler: Mapping[str, Any]
) -> dict[str, Any]:
    """The recipe of what was taken over from an engine's own cache and no plan has a unit for.

    `key` is the engine's own, `compiler` what the artifact says of who compiled it. Neither host nor folder
    is in it: the same thing has the same recipe wherever it was found.
    """
    return {
        "schema": SCHEMA,
        "kind": "layout",
        "layout": layout,
        "generation": generation,
        "key": key,
        "compiler": dict(compiler),
    }


def is_adopted(recipe: Mapping[str, Any]) -> bool:
    """Whether a recipe is one of `layout_recipe`."""
    return recipe.get("kind") == "layout"


def adopted_in(manifest: Manifest) -> list[str]:
    """Keys of the entries of a manifest that were adopted: they are beside its units."""
    return [key for key, entry in manifest.entries.items() if is_adopted(entry.recipe)]


def adopted_before(store: Store, config: str, platform: Mapping[str, Any]) -> list[str]:
    """Keys of what was adopted for a config. For another platform it is of no use."""
    manifest = _remembered(store, config)
    return adopted_in(manifest) if manifest and manifest.platform == platform else []


def adopted_names(store: Store, config: str) -> dict[str, str]:
    """Key → name of what goes with the manifest that serving processes and `pull` take for a config: what
    was adopted, by its layout and the engine's own key. Nothing where that manifest cannot be read."""
    manifest = _remembered(store, config)
    if manifest is None:
        return {}
    return {key: adopted_name(manifest.entries[key].recipe) for key in adopted_in(manifest)}


def adopted_name(recipe: Mapping[str, Any]) -> str:
    """For people: the layout that it was found in, and the engine's own key."""
    return f"{recipe.get('layout')} {recipe.get('key')}"


def _remembered(store: Store, config: str) -> Manifest | None:
    try:
        digest = read_pointer(store, config)
        return read_manifest(store, digest) if digest else None
    except IntegrityError:
        return None
