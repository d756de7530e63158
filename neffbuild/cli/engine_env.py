"""What `neffbuild env` says of each engine: its variables, and where its cache is."""

from __future__ import annotations

import os
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from neffbuild.config.errors import ConfigError

if TYPE_CHECKING:
    from neffbuild.cache.layouts.layout import Layout
    from neffbuild.cache.layouts.serving_environment import Setting
    from neffbuild.config.build import BuildConfig


@dataclass(frozen=True, slots=True)
class Served:
    """How an engine is to be started for a config. `plugin_version` is that of vLLM Neuron, None for another
    engine; `cache_root` what the variable says, `compile_cache` the folder of the entries."""

    engine: str
    heading: str
    route: str
    plugin_version: str | None
    cache_root: Path
    compile_cache: Path
    settings: Sequence[Setting]
    layout: Layout


def served(config: BuildConfig, root: Path | None, plugin_version: str | None) -> Served:
    """By the engine of the config. Raises `ConfigError` for one that keeps no cache of its own, a root that
    cannot be printed, and what no plan would take."""
    from neffbuild.toolchain.neuronx.routes import TORCH_NEURONX

    _require_engine(config)
    if config.toolchain.engine == TORCH_NEURONX:
        return _torch_neuronx(config, root, plugin_version)
    return _vllm_neuron(config, root, plugin_version)


def _require_engine(config: BuildConfig) -> None:
    from neffbuild.toolchain.neuronx.routes import TORCH_NEURONX, VLLM_NEURON

    name = config.toolchain.name
    if name != "neuronx":
        raise ConfigError(
            f"{config.source} is for the toolchain {name}; these variables are of Neuron's engines",
            field="toolchain.name",
            value=name,
            hint="set toolchain.name to neuronx; other engines are told with NEFFBUILD_MANIFEST and "
            "NEFFBUILD_STRICT",
        )
    engine = config.toolchain.engine
    if engine not in (None, VLLM_NEURON, TORCH_NEURONX):
        raise ConfigError(
            f"{config.source} is for the engine {engine}, which keeps no cache of its own",
            field="toolchain.engine",
            value=engine,
            hint=f"{VLLM_NEURON} and {TORCH_NEURONX} do",
        )


def _vllm_neuron(config: BuildConfig, root: Path | None, plugin_version: str | None) -> Served:
    from neffbuild.cache.layouts.engine_root import BELOW, vllm_neuron_cache_root
    from neffbuild.cache.layouts.serving_environment import (
        NATIVE,
        serving_environment,
        settled_version,
    )
    from neffbuild.cache.layouts.vllm_neuron import NAME, VllmNeuron
    from neffbuild.toolchain.neuronx.command import stated_flags
    from neffbuild.toolchain.neuronx.flags import canonical_flags

    flags = [str(flag) for flag in canonical_flags(stated_flags(config, os.environ))]
    route = config.toolchain.route or NATIVE
    version = plugin_version or settled_version(route, config.toolchain.versions)
    cache_root = _printable(
        vllm_neuron_cache_root(os.environ) if root is None else _above(root, BELOW)
    )
    settings = serving_environment(route=route, version=version, root=cache_root, flags=flags)
    return Served(
        engine=NAME,
        heading=f"vLLM Neuron {version}, route {route}: serve from the cache, compile nothing.",
        route=route,
        plugin_version=version,
        cache_root=cache_root,
        compile_cache=cache_root / BELOW,
        settings=[*settings, *_keyed(config, {one.name for one in settings})],
        layout=VllmNeuron(),
    )


def _torch_neuronx(config: BuildConfig, root: Path | None, plugin_version: str | None) -> Served:
    from neffbuild.cache.layouts.torch_neuronx import NAME, TorchNeuronx
    from neffbuild.cache.layouts.torch_neuronx_environment import (
        torch_neuronx_cache,
        torch_neuronx_environment,
    )
    from neffbuild.toolchain.neuronx.command import compiler_variables, stated_flags
    from neffbuild.toolchain.neuronx.flags import SCRATCHPAD, value_of
    from neffbuild.toolchain.neuronx.identity import neuronx_identity

    if plugin_version is not None:
        raise ConfigError(
            f"--plugin-version is of vLLM Neuron, and {config.source} is for the engine {NAME}",
            field="--plugin-version",
            value=plugin_version,
            hint="leave it out",
        )
    identity = neuronx_identity(config)
    cache = _printable(torch_neuronx_cache(os.environ) if root is None else root)
    settings = torch_neuronx_environment(
        cache,
        compiler_variables({"target": identity.target, "flags": identity.flags}),
        value_of(stated_flags(config, os.environ), SCRATCHPAD),
    )
    return Served(
        engine=NAME,
        heading="TorchNeuron: serve from the cache. What is not in it is compiled: nothing published makes "
        "that an error.",
        route=identity.route,
        plugin_version=None,
        cache_root=cache,
        compile_cache=cache,
        settings=settings,
        layout=TorchNeuronx(),
    )


def _keyed(config: BuildConfig, set_already: Container[str]) -> list[Setting]:
    """What this shell sets of what may change a graph."""
    from neffbuild.cache.layouts.serving_environment import Setting
    from neffbuild.toolchain.neuronx.routes import keyed_environment, route_of

    why = "set where this was written, and in the keys: the engine traces other graphs without it"
    keyed = keyed_environment(route_of(config.toolchain, os.environ), os.environ)
    return [Setting(name, keyed[name], why) for name in sorted(keyed) if name not in set_already]


def _above(root: Path, below: Path) -> Path:
    parts = len(below.parts)
    return Path(*root.parts[:-parts]) if root.parts[-parts:] == below.parts else root


def _printable(path: Path) -> Path:
    # A line break in a comment would start a line of the shell's.
    if not str(path).isprintable():
        raise ConfigError(
            f"the path {str(path)!r} holds what cannot be printed",
            field="--root",
            value=str(path),
        )
    return path.absolute()
