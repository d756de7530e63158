"""neuronx-cc's command lines, word for word as the engine's own routes write them.

All names of files are relative: the compiler runs where they are, and what it records of its command
line (`info.json` in the NEFF) then names no folder of the machine.

Sources: torch-neuronx's compiler call for the native route (StableHLO goes in as `--framework XLA` too),
vLLM Neuron's compile arguments for the route xla.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from neffbuild.config.build import BuildConfig
from neffbuild.toolchain.neuronx.flags import (
    BACKEND_OPTIONS,
    CC_FLAGS,
    LNC,
    OPT_LEVEL,
    OPTLEVEL,
    TARGET,
    TENSORIZER_OPTIONS,
    VERBOSE,
    Flag,
    canonical_flags,
    configured_flags,
    environment_flags,
    level_flags,
    value_of,
)
from neffbuild.toolchain.neuronx.routes import COMPILER, NATIVE, Route
from neffbuild.toolchain.neuronx.target import LOGICAL_CORES, TARGET_OVERRIDE, Target

LOG = "log-neuron-cc.txt"
"""What the compiler writes beside what it prints; the name is its own default."""

_FRAMEWORK = ("--framework", "XLA")
_MODEL_TYPE, _AUTO_CAST = "--model-type", "--auto-cast"
_NATIVE_DEFAULTS = (Flag(_AUTO_CAST, "none"), Flag(_MODEL_TYPE, "transformer"), Flag(OPTLEVEL, "2"))
_XLA_DEFAULTS = (
    Flag(_AUTO_CAST, "none"),
    Flag(TENSORIZER_OPTIONS, "--modular-flow-mac-threshold=10"),
    Flag(BACKEND_OPTIONS, "--enable-verifier=false --enable-nested-dynamic-loop"),
)
_XLA_VERBOSITY = "35"
_ELSEWHERE = frozenset({"--framework", TARGET, VERBOSE})
"""Flags that are in recipes in another form, or change no NEFF."""


def stated_flags(config: BuildConfig, environment: Mapping[str, str]) -> tuple[Flag, ...]:
    """What users say, in the order in which the last one wins: `NEURON_COMPILER_OPT_LEVEL` (of the
    native route), `toolchain.flags`, `NEURON_CC_FLAGS`. Raises `ConfigError`."""
    level = environment.get(OPT_LEVEL) if config.toolchain.route in (None, NATIVE) else None
    return (
        *(level_flags(level) if level else ()),
        *configured_flags(config.toolchain.flags),
        *environment_flags(environment.get(CC_FLAGS, "")),
    )


def recipe_flags(
    route: Route, config: BuildConfig, stated: Sequence[Flag], target: Target
) -> tuple[str, ...]:
    """The flags as they enter recipes: the route's own, those stated over them, and the grouping of
    cores."""
    defaults = (
        _NATIVE_DEFAULTS
        if route.name == NATIVE
        else (*_XLA_DEFAULTS, Flag(OPTLEVEL, _vllm_level(config)))
    )
    flags = canonical_flags((*defaults, *stated, Flag(LNC, str(target.lnc))))
    return tuple(str(flag) for flag in flags if flag.name not in _ELSEWHERE)


def compile_command(route: Route, recipe: Mapping[str, Any], stated: Sequence[Flag]) -> list[str]:
    """The words of the compile that a recipe's `toolchain` part describes. Of `stated` only how much the
    compiler says is taken: all else is in the recipe."""
    flags = [_flag(text) for text in recipe["flags"]]
    lnc, level = value_of(flags, LNC) or "1", value_of(flags, OPTLEVEL)
    chip = str(recipe["target"]).partition("+")[0]
    verbose = value_of(stated, VERBOSE)
    start = [COMPILER, "compile", route.graph, *_FRAMEWORK, TARGET, chip]
    if route.name == NATIVE:
        placed = {LNC, OPTLEVEL, _MODEL_TYPE, _AUTO_CAST}
        return [
            *start,
            *("--lnc", lnc, f"-O{level}"),
            *(_MODEL_TYPE, value_of(flags, _MODEL_TYPE) or ""),
            f"{_AUTO_CAST}={value_of(flags, _AUTO_CAST)}",
            *_others(flags, placed),
            *([f"{VERBOSE}={verbose}"] if verbose else []),
            *("--output", route.neff),
        ]
    placed = {LNC, OPTLEVEL, _AUTO_CAST, TENSORIZER_OPTIONS, BACKEND_OPTIONS}
    return [
        *start,
        *("--output", route.neff, "--logfile", LOG),
        f"{_AUTO_CAST}={value_of(flags, _AUTO_CAST)}",
        f"{VERBOSE}={verbose or _XLA_VERBOSITY}",
        f"-O{level}",
        *(f"{name}={value_of(flags, name)}" for name in (TENSORIZER_OPTIONS, BACKEND_OPTIONS)),
        # vLLM Neuron leaves it to the compiler's default.
        *([] if Target(chip, int(lnc)).is_compilers_default else [f"--logical-nc-config={lnc}"]),
        *_others(flags, placed),
    ]


def compiler_variables(recipe: Mapping[str, Any]) -> dict[str, str]:
    """The compile that a recipe's `toolchain` part describes, as the variables by which torch-neuronx, which
    calls the compiler itself, is told of it.

    Flags that it gives anyway are left out: the key of its cache has the text of `NEURON_CC_FLAGS` in it.
    """
    flags = [_flag(text) for text in recipe["flags"]]
    further = [
        str(flag)
        for flag in flags
        if flag.name not in (LNC, OPTLEVEL) and flag not in _NATIVE_DEFAULTS
    ]
    return {
        TARGET_OVERRIDE: str(recipe["target"]).partition("+")[0],
        LOGICAL_CORES: value_of(flags, LNC) or "1",
        OPT_LEVEL: f"-O{value_of(flags, OPTLEVEL)}",
        **({CC_FLAGS: shlex.join(further)} if further else {}),
    }


def _others(flags: Sequence[Flag], placed: set[str]) -> list[str]:
    return [str(flag) for flag in flags if flag.name not in placed]


def _flag(text: str) -> Flag:
    name, equals, value = text.partition("=")
    return Flag(name, value if equals else None)


def _vllm_level(config: BuildConfig) -> str:
    """vLLM Neuron hands vLLM's own optimisation level on; unset, its platform was seen to take 1."""
    level = (config.serve.model_extra or {}).get("optimization_level")
    return str(min(3, max(1, level))) if type(level) is int else "1"
