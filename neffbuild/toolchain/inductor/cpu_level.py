"""CPU feature levels: what a target lets the compiler emit, and what a host must have to run it.

The levels are those of the x86-64 psABI; features are named as `/proc/cpuinfo` names them. A level is
honoured twice, by `-march` and by the vector class inductor generates for: a class adds flags of its
own after `-march`, so either alone lets instructions through that the level does not have.
"""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from neffbuild.cache.canonical import digest_document
from neffbuild.config.errors import ConfigError, ToolchainRefusal

DEFAULT_TARGET = "x86-64-v3"
NATIVE = "native"

_V2 = frozenset({"cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"})
_V3 = _V2 | {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"}
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}

# Features whose instructions `-march=native` lets the compiler emit; the rest of /proc/cpuinfo
# (virtualisation, mitigations, power) no program depends on.
_CODE_GENERATION = re.compile(
    r"s?sse.*|pni|avx.*|amx_.*|bmi[12]|fma4?|xop|tbm|f16c|movbe|abm|popcnt|cx16|lahf_lm|v?aes"
    r"|v?pclmulqdq|gfni|sha_ni|sha512|sm3|sm4|adx|xsave.*|clflushopt|clwb|rdrand|rdseed|fsgsbase"
    r"|movdiri|movdir64b|rdpid|3dnowprefetch|waitpkg|cldemote|serialize|ptwrite|rtm|hle"
)


@dataclass(frozen=True, slots=True)
class CpuLevel:
    """`target` as it enters recipes, `-march` for it, the vector class ("avx2" or "avx512") and the
    features a host must have."""

    target: str
    march: str
    vector_class: str
    features: frozenset[str]


LEVELS = {
    "x86-64-v3": CpuLevel("x86-64-v3", "x86-64-v3", "avx2", _V3),
    "x86-64-v4": CpuLevel("x86-64-v4", "x86-64-v4", "avx512", _V4),
}
TARGETS = (*LEVELS, NATIVE)


def cpu_level(target: str | None) -> CpuLevel:
    """The level called `target` (None is the default one).

    `native` is this host: its target carries a digest of the host's features, so artifacts of
    different CPUs never share a key. Raises `ConfigError` for an unknown target, `ToolchainRefusal`
    for `native` on a host below the lowest level.
    """
    target = DEFAULT_TARGET if target is None else target
    if target == NATIVE:
        return _native_level(host_features())
    try:
        return LEVELS[target]
    except KeyError:
        raise ConfigError(
            f"unknown target {target!r} of the inductor toolchain; allowed: {', '.join(TARGETS)}",
            field="toolchain.target",
            value=target,
            hint="use x86-64-v3 for any server CPU since 2013, native for this very host",
        ) from None


def _native_level(host: frozenset[str]) -> CpuLevel:
    if missing := _V3 - host:
        raise ToolchainRefusal(
            f"target 'native' needs a CPU with at least the features of x86-64-v3; this "
            f"{platform.machine()} host lacks {', '.join(sorted(missing))}",
            field="toolchain.target",
            value=NATIVE,
            hint="plan on the kind of host that compiles, or name a target of " + ", ".join(LEVELS),
        )
    features = frozenset(name for name in host if _CODE_GENERATION.fullmatch(name))
    return CpuLevel(
        target=f"{NATIVE}-{digest_document(sorted(features))[:16]}",
        march=NATIVE,
        vector_class="avx512" if host >= _V4 else "avx2",
        features=features,
    )


@cache
def host_features() -> frozenset[str]:
    """This host's CPU features; empty where there is no `/proc/cpuinfo` of an x86 kernel."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return frozenset()
    flags = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return frozenset(flags.group(1).split()) if flags else frozenset()
