"""What the inductor toolchain does not build, and why; no torch needed to say it."""

from __future__ import annotations

import platform

from neffbuild.config.build import BuildConfig
from neffbuild.config.errors import ConfigError
from neffbuild.grid.shapes import DecodeShape, Shape, SymbolicShape
from neffbuild.toolchain.inductor.engines import VLLM
from neffbuild.toolchain.inductor.identity import (
    inductor_identity,
    planned_versions,
    version_mismatches,
)
from neffbuild.toolchain.inductor.vllm_engine import engine_refusal, kernels_refusal
from neffbuild.toolchain.reference import decoder_refusal


def config_refusal(config: BuildConfig) -> str | None:
    """Why no unit of the config can be built on any host."""
    if config.toolchain.engine == VLLM:
        return engine_refusal(config)
    if reason := decoder_refusal(config):
        return reason
    try:
        inductor_identity(config)
    except ConfigError as error:
        return error.message
    return None


def shape_refusal(shape: Shape) -> str | None:
    """Why one shape of a config that can be built cannot."""
    if isinstance(shape, SymbolicShape):
        return None
    if not isinstance(shape, DecodeShape):
        return f"inductor builds decode programs only, {shape.bucket_name} is a {shape.family} one"
    return None


def host_refusal(config: BuildConfig) -> str | None:
    """Why this host cannot compile what it might plan."""
    if platform.machine() != "x86_64":
        return f"inductor targets are x86-64 and this host is {platform.machine()}"
    if mismatches := version_mismatches(planned_versions(config.toolchain)):
        return f"this host is not what the plan was made for: {'; '.join(mismatches)}"
    if unresolved := inductor_identity(config).unresolved:
        return "; ".join(unresolved)
    return kernels_refusal(config) if config.toolchain.engine == VLLM else None
