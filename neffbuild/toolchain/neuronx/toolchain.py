"""The neuronx toolchain: what `neffbuild.toolchain.base.Toolchain` asks for, each by its own module.

Importing this imports no torch; capturing the reference decoder does.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from neffbuild.cache.index import Fit
from neffbuild.cache.problem import FileCheck
from neffbuild.cache.recipe import ToolchainIdentity
from neffbuild.config.build import BuildConfig
from neffbuild.config.errors import ToolchainRefusal
from neffbuild.config.neuron_engine import neuron_prefill
from neffbuild.grid.bucketer import QueryLenSupport
from neffbuild.grid.shapes import Shape
from neffbuild.grid.windows import tile_columns
from neffbuild.toolchain.base import (
    Artifact,
    Capabilities,
    Captured,
    Executable,
    Expectation,
    Finding,
    KVGroup,
    Unit,
)
from neffbuild.toolchain.neuronx.command import compile_command, stated_flags
from neffbuild.toolchain.neuronx.engine_config import device_need, start_of, starts_engine
from neffbuild.toolchain.neuronx.hlo import capture_hlo, filed_digest
from neffbuild.toolchain.neuronx.hosts import host_fit, neuronx_findings, runtime_refusal
from neffbuild.toolchain.neuronx.identity import NAME, neuronx_identity
from neffbuild.toolchain.neuronx.neff import neff_fault
from neffbuild.toolchain.neuronx.prior import neuronx_prior
from neffbuild.toolchain.neuronx.refusal import (
    config_refusal,
    graph_refusal,
    host_refusal,
    shape_refusal,
)
from neffbuild.toolchain.neuronx.routes import (
    COMPILER,
    REFERENCE,
    TORCH_NEURONX,
    Route,
    route_of,
)
from neffbuild.toolchain.neuronx.versions import compiler_path, version_mismatches


class NeuronxToolchain:
    """neuronx-cc, for Trainium and Inferentia chips, by either of its routes.

    `UNIFORM`, because vLLM Neuron's programs have one query length for all rows, and near the limit of
    the context it strips the drafts of a whole group. Full attention and sliding windows are what it
    trims block tables for. Its collectives name global ranks. neuronx-cc compiles anywhere; what vLLM
    Neuron captures on a device only needs one.
    """

    name = NAME
    capabilities = Capabilities(
        query_len_support=QueryLenSupport.UNIFORM,
        kv_groups=frozenset({KVGroup.FULL, KVGroup.SLIDING_WINDOW}),
        window_columns=tile_columns,
        prefill=neuron_prefill,
        replica_groups=True,
        together=lambda config, shape: start_of(
            config, shape, route_of(config.toolchain, os.environ)
        ),
        filed_graph=filed_digest,
        device_for=lambda config, _: device_need(config, route_of(config.toolchain, os.environ)),
    )
    file_checks: Mapping[str, FileCheck] = MappingProxyType({".neff": neff_fault})
    preload: tuple[str, ...] = ("neffbuild.toolchain.neuronx.preload",)

    def identity(self, config: BuildConfig) -> ToolchainIdentity:
        return neuronx_identity(config)

    def refusal(self, config: BuildConfig, shape: Shape | None = None) -> str | None:
        return config_refusal(config) or (shape_refusal(config, shape) if shape else None)

    def host_refusal(self, config: BuildConfig) -> str | None:
        return host_refusal(config)

    def fit(self, platform: Mapping[str, Any]) -> Fit:
        return host_fit(platform)

    def findings(self) -> list[Finding]:
        return neuronx_findings()

    def prior(self, config: BuildConfig, shape: Shape) -> Expectation:
        return neuronx_prior(config, shape)

    def beside(self, unit: Unit) -> Sequence[str]:
        if not starts_engine(unit.config, _route(unit)):
            return ()
        from neffbuild.toolchain.neuronx.engine_capture import row_keys, row_units

        return row_keys(unit, row_units(unit, self.capabilities))

    def capture(self, unit: Unit) -> Captured:
        # Not `refusal`: what the plan was made with is not all in a worker's environment.
        route = _route(unit)
        reason = graph_refusal(unit.config, route) or shape_refusal(unit.config, unit.shape)
        if reason:
            raise ToolchainRefusal(reason)
        if route.engine == REFERENCE:
            from neffbuild.toolchain.neuronx import stablehlo

            return stablehlo.capture(unit)
        if route.engine == TORCH_NEURONX or starts_engine(unit.config, route):
            # One start captures and compiles: `compile` hears which graph it was.
            return Captured("", None)
        return capture_hlo(unit)

    def compile(
        self, unit: Unit, captured: Captured, scratch: Path, *, shared: Path | None = None
    ) -> Artifact:
        recipe, route = unit.recipe["toolchain"], _route(unit)
        starts = starts_engine(unit.config, route)
        compiler = compiler_path()
        if compiler is None:
            raise ToolchainRefusal(f"{COMPILER} is not on PATH", hint="run `neffbuild doctor`")
        # In the recipe is what the plan was made with; nothing is built under its key by another.
        if mismatches := version_mismatches(
            recipe["versions"], route.tools if starts else route.here
        ):
            raise ToolchainRefusal(
                f"this host is not what the unit's recipe says: {'; '.join(mismatches)}",
                hint="compile where the plan was made for, or plan again",
            )
        if starts:
            from neffbuild.toolchain.neuronx.engine_capture import build, make_start

            return build(make_start(unit, self.capabilities), scratch, shared)
        if route.engine == TORCH_NEURONX:
            from neffbuild.toolchain.neuronx import torch_neuronx

            return torch_neuronx.build(unit, scratch)
        from neffbuild.toolchain.neuronx.compile import compile_module

        command = compile_command(route, recipe, stated_flags(unit.config, os.environ))
        return compile_module(captured.graph.module, route, command, compiler, scratch)

    def load(self, files: Path, recipe: Mapping[str, Any]) -> Executable:
        raise ToolchainRefusal(
            runtime_refusal(), hint="`neffbuild verify` checks artifacts without running them"
        )


def _route(unit: Unit) -> Route:
    return route_of(unit.config.toolchain, os.environ)
