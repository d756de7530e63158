"""`torch.compile(model, backend="neffbuild", dynamic=False)`: programs from the store, by graph digest.

A graph is looked up by sha256(graph digest, platform, canonical options), first in the index of every
manifest, so that what the farm compiled is found, then among the graphs compiled this way before. A miss
compiles and stores; in strict mode it is an error that names the unit. Where settings come from:
`neffbuild.runtime.backend_settings`.

Compile one callable per shape, each of its own code object (`torch.compile` counts recompiles per code
object and runs a function eagerly from the ninth on: here that is an error, `FailOnRecompileLimitHit`).
An error of the backend reaches the caller as torch's `BackendCompilerFailed`, whose message holds it and
whose `inner_exception` is it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch._dynamo
from torch import fx

from neffbuild.cache.catalog import Hit, read_entry, record_files
from neffbuild.cache.entry import Entry
from neffbuild.cache.manifest import Manifest
from neffbuild.cache.once import build_once
from neffbuild.cache.recipe import ToolchainIdentity, graph_recipe, recipe_key
from neffbuild.config.errors import (
    ConfigError,
    IntegrityError,
    NeffbuildError,
    ToolchainRefusal,
)
from neffbuild.runtime.backend_settings import BackendSettings, backend_settings
from neffbuild.runtime.graph_miss import UnitInContext, graph_miss
from neffbuild.runtime.missing import UNNAMED_CONFIG
from neffbuild.runtime.stored_program import StoredProgram, counters, load_program
from neffbuild.toolchain.base import Captured
from neffbuild.toolchain.inductor.capture import capture_graph
from neffbuild.toolchain.inductor.compile import compile_graph
from neffbuild.toolchain.inductor.cpu_level import LEVELS, cpu_level
from neffbuild.toolchain.inductor.engines import VLLM, graph_engine, target_level
from neffbuild.toolchain.inductor.identity import (
    engine_tools,
    serving_versions,
    toolchain_identity,
)

_LOCK_WAIT_SECONDS = 7200.0
_log = logging.getLogger(__name__)


_unit: ContextVar[UnitInContext | None] = ContextVar("neffbuild_unit", default=None)


@contextmanager
def unit(bucket_name: str, *, config: str = UNNAMED_CONFIG) -> Iterator[None]:
    """Say which unit the graphs met inside are, for what strict mode says of one that is not stored.

    `config` is the serve config's file. A graph that is compiled inside is stored as a graph all the
    same: a unit's entry names inputs and outputs as the toolchain's own capture does, which a graph met
    elsewhere cannot be known to.
    """
    token = _unit.set(UnitInContext(bucket_name, config))
    try:
        yield
    finally:
        _unit.reset(token)


def neffbuild_backend(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> StoredProgram:
    """The program for a graph captured by Dynamo. Torch finds this function under the name `neffbuild`.

    Raises `ConfigError` for bad options, `ToolchainRefusal` for a graph that cannot be compiled ahead of
    time or a program this host cannot run or build; in strict mode `MissingUnit` for a graph that is not
    stored and `IntegrityError` for one whose artifact is damaged (otherwise both are compiled).
    """
    if mode is not None:
        raise ConfigError(
            f"the neffbuild backend has no mode {mode!r}",
            field="mode",
            value=mode,
            hint="leave mode out",
        )
    settings = _of_engine(
        graph_engine(node.target for node in module.graph.nodes if node.op == "call_function"),
        backend_settings(options or {}, os.environ),
    )
    captured = capture_graph(module, example_inputs)
    damaged: IntegrityError | None = None
    for entry in _stored(settings, captured.graph_digest):
        try:
            program = load_program(settings.store, entry)
        except IntegrityError as error:
            damaged = error
            if not settings.strict:
                _log.warning("%s; it is compiled anew", error.message)
            continue
        counters.hits += 1
        return program
    counters.misses += 1
    if settings.strict:
        raise damaged or _strict_miss(settings, captured)
    return load_program(settings.store, _compile(settings, captured))


def _of_engine(engine: str, settings: BackendSettings) -> BackendSettings:
    if engine == VLLM:
        # It drops all guards, so nothing is ever traced again; other graphs of its process are its own.
        return replace(settings, toolchain=settings.toolchain.model_copy(update={"engine": engine}))
    _never_fall_back_to_eager()
    return settings


def _never_fall_back_to_eager() -> None:
    """For torch as a whole: it has no such setting for one backend. The two go together."""
    torch._dynamo.config.suppress_errors = False
    torch._dynamo.config.fail_on_recompile_limit_hit = True


def _stored(settings: BackendSettings, graph_digest: str) -> Iterator[Entry]:
    """Entries whose program is the graph's: units of manifests, then what was compiled here before."""
    for manifest in settings.manifests:
        recipe = _graph_recipe(graph_digest, _identity_beside(settings, manifest))
        key = manifest.graph_index.get(recipe_key(recipe))
        if key is not None:
            yield manifest.entries[key]
    own = toolchain_identity(settings.toolchain)
    if not own.unresolved:
        found = read_entry(settings.store, recipe_key(_graph_recipe(graph_digest, own)))
        if isinstance(found, Hit):
            yield found.entry


def _identity_beside(settings: BackendSettings, manifest: Manifest) -> ToolchainIdentity:
    """This process's toolchain, with the compiler the manifest states: a host that only serves needs
    none, and one it has of another version is not asked."""
    planned, serving = manifest.platform.get("versions") or {}, serving_versions()
    tools = engine_tools(settings.toolchain.engine)
    versions = {
        name: serving.get(name, planned.get(name))
        for name in tools
        if name in serving or name in planned
    }
    target = settings.toolchain.target or _stated_level(manifest)
    return toolchain_identity(
        settings.toolchain.model_copy(update={"versions": versions, "target": target})
    )


def _stated_level(manifest: Manifest) -> str | None:
    """The level a manifest is for: serving it is asking for it. `native` is another one on each host."""
    level = target_level(str(manifest.platform.get("target")))
    return level if level in LEVELS else None


def _graph_recipe(graph_digest: str, identity: ToolchainIdentity) -> dict[str, Any]:
    return graph_recipe(graph_digest, identity.platform, {"flags": list(identity.flags)})


def _compile(settings: BackendSettings, captured: Captured) -> Entry:
    identity = toolchain_identity(settings.toolchain)
    if identity.unresolved:
        raise ToolchainRefusal(
            f"the graph {captured.graph_digest} is not stored in {settings.store.url} and cannot be "
            f"compiled here: {'; '.join(identity.unresolved)}",
            hint="pull what was compiled for this host, or install the compiler",
        )
    recipe = _graph_recipe(captured.graph_digest, identity)
    key = recipe_key(recipe)
    # Said aloud: nobody who serves from a store expects to wait for this.
    _log.warning(
        "no program for graph %s in %s: compiling one", captured.graph_digest, settings.store.url
    )
    with TemporaryDirectory(prefix="neffbuild-") as scratch:

        def build() -> tuple[Entry, Mapping[str, Path]]:
            began = time.monotonic()
            artifact = compile_graph(
                captured.graph,
                cpu_level(target_level(settings.toolchain.target)),
                settings.toolchain.flags,
                Path(scratch),
            )
            counters.compiles += 1
            entry = Entry(
                recipe=recipe,
                files=record_files(artifact.files),
                graph_digest=captured.graph_digest,
                graph_key=key,
                statistics={
                    **artifact.statistics,
                    "compile_seconds": time.monotonic() - began,
                },
            )
            return entry, artifact.files

        entry, _ = build_once(settings.store, key, build, wait=_LOCK_WAIT_SECONDS)
    _log.warning("graph %s has a program now, entry %s", captured.graph_digest, entry.key)
    return entry


def _strict_miss(settings: BackendSettings, captured: Captured) -> NeffbuildError:
    def beside(manifest: Manifest) -> ToolchainIdentity:
        return _identity_beside(settings, manifest)

    first = settings.manifests[0] if settings.manifests else None
    identity = beside(first) if first else toolchain_identity(settings.toolchain)
    known = not identity.unresolved
    key = recipe_key(_graph_recipe(captured.graph_digest, identity)) if known else None
    return graph_miss(settings, captured, beside, key, identity.unresolved, _unit.get())
