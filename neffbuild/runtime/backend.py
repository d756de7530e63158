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

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch._dynamo
from torch import fx

from neffbuild.cache.catalog import Hit, read_entry, record_files
from neffbuild.cache.entry import Entry
from neffbuild.cache.loaded import materialise
from neffbuild.cache.manifest import Manifest
from neffbuild.cache.once import build_once
from neffbuild.cache.recipe import ToolchainIdentity, graph_recipe, recipe_key
from neffbuild.config.errors import (
    ConfigError,
    IntegrityError,
    MissingUnit,
    NeffbuildError,
    ToolchainRefusal,
)
from neffbuild.runtime.backend_settings import BackendSettings, backend_settings
from neffbuild.runtime.counters import Counters
from neffbuild.runtime.missing import UNNAMED_CONFIG, compile_command, missing_unit
from neffbuild.toolchain.base import Captured
from neffbuild.toolchain.inductor.capture import capture_graph
from neffbuild.toolchain.inductor.compile import compile_graph
from neffbuild.toolchain.inductor.cpu_level import cpu_level
from neffbuild.toolchain.inductor.executable import load_executable
from neffbuild.toolchain.inductor.identity import (
    TOOLS,
    installed_versions,
    toolchain_identity,
)

counters = Counters()
"""Of this process: graphs found, graphs not found, graphs compiled."""

_LOCK_WAIT_SECONDS = 7200.0


@dataclass(frozen=True, slots=True)
class _UnitInContext:
    bucket_name: str
    config: str


_unit: ContextVar[_UnitInContext | None] = ContextVar("neffbuild_unit", default=None)


@contextmanager
def unit(bucket_name: str, *, config: str = UNNAMED_CONFIG) -> Iterator[None]:
    """Say which unit the graphs met inside are, for what strict mode says of one that is not stored.

    `config` is the serve config's file. A graph that is compiled inside is stored as a graph all the
    same: a unit's entry names inputs and outputs as the toolchain's own capture does, which a graph met
    elsewhere cannot be known to.
    """
    token = _unit.set(_UnitInContext(bucket_name, config))
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
) -> Callable[..., Any]:
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
    _never_fall_back_to_eager()
    settings = backend_settings(options or {}, os.environ)
    captured = capture_graph(module, example_inputs)
    damaged: IntegrityError | None = None
    for entry in _stored(settings, captured.graph_digest):
        try:
            program = _load(settings, entry)
        except IntegrityError as error:
            damaged = error
            continue
        counters.hits += 1
        return program
    counters.misses += 1
    if settings.strict:
        raise damaged or _strict_miss(settings, captured.graph_digest)
    return _load(settings, _compile(settings, captured))


def _never_fall_back_to_eager() -> None:
    """For torch as a whole: it has no such setting for one backend. The two go together."""
    torch._dynamo.config.suppress_errors = False
    torch._dynamo.config.fail_on_recompile_limit_hit = True


def _load(settings: BackendSettings, entry: Entry) -> Callable[..., Any]:
    return load_executable(materialise(settings.store, entry), entry.recipe).call_graph


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
    """This process's toolchain; the manifest says what cannot be seen here, because a host that only
    serves needs no compiler."""
    installed, planned = installed_versions(), manifest.platform.get("versions") or {}
    unseen = {name: planned[name] for name in TOOLS if name in planned and name not in installed}
    return toolchain_identity(settings.toolchain.model_copy(update={"versions": unseen}))


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
    with TemporaryDirectory(prefix="neffbuild-") as scratch:

        def build() -> tuple[Entry, Mapping[str, Path]]:
            began = time.monotonic()
            artifact = compile_graph(
                captured.graph,
                cpu_level(settings.toolchain.target),
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
    return entry


def _strict_miss(settings: BackendSettings, graph_digest: str) -> NeffbuildError:
    """Why strict mode stops here, as closely as it can be said."""
    identities = [_identity_beside(settings, manifest) for manifest in settings.manifests]
    differences = [
        _difference(manifest.platform, identity.platform)
        for manifest, identity in zip(settings.manifests, identities, strict=True)
    ]
    if differences and all(differences):
        return ToolchainRefusal(
            f"no program for the graph {graph_digest}: its manifest is for {differences[0]}",
            field="manifest",
            value=settings.manifests[0].digest,
            hint="pull or compile for this platform",
        )
    where = settings.store.url
    identity = identities[0] if identities else toolchain_identity(settings.toolchain)
    unknown = "; ".join(identity.unresolved)
    key = None if unknown else recipe_key(_graph_recipe(graph_digest, identity))
    context = _unit.get()
    if context is None:
        keyed = f"key {key}" if key else f"without a key: {unknown}"
        return MissingUnit(
            f"no program for the graph {graph_digest} ({keyed}) is in {where}; build it with "
            f"`neffbuild compile {UNNAMED_CONFIG}`",
            field="graph",
            value=graph_digest,
            hint="neffbuild.runtime.backend.unit(...) around the call puts its unit's name here",
        )
    key_of_unit = _key_of_unit(settings.manifests, context.bucket_name)
    if key_of_unit is not None and isinstance(read_entry(settings.store, key_of_unit), Hit):
        return MissingUnit(
            f"unit {context.bucket_name} (key {key_of_unit}) is in {where}, but for another graph than "
            f"{graph_digest}; what is built with "
            f"`{compile_command(context.config, context.bucket_name)}` is the config's own",
            field="unit",
            value=context.bucket_name,
            hint="model, shapes (dynamic=False), flags and target must be those of the config",
        )
    return missing_unit(context.bucket_name, key_of_unit or key, where, context.config)


def _difference(stated: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """The first ingredient in which the platform of a manifest is not this process's, in words."""
    for name in here:
        if stated.get(name) != here[name]:
            return f"{name} {stated.get(name)!r}, this process runs {here[name]!r}"
    return None


def _key_of_unit(manifests: Sequence[Manifest], bucket_name: str) -> str | None:
    for manifest in manifests:
        for planned in manifest.units:
            if planned.shape.bucket_name == bucket_name and planned.key is not None:
                return planned.key
    return None
