"""Which versions of Neuron's tools are installed, found out without importing any."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import IO

from neffbuild.config.build import ToolchainConfig
from neffbuild.config.errors import ConfigError
from neffbuild.toolchain.neuronx.routes import COMPILER, Route

_SECONDS = 60
_LAST_WORDS_SECONDS = 2.0
_MOST_BYTES = 64 << 10
_SAID = re.compile(r"Compiler version\s+(\d+(?:[.-]\w+)+(?:\+\w+(?:[.-]\w+)*)?)")
_FOR_A_DEVICE = re.compile(r"(?:cpu|cu\d+|rocm|xpu)\b")
"""What torch's wheels have behind the `+`: of which device their kernels are, which no graph depends on."""


def planned_versions(toolchain: ToolchainConfig, route: Route) -> dict[str, str]:
    """Tool → version of the route's tools: as pinned, else as installed; a tool of which neither is
    known is absent. What follows a `+` is part of it, since one version may be built more than once; only
    torch's `+cpu` and the like are left out.

    Raises `ConfigError` for a pin of what is none of them, or that names no version.
    """
    for tool in toolchain.versions:
        if tool not in route.tools:
            raise ConfigError(
                f"there is no tool {tool!r} to pin for engine {route.engine} on the route "
                f"{route.name}; its tools: {', '.join(route.tools)}",
                field=f"toolchain.versions.{tool}",
                value=toolchain.versions[tool],
                hint="remove the pin",
            )
    known = {tool: _build(pinned) for tool, pinned in toolchain.versions.items()}
    if nameless := [tool for tool, build in known.items() if not build]:
        pinned = toolchain.versions[nameless[0]]
        raise ConfigError(
            f"toolchain.versions.{nameless[0]} is {pinned!r}, which names no version",
            field=f"toolchain.versions.{nameless[0]}",
            value=pinned,
            hint="write it as the tool says it, such as 2.28.7631.0",
        )
    wanted = [tool for tool in route.tools if tool not in known]
    known |= installed_versions(wanted)
    return {tool: known[tool] for tool in route.tools if tool in known}


def installed_versions(tools: Iterable[str]) -> dict[str, str]:
    """Tool → version of those that are installed here."""
    found = {
        tool: _distribution(tool) or (compiler_version() if tool == COMPILER else None)
        for tool in tools
    }
    return {tool: version for tool, version in found.items() if version is not None}


def version_mismatches(planned: Mapping[str, str], tools: Iterable[str]) -> list[str]:
    """Why this host is not the one that `planned` describes, a line for each of `tools`; of the compiler
    it is the program on PATH that counts."""
    tools = tuple(tools)
    found = installed_versions(tool for tool in tools if tool != COMPILER)
    if path := compiler_path():
        found[COMPILER] = compiler_version() or f"{path}, which does not say its version,"
    return [
        f"{tool} {planned[tool]} is planned, {found.get(tool, 'none')} is installed"
        for tool in tools
        if tool in planned and not may_be(planned[tool], found.get(tool, ""))
    ]


def may_be(planned: str, found: str) -> bool:
    """Whether a version that was found may be the planned one. One of them that does not say its build, as a
    pin need not, may be any build of its version."""
    (release, _, build), (found_release, _, found_build) = (
        one.partition("+") for one in (_build(planned), _build(found))
    )
    return release == found_release and (build == found_build or not build or not found_build)


def compiler_path() -> str | None:
    """Where neuronx-cc is, by PATH; None where it is not."""
    return shutil.which(COMPILER)


def compiler_version() -> str | None:
    """What the neuronx-cc on PATH says its version is; None where there is none, or it does not say."""
    path = compiler_path()
    return None if path is None else _ask(path)


@cache
def _ask(path: str) -> str | None:
    try:
        process = subprocess.Popen(
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,  # releases differ in where they say it
            bufsize=0,
            start_new_session=True,
        )
    except (OSError, ValueError):
        return None
    assert process.stdout is not None
    said = bytearray()
    reading = threading.Thread(target=_read_start, args=(process.stdout, said), daemon=True)
    reading.start()
    try:
        status = process.wait(_SECONDS)
    except subprocess.TimeoutExpired:
        status = None
    # A wrapper's children may go on, and hold its output open: that is not waited for.
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    reading.join(_LAST_WORDS_SECONDS)
    found = _SAID.search(bytes(said).decode(errors="replace"))
    return found[1] if found and status == 0 else None


def _read_start(source: IO[bytes], start: bytearray) -> None:
    while len(start) < _MOST_BYTES and (piece := source.read(_MOST_BYTES - len(start))):
        start += piece


def _distribution(tool: str) -> str | None:
    try:
        return _build(version(tool))
    except PackageNotFoundError:
        return None


def _build(full: str) -> str:
    """A version in one spelling; empty where it names none."""
    release, _, build = (part.strip() for part in full.partition("+"))
    build = build.lower()
    return f"{release}+{build}" if release and build and not _FOR_A_DEVICE.match(build) else release
