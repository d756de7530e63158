"""Inductor options: those every artifact is built with, and those a user may set.

One table for the recipe and for the compiler, so that nothing changes an artifact without its key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from neffbuild.config.errors import ConfigError
from neffbuild.toolchain.inductor.cpu_level import CpuLevel

PROGRAM = "program"
"""Base name of generated files: it is compiled into them, so it must not vary."""

_FIXED: Mapping[str, Any] = {
    # Debug sections carry paths and are two thirds of the file.
    "aot_inductor.enable_line_tables": False,
    "aot_inductor.debug_compile": False,
    "aot_inductor.debug_symbols": False,
    "aot_inductor.model_name_for_generated_files": PROGRAM,
    "aot_inductor.compile_wrapper_opt_level": "O1",
    # The builder's number of threads must not be baked in: loops take the serving process's, and the
    # choice of the loops to run in parallel is made for a fixed number.
    "cpp.dynamic_threads": True,
    "cpp.threads": 8,
    "cpp.enable_kernel_profile": False,
    "cpp.enable_unsafe_math_opt_flag": False,
    "cpp.enable_floating_point_contract_flag": "off",
    "max_autotune": False,
    "freezing": False,
}

_SETTABLE: Mapping[str, Mapping[str, Any]] = {
    "cpp.enable_unsafe_math_opt_flag": {"false": False, "true": True},
    "cpp.enable_floating_point_contract_flag": {"off": "off", "on": "on", "fast": "fast"},
}
"""`toolchain.flags` a user may give as `name=value`, with the values allowed."""


def inductor_options(level: CpuLevel, flags: Sequence[str]) -> dict[str, Any]:
    """Inductor's options for a level and the config's `toolchain.flags`.

    Raises `ConfigError` for a flag that is none.
    """
    return {
        **_FIXED,
        **_user_options(flags),
        "cpp.march": level.march,
        "cpp.simdlen": {"avx2": 256, "avx512": 512}[level.vector_class],
    }


def canonical_flags(level: CpuLevel, flags: Sequence[str]) -> tuple[str, ...]:
    """The same options as they enter recipes: `name=value`, sorted, and the vector class."""
    options = inductor_options(level, flags) | {"vector_class": level.vector_class}
    return tuple(f"{name}={options[name]}" for name in sorted(options))


def _user_options(flags: Sequence[str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for flag in flags:
        name, _, value = flag.removeprefix("--").partition("=")
        if name not in _SETTABLE:
            raise _bad_flag(flag, f"allowed names: {', '.join(_SETTABLE)}")
        if value.lower() not in _SETTABLE[name]:
            raise _bad_flag(flag, f"allowed values of {name}: {', '.join(_SETTABLE[name])}")
        if name in options:
            raise _bad_flag(flag, f"{name} is given twice")
        options[name] = _SETTABLE[name][value.lower()]
    return options


def _bad_flag(flag: str, why: str) -> ConfigError:
    return ConfigError(
        f"the inductor toolchain cannot take the flag {flag!r}: {why}",
        field="toolchain.flags",
        value=flag,
        hint="write flags as name=value",
    )
