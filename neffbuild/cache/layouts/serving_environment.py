"""The environment in which vLLM Neuron serves from a filled cache and compiles nothing.

By generation of the plugin, since names moved: what was `VLLM_NEURON_…` up to 0.21 is `NEURON_LIBTORCH_…`
from 0.24 on. From published documentation and forks of the plugin; none of it was run here.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neffbuild.cache.layouts.engine_root import BELOW
from neffbuild.config.errors import ConfigError

NATIVE = "native"
XLA = "xla"
ROUTES = (NATIVE, XLA)

_BY_COMPILER = {(2, 27): "0.24", (2, 28): "0.29"}
_BY_ROUTE = {NATIVE: "0.29", XLA: "0.24"}
_VERSION = re.compile(r"(\d+)\.(\d+)(?:\..*)?")
_LIBTORCH_FROM = (0, 24)
_RUN_TIME = {
    "--lnc": "NEURON_LOGICAL_NC_CONFIG",
    "--hbm-scratchpad-page-size": "NEURON_SCRATCHPAD_PAGE_SIZE",
}
"""What has to be at run time as it was for the compiler: flag → variable."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One variable; `value` is None where it must not be set. `why` is one line."""

    name: str
    value: str | None
    why: str
    verified: bool = True

    def document(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "value": self.value,
            "why": self.why,
            "verified": self.verified,
        }


def settled_version(route: str, versions: Mapping[str, str]) -> str:
    """The version of vLLM Neuron that a config is for: as it is pinned, else the one released with the
    pinned compiler, else the last one documented for the route."""
    for name in ("vllm-neuron", "vllm_neuron"):
        if name in versions:
            return versions[name]
    compiler = _VERSION.fullmatch(versions.get("neuronx-cc", ""))
    if compiler is not None:
        known = _BY_COMPILER.get((int(compiler[1]), int(compiler[2])))
        if known is not None:
            return known
    return _BY_ROUTE.get(route, _BY_ROUTE[NATIVE])


def serving_environment(
    *, route: str, version: str, root: Path, flags: Sequence[str]
) -> tuple[Setting, ...]:
    """What to set, in order. `root` is `VLLM_CACHE_ROOT`, `flags` are those of the compiler, each of them
    once as `--name=value` or `--name`.

    Raises `ConfigError` for a route or a version that is none.
    """
    if route not in ROUTES:
        raise ConfigError(
            f"there is no route {route!r} of vLLM Neuron; allowed: {', '.join(ROUTES)}",
            field="toolchain.route",
            value=route,
        )
    parsed = _VERSION.fullmatch(version)
    if parsed is None:
        raise ConfigError(
            f"{version!r} is no version of vLLM Neuron; expected is one like 0.24",
            field="--plugin-version",
            value=version,
        )
    release = int(parsed[1]), int(parsed[2])
    libtorch = release >= _LIBTORCH_FROM
    prefix = "NEURON_LIBTORCH" if libtorch else "VLLM_NEURON"
    settings = [
        Setting("VLLM_CACHE_ROOT", str(root), f"entries are in {root / BELOW}"),
    ]
    if libtorch:
        settings.append(
            Setting(
                "NEURON_LIBTORCH_CACHE_ROOT",
                str(root),
                "the same folder, for processes in which the plugin does not set it",
            )
        )
    settings += _backend(route, release)
    settings += [
        Setting(
            "VLLM_NEURON_DISABLE_WARMUP_COMPILE",
            "1",
            "a graph that is not in the local cache is an error. It is looked for there BEFORE any remote "
            "cache is asked: fill the local cache before the engine starts",
        ),
        Setting(
            f"{prefix}_DISABLE_GRAPH_CAPTURE_BACKEND",
            "1",
            "no capture and no parallel compile at start-up: there is nothing to compile",
        ),
        Setting(
            f"{prefix}_DISABLE_COMPILE_CACHE",
            None,
            "with DISABLE_WARMUP_COMPILE the engine refuses to start without its cache",
        ),
    ]
    settings.append(
        Setting(
            "VLLM_NEURON_CPU_COMPILE",
            None,
            "the mode that graphs are compiled in without a device: it loads no weights and serves nothing",
        )
    )
    if route == NATIVE and flags:
        settings.append(
            Setting(
                "NEURON_CC_FLAGS",
                shlex.join(flags),
                "the compiler's flags, as the graphs were compiled with; whether the engine's key covers "
                "them is not in the pages seen",
                verified=False,
            )
        )
    if route == NATIVE:
        settings.append(
            Setting(
                "TORCH_CACHING_PRECOMPILE",
                "0",
                "traces are pickles, bound to one Python and torch, and not needed for a hit",
            )
        )
    for flag in flags:
        name, _, value = flag.partition("=")
        if name in _RUN_TIME and value:
            settings.append(
                Setting(
                    _RUN_TIME[name], value, f"must be what {name} was when the NEFFs were compiled"
                )
            )
    return tuple(settings)


def _backend(route: str, release: tuple[int, int]) -> list[Setting]:
    name = "VLLM_NEURON_BACKEND"
    if route == XLA and release >= (0, 25):
        why = "XLA by the name that 0.24 used; what later releases call it is not in the pages seen"
        return [Setting(name, "vllm_neuron", why, verified=False)]
    if route == XLA:
        return [Setting(name, "vllm_neuron", "the XLA route, also by default up to 0.24")]
    settings = [Setting(name, "neuron_native", "said outright: releases differ in their default")]
    if release < (0, 25):
        settings.append(
            Setting(
                "VLLM_NEURON_LIBTORCH_NEURONX_LITE",
                "1",
                "every published native set-up of 0.24 sets it",
                verified=False,
            )
        )
    return settings
