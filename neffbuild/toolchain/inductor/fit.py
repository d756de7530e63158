"""Whether this host can run what was built for a platform, by what can be seen without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from neffbuild.cache.index import Fit
from neffbuild.config.errors import NeffbuildError
from neffbuild.toolchain.inductor.cpu_level import LEVELS, NATIVE, cpu_level, host_features
from neffbuild.toolchain.inductor.engines import VLLM, host_kernels
from neffbuild.toolchain.inductor.identity import ROUTE, serving_versions

_RANKS = {target: rank for rank, target in enumerate(LEVELS)}
_NATIVE_RANK = len(LEVELS)


def host_fit(platform: Mapping[str, Any]) -> Fit:
    """See `Toolchain.fit`. The compiler does not matter: programs run without it. The highest level
    that the host has is the one to run."""
    route, target, versions = (platform.get(name) for name in ("route", "target", "versions"))
    if route != ROUTE:
        return Fit(f"this release loads the route {ROUTE}")
    here = serving_versions()
    torch = here.get("torch")
    built_with = versions.get("torch") if isinstance(versions, Mapping) else None
    if torch is not None and built_with != torch:
        return Fit(f"torch {torch} is installed here")
    vllm = here.get(VLLM)
    served_by = versions.get(VLLM) if isinstance(versions, Mapping) else None
    if served_by is not None and vllm is not None and served_by != vllm:
        return Fit(f"vLLM {vllm} is installed here")
    if not isinstance(target, str):
        return Fit(f"its target is {target!r:.50}")
    target, _, kernels = target.partition("+")
    if kernels and kernels != host_kernels():
        return Fit(f"vLLM picks its {host_kernels()} kernels here")
    if target in LEVELS:
        missing = LEVELS[target].features - host_features()
        if missing:
            return Fit(f"this host lacks {', '.join(sorted(missing)[:4])}")
        return Fit(None, _RANKS[target])
    try:
        return (
            Fit(None, _NATIVE_RANK) if target == cpu_level(NATIVE).target else Fit("another CPU's")
        )
    except NeffbuildError as error:
        return Fit(error.message)
