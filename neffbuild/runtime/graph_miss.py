"""Why strict mode stops at a graph that is not stored, as closely as it can be said."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from neffbuild.cache.catalog import Hit, read_entry
from neffbuild.cache.manifest import Manifest
from neffbuild.cache.recipe import ToolchainIdentity
from neffbuild.config.errors import MissingUnit, NeffbuildError, ToolchainRefusal
from neffbuild.runtime.backend_settings import BackendSettings
from neffbuild.runtime.missing import UNNAMED_CONFIG, compile_command, missing_unit
from neffbuild.toolchain.base import Captured


@dataclass(frozen=True, slots=True)
class UnitInContext:
    """The unit a caller says it is about, of the serve config in the file `config`."""

    bucket_name: str
    config: str


def graph_miss(
    settings: BackendSettings,
    captured: Captured,
    beside: Callable[[Manifest], ToolchainIdentity],
    key: str | None,
    unknown: Sequence[str],
    context: UnitInContext | None,
) -> NeffbuildError:
    """The error for a graph that no manifest and no entry has.

    `beside` gives this process's toolchain as it is compared with a manifest's; `key` is the graph's,
    None where `unknown` names what it would take.
    """
    digest = captured.graph_digest
    differences = [
        _platform_difference(manifest.platform, beside(manifest).platform)
        for manifest in settings.manifests
    ]
    if differences and all(differences):
        return ToolchainRefusal(
            f"no program for the graph {digest}: its manifest is for {differences[0]}",
            field="manifest",
            value=settings.manifests[0].digest,
            hint="pull or compile for this platform",
        )
    where = settings.store.url
    if context is None:
        names = _other_names(settings.manifests, captured)
        keyed = f"key {key}" if key else f"without a key: {'; '.join(unknown)}"
        return MissingUnit(
            # All in the message: engines show no more of an error.
            f"no program for the graph {digest} ({keyed}) is in {where}; "
            f"{names or _what_is_there(settings.manifests)}; build it with "
            f"`neffbuild compile {UNNAMED_CONFIG}`",
            field="graph",
            value=digest,
            hint="neffbuild.runtime.backend.unit(...) around the call puts its unit's name here",
        )
    key_of_unit = _key_of_unit(settings.manifests, context.bucket_name)
    if key_of_unit is not None and isinstance(read_entry(settings.store, key_of_unit), Hit):
        return MissingUnit(
            f"unit {context.bucket_name} (key {key_of_unit}) is in {where}, but for another graph than "
            f"{digest}; what is built with "
            f"`{compile_command(context.config, context.bucket_name)}` is the config's own",
            field="unit",
            value=context.bucket_name,
            hint="model, shapes (dynamic=False), flags and target must be those of the config",
        )
    return missing_unit(context.bucket_name, key_of_unit or key, where, context.config)


def _platform_difference(stated: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """The first ingredient in which the platform of a manifest is not this process's, in words."""
    for name, mine in here.items():
        theirs = stated.get(name)
        if theirs == mine:
            continue
        if isinstance(theirs, Mapping) and isinstance(mine, Mapping):
            nested = _platform_difference(theirs, mine)
            if nested is not None:
                return nested
        return f"{name} {theirs!r}, this process runs {mine!r}"
    return None


def _other_names(manifests: Sequence[Manifest], captured: Captured) -> str | None:
    """In words, the layer names of a stored program that is the graph's but for them."""
    mine = captured.graph.names
    for manifest in manifests:
        for entry in manifest.entries.values():
            theirs = entry.statistics.get("layer_names")
            if not mine or not isinstance(theirs, list) or list(mine) == theirs:
                continue
            if entry.statistics.get("nameless_digest") == captured.graph.nameless_digest:
                first = next(pair for pair in zip(theirs, mine, strict=True) if pair[0] != pair[1])
                return f"one is there for other layer names ({first[0]!r} for {first[1]!r})"
    return None


def _what_is_there(manifests: Sequence[Manifest]) -> str:
    if not manifests:
        return "there is no manifest"
    serve = manifests[0].serve
    options = ("dtype", "max_model_len", "tensor_parallel_size", "quantization")
    stated = ", ".join(f"{name} {serve[name]}" for name in options if serve.get(name) is not None)
    return f"the manifest is for {stated} and the rest of its config"


def _key_of_unit(manifests: Sequence[Manifest], bucket_name: str) -> str | None:
    for manifest in manifests:
        for planned in manifest.units:
            if planned.bucket_name == bucket_name and planned.key is not None:
                return planned.key
    return None
