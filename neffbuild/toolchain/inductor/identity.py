"""What the inductor toolchain contributes to recipes, found out without importing torch."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from neffbuild.cache.recipe import ToolchainIdentity
from neffbuild.config.build import BuildConfig, ToolchainConfig
from neffbuild.config.errors import ConfigError
from neffbuild.toolchain.inductor.cpu_level import cpu_level
from neffbuild.toolchain.inductor.options import canonical_flags

NAME = "inductor"
ROUTE = "aot"
ENGINE = "reference"
COMPILER = "g++"
TOOLS = ("torch", COMPILER)

_PACKAGE = Path(__file__).parents[2]
_SOURCES = (
    "models/architecture.py",
    "models/decode.py",
    "models/eagle3.py",
    "models/eagle3_architecture.py",
    "models/llama.py",
    "toolchain/inductor/capture.py",
    "toolchain/inductor/compile.py",
    "toolchain/inductor/symbols.py",
)
"""What decides which graph is captured and how it is compiled, options and versions aside."""


def inductor_identity(config: BuildConfig) -> ToolchainIdentity:
    """See `Toolchain.identity`: it depends on the config's `toolchain` section alone."""
    return toolchain_identity(config.toolchain)


def toolchain_identity(toolchain: ToolchainConfig) -> ToolchainIdentity:
    """The identity that a `toolchain` section gives. Route is AOTInductor, engine the reference model.

    A pinned version stands for the installed one even where both are known; `host_refusal` compares
    them where it matters. Raises `ConfigError` for an unknown target, route, engine, flag or tool.
    """
    _check_choice("route", toolchain.route, ROUTE)
    _check_choice("engine", toolchain.engine, ENGINE)
    level = cpu_level(toolchain.target)
    versions = planned_versions(toolchain)
    return ToolchainIdentity(
        name=NAME,
        route=ROUTE,
        target=level.target,
        engine=ENGINE,
        versions=versions,
        flags=canonical_flags(level, toolchain.flags),
        source_digest=_source_digest(),
        symbolic_kv_blocks=True,
        unresolved=tuple(
            f"{tool} is not installed here: pin it with toolchain.versions.{tool}"
            for tool in TOOLS
            if tool not in versions
        ),
    )


def planned_versions(toolchain: ToolchainConfig) -> dict[str, str]:
    """Tool → version: as pinned, else as installed; a tool of which neither is known is absent."""
    for tool in toolchain.versions:
        if tool not in TOOLS:
            raise ConfigError(
                f"the inductor toolchain has no tool {tool!r} to pin; its tools: {', '.join(TOOLS)}",
                field=f"toolchain.versions.{tool}",
                value=toolchain.versions[tool],
                hint="remove the pin",
            )
    return installed_versions() | dict(toolchain.versions)


def installed_versions() -> dict[str, str]:
    """Tool → version of what is installed here."""
    found = {"torch": _torch_version(), COMPILER: _compiler_version()}
    return {tool: version for tool, version in found.items() if version is not None}


def version_mismatches(planned: Mapping[str, str]) -> list[str]:
    """Why this host is not the one `planned` describes, a line per tool; empty when it is."""
    installed = installed_versions()
    return [
        f"{tool} {planned[tool]} is planned, {installed.get(tool, 'none')} is installed"
        for tool in TOOLS
        if tool in planned and planned[tool] != installed.get(tool)
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
def _source_digest() -> str:
    digest = hashlib.sha256()
    for name in _SOURCES:
        content = (_PACKAGE / name).read_bytes()
        # Lengths delimit, so that moving a line between two files cannot go unseen.
        digest.update(f"{name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def _check_choice(field: str, value: str | None, only: str) -> None:
    if value not in (None, only):
        raise ConfigError(
            f"the inductor toolchain has no {field} {value!r}; allowed: {only}",
            field=f"toolchain.{field}",
            value=value,
            hint=f"leave toolchain.{field} out",
        )
