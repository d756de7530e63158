"""What the neuronx toolchain does not build, and where it cannot; nothing of Neuron's needed to say it."""

from __future__ import annotations

import os

from neffbuild.config.build import BuildConfig
from neffbuild.config.errors import ConfigError
from neffbuild.grid.phases import Phase, served_phases
from neffbuild.grid.shapes import DecodeShape, Shape
from neffbuild.toolchain.neuronx.engine_config import CPU_MODE, start_refusal, starts_engine
from neffbuild.toolchain.neuronx.identity import neuronx_identity
from neffbuild.toolchain.neuronx.routes import (
    COMPILER,
    NATIVE,
    OF_REFERENCE_DECODER,
    TORCH_NEURONX,
    Route,
    route_of,
)
from neffbuild.toolchain.neuronx.versions import (
    compiler_path,
    installed_versions,
    planned_versions,
    version_mismatches,
)
from neffbuild.toolchain.reference import decoder_refusal

_CHIPS_OF_TORCH_NEURONX = ("trn2", "trn3")
"""By its release notes."""


def config_refusal(config: BuildConfig) -> str | None:
    """Why no unit of the config can be built on any host."""
    try:
        identity, route = neuronx_identity(config), route_of(config.toolchain, os.environ)
        if route.engine == TORCH_NEURONX and (reason := _target_refusal(identity.target)):
            return reason
        return graph_refusal(config, route)
    except ConfigError as error:
        return error.message


def shape_refusal(config: BuildConfig, shape: Shape) -> str | None:
    """Why one shape of a config that can be built cannot."""
    if config.toolchain.engine in OF_REFERENCE_DECODER and not isinstance(shape, DecodeShape):
        return f"the reference decoder has decode steps only, {shape.bucket_name} is a {shape.family} one"
    return None


def host_refusal(config: BuildConfig) -> str | None:
    """Why this host cannot compile what it might plan."""
    identity = neuronx_identity(config)
    route = route_of(config.toolchain, os.environ)
    if compiler_path() is None:
        return f"{COMPILER} is not on PATH"
    if route.engine == TORCH_NEURONX and not installed_versions([TORCH_NEURONX]):
        return (
            f"{TORCH_NEURONX} is not installed here, and toolchain.engine is {TORCH_NEURONX}: install the "
            "version that is planned, from Neuron's package repository"
        )
    starts = starts_engine(config, route)
    if starts and os.environ.get(CPU_MODE):
        return f"{CPU_MODE} is set, and excludes the CPU compile of vLLM Neuron: unset it"
    if mismatches := version_mismatches(identity.versions, route.tools if starts else route.here):
        return f"this host is not what the plan was made for: {'; '.join(mismatches)}"
    return "; ".join(identity.unresolved) or None


def graph_refusal(config: BuildConfig, route: Route) -> str | None:
    """Why there are no graphs of the config's to compile."""
    if route.engine in OF_REFERENCE_DECODER:
        return _reference_refusal(config, route)
    if route.name == NATIVE or starts_engine(config, route):
        return start_refusal(config, route, planned_versions(config.toolchain, route))
    return None


def _reference_refusal(config: BuildConfig, route: Route) -> str | None:
    if reason := decoder_refusal(config):
        return reason
    if config.toolchain.hlo_dir is not None:
        return (
            "toolchain.hlo_dir holds graphs of vLLM Neuron's, and toolchain.engine is "
            f"{route.engine}: leave one of them out"
        )
    if Phase.PREFILL in served_phases(config, prefill_programs=True):
        return "the reference decoder has no prefill programs: set toolchain.phases to decode"
    return None


def _target_refusal(target: str) -> str | None:
    chip = target.partition("+")[0]
    if chip in _CHIPS_OF_TORCH_NEURONX:
        return None
    allowed = " and ".join(_CHIPS_OF_TORCH_NEURONX)
    return f"{TORCH_NEURONX} compiles for {allowed} only, and toolchain.target is {chip}"
