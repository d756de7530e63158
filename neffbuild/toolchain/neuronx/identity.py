"""What the neuronx toolchain contributes to recipes; nothing of Neuron's is imported for it.

Flags, optimisation level, grouping of cores, chip and route may come from the config or from the variables
the engine reads; either way they are in the recipe once, as what is built, so that equal builds have equal
keys however they were asked for.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from neffbuild.cache.recipe import ToolchainIdentity
from neffbuild.config.build import BuildConfig
from neffbuild.grid.kv_pool import CAP_VARIABLE, MINIMUM_VARIABLE, KVPool, neuron_kv_pool
from neffbuild.toolchain.neuronx.command import recipe_flags, stated_flags
from neffbuild.toolchain.neuronx.routes import (
    REFERENCE,
    TORCH_NEURONX,
    VLLM_NEURON,
    keyed_environment,
    route_of,
)
from neffbuild.toolchain.neuronx.target import check_scratchpad, resolve_target
from neffbuild.toolchain.neuronx.versions import planned_versions

NAME = "neuronx"

_POOL_VARIABLES = (CAP_VARIABLE, MINIMUM_VARIABLE)

_PACKAGE = Path(__file__).parents[2]
_SOURCES = {
    REFERENCE: (
        "grid/windows.py",
        "models",
        "toolchain/neuronx/lowering.py",
        "toolchain/neuronx/portable.py",
        "toolchain/neuronx/stablehlo.py",
    ),
    TORCH_NEURONX: (
        "grid/windows.py",
        "models",
        "toolchain/neuronx/torch_neuronx_process.py",
    ),
    VLLM_NEURON: (),
}
"""What decides which graph is captured, options and versions aside: files, and folders of them. Engine
vllm-neuron has its own, of which its version tells."""


def neuronx_identity(config: BuildConfig) -> ToolchainIdentity:
    """See `Toolchain.identity`; of this host it depends on the environment and what is installed."""
    return identity_in(config, os.environ)


def identity_in(config: BuildConfig, environment: Mapping[str, str]) -> ToolchainIdentity:
    """The identity of a config where these variables are set.

    Raises `ConfigError` for an unknown target, route, engine, flag or tool, and where config and
    environment contradict each other.
    """
    toolchain = config.toolchain
    route = route_of(toolchain, environment)
    stated = stated_flags(config, environment)
    target = resolve_target(toolchain.target, stated, environment)
    check_scratchpad(stated, environment)
    versions = planned_versions(toolchain, route)
    unresolved = []
    if missing := [tool for tool in route.tools if tool not in versions]:
        are = "is" if len(missing) == 1 else "are"
        pins = ", ".join(f"toolchain.versions.{tool}" for tool in missing)
        unresolved.append(f"{', '.join(missing)} {are} not installed here: pin {pins}")
    pool, keyed = KVPool(None), keyed_environment(route, environment)
    if config.serve.num_gpu_blocks_override is not None:
        # What sizes the pool is no matter where its size is stated.
        keyed = {name: keyed[name] for name in keyed if name not in _POOL_VARIABLES}
    elif route.engine == VLLM_NEURON:
        # Programs hold the size of the KV pool, and the engine works it out on the device.
        pool = neuron_kv_pool(
            config, target=target.chip, physical_cores=target.lnc, environment=environment
        )
        if pool.unresolved is not None:
            unresolved.append(pool.unresolved)
    return ToolchainIdentity(
        name=NAME,
        route=route.name,
        target=target.name,
        engine=route.engine,
        versions=versions,
        flags=recipe_flags(route, config, stated, target),
        source_digest=_source_digest(route.engine),
        environment=keyed,
        unresolved=tuple(unresolved),
        kv_blocks=pool.blocks,
    )


@cache
def _source_digest(engine: str) -> str:
    digest = hashlib.sha256()
    for name in _SOURCES[engine]:
        path = _PACKAGE / name
        for file in sorted(path.glob("*.py")) if path.is_dir() else [path]:
            content = file.read_bytes()
            # Lengths delimit, so that moving a line between two files cannot go unseen.
            digest.update(f"{file.relative_to(_PACKAGE)} {len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()
