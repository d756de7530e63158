"""Which of several platforms this host should run, with a config or without one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from neffbuild.cache.index import Fit, HostFit
from neffbuild.config.build import BuildConfig
from neffbuild.config.errors import NeffbuildError
from neffbuild.toolchain.registry import load_toolchain

_EXACT = 1000
"""Above every rank that a toolchain gives: exactly what the config builds."""


def host_fit(config: BuildConfig | None) -> HostFit:
    """How platforms suit this host, as its toolchains see it; with a config, only what it asks for does.

    What cannot be seen here (a compiler that is not installed, a version that is not pinned) rules
    nothing out.
    """
    if config is None:
        return toolchain_fit
    wanted = config.toolchain
    built_here = load_toolchain(wanted.name).identity(config).platform

    def fit(platform: Mapping[str, Any]) -> Fit:
        if platform == built_here:
            return Fit(None, _EXACT)
        stated = {"toolchain": wanted.name, "route": wanted.route, "target": wanted.target}
        for name, value in stated.items():
            if value is not None and platform.get(name) not in (value, built_here[name]):
                return Fit(f"the config says {name} {value}")
        built_with = platform.get("versions")
        for tool, version in wanted.versions.items():
            if isinstance(built_with, Mapping) and built_with.get(tool, version) != version:
                return Fit(f"the config pins {tool} {version}")
        return toolchain_fit(platform)

    return fit


def toolchain_fit(platform: Mapping[str, Any]) -> Fit:
    """How a platform suits this host, as the toolchain that built for it sees it."""
    try:
        return load_toolchain(str(platform.get("toolchain"))).fit(platform)
    except NeffbuildError as error:
        return Fit(error.message)
