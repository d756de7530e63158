"""Finding toolchains by name, through the entry-point group `neffbuild.toolchains`."""

from __future__ import annotations

import difflib
from contextlib import suppress
from importlib.metadata import EntryPoint, entry_points

from neffbuild.cache.problem import FileCheck
from neffbuild.config.errors import ConfigError, MissingExtra
from neffbuild.toolchain.base import Toolchain

GROUP = "neffbuild.toolchains"


def toolchain_names() -> list[str]:
    """Names of every installed toolchain, sorted; loads none of them."""
    return sorted(_entry_points())


def load_toolchain(name: str) -> Toolchain:
    """The toolchain called `name`.

    Raises `ConfigError` naming the available ones when there is none, `MissingExtra` when its module
    cannot be imported.
    """
    points = _entry_points()
    if name not in points:
        available = ", ".join(sorted(points)) or "none"
        near = difflib.get_close_matches(name, points, n=1)
        raise ConfigError(
            f"no toolchain named {name!r} is installed; available: {available}",
            field="toolchain.name",
            value=name,
            hint=f"did you mean {near[0]!r}?"
            if near
            else f"install a package with an entry point {name!r} in the group {GROUP}",
        )
    try:
        factory = points[name].load()
    except ImportError as error:
        raise MissingExtra(
            f"toolchain {name!r} cannot be imported: {error}",
            field="toolchain.name",
            value=name,
            hint="install what it needs",
        ) from error
    toolchain: Toolchain = factory()
    return toolchain


def file_checks() -> dict[str, FileCheck]:
    """`Toolchain.file_checks` of every toolchain that can be imported."""
    checks: dict[str, FileCheck] = {}
    for name in toolchain_names():
        # Anybody's package: one that is broken has nothing to say of files, and stops no check of others.
        with suppress(Exception):
            checks |= getattr(load_toolchain(name), "file_checks", {})
    return checks


def _entry_points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}
