"""What the inductor toolchain contributes to recipes, found out without importing torch or vLLM."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from neffbuild.cache.recipe import ToolchainIdentity
from neffbuild.config.build import BuildConfig, ToolchainConfig
from neffbuild.config.errors import ConfigError
from neffbuild.toolchain.inductor.cpu_level import cpu_level
from neffbuild.toolchain.inductor.engines import (
    ENGINES,
    REFERENCE,
    VLLM,
    installed_vllm,
    target_level,
    vllm_target,
)
from neffbuild.toolchain.inductor.options import canonical_flags
from neffbuild.toolchain.inductor.vllm_environment import keyed_environment

NAME = "inductor"
ROUTE = "aot"
COMPILER = "g++"
TOOLS = ("torch", COMPILER)
"""Of every engine; engine vllm has one more."""

_PACKAGE = Path(__file__).parents[2]
_SOURCES = (
    "toolchain/inductor/capture.py",
    "toolchain/inductor/compile.py",
    "toolchain/inductor/opaque.py",
    "toolchain/inductor/symbols.py",
)
_ENGINE_SOURCES = {
    REFERENCE: (
        "grid/windows.py",
        "models/architecture.py",
        "models/decode.py",
        "models/draft_tables.py",
        "models/eagle3.py",
        "models/eagle3_architecture.py",
        "models/layers.py",
        "models/llama.py",
        "models/windowed.py",
    ),
    VLLM: ("toolchain/inductor/vllm_capture.py",),
}
"""What decides which graph is captured and how it is compiled, options and versions aside."""


def inductor_identity(config: BuildConfig) -> ToolchainIdentity:
    """See `Toolchain.identity`: it depends on the config's `toolchain` section alone."""
    return toolchain_identity(config.toolchain)


def toolchain_identity(toolchain: ToolchainConfig) -> ToolchainIdentity:
    """The identity that a `toolchain` section gives. Route is AOTInductor, the engine by default the
    reference model.

    A pinned version stands for the installed one even where both are known; `host_refusal` compares
    them where it matters. Raises `ConfigError` for an unknown target, route, engine, flag or tool.
    """
    _check_choice("route", toolchain.route, (ROUTE,))
    _check_choice("engine", toolchain.engine, ENGINES)
    engine = toolchain.engine or REFERENCE
    serves_vllm = engine == VLLM
    level = cpu_level(target_level(toolchain.target) if serves_vllm else toolchain.target)
    versions = planned_versions(toolchain)
    return ToolchainIdentity(
        name=NAME,
        route=ROUTE,
        target=vllm_target(toolchain.target) if serves_vllm else level.target,
        engine=engine,
        versions=versions,
        flags=canonical_flags(level, toolchain.flags),
        source_digest=_source_digest(engine),
        symbolic_kv_blocks=True,
        symbolic_shapes=serves_vllm,
        environment=keyed_environment(os.environ) if serves_vllm else {},
        unresolved=tuple(
            f"{tool} is not installed here: pin it with toolchain.versions.{tool}"
            for tool in engine_tools(engine)
            if tool not in versions
        ),
    )


def engine_tools(engine: str | None) -> tuple[str, ...]:
    """The tools whose versions are in the keys of an engine's units."""
    return (*TOOLS, VLLM) if engine == VLLM else TOOLS


def planned_versions(toolchain: ToolchainConfig) -> dict[str, str]:
    """Tool → version: as pinned, else as installed; a tool of which neither is known is absent."""
    tools = engine_tools(toolchain.engine)
    for tool in toolchain.versions:
        if tool not in tools:
            raise ConfigError(
                f"the inductor toolchain has no tool {tool!r} to pin; its tools: {', '.join(tools)}",
                field=f"toolchain.versions.{tool}",
                value=toolchain.versions[tool],
                hint="remove the pin",
            )
    known = dict(toolchain.versions)
    # Asking for the compiler's version runs it.
    if not known.keys() >= set(tools):
        known = installed_versions() | known
    return {tool: known[tool] for tool in tools if tool in known}


def serving_versions() -> dict[str, str]:
    """Tool → version of what programs run with here: the compiler is none of that, and is not run."""
    found = {"torch": _torch_version(), VLLM: installed_vllm()}
    return {tool: version for tool, version in found.items() if version is not None}


def installed_versions() -> dict[str, str]:
    """Tool → version of what is installed here."""
    compiler = _compiler_version()
    return serving_versions() | ({COMPILER: compiler} if compiler is not None else {})


def version_mismatches(planned: Mapping[str, str]) -> list[str]:
    """Why this host is not the one `planned` describes, a line per tool; empty when it is."""
    installed = installed_versions()
    return [
        f"{tool} {planned[tool]} is planned, {installed.get(tool, 'none')} is installed"
        for tool in planned
        if planned[tool] != installed.get(tool)
    ]


def _torch_version() -> str | None:
    try:
        return version("torch")
    except PackageNotFoundError:
        return None


@cache
def _compiler_version() -> str | None:
    try:
        completed = subprocess.run(
            [COMPILER, "-dumpfullversion", "-dumpversion"],
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return completed.stdout.strip() or None


@cache
def _source_digest(engine: str) -> str:
    digest = hashlib.sha256()
    for name in (*_SOURCES, *_ENGINE_SOURCES[engine]):
        content = (_PACKAGE / name).read_bytes()
        # Lengths delimit, so that moving a line between two files cannot go unseen.
        digest.update(f"{name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def _check_choice(field: str, value: str | None, allowed: Sequence[str]) -> None:
    if value not in (None, *allowed):
        raise ConfigError(
            f"the inductor toolchain has no {field} {value!r}; allowed: {', '.join(allowed)}",
            field=f"toolchain.{field}",
            value=value,
            hint=f"leave toolchain.{field} out",
        )
