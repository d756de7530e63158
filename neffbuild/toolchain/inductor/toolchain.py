"""The inductor toolchain: what `neffbuild.toolchain.base.Toolchain` asks for, each by its own module.

Importing this imports no torch; capture, compile and load do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neffbuild.cache.index import Fit
from neffbuild.cache.recipe import ToolchainIdentity
from neffbuild.config.build import BuildConfig
from neffbuild.config.errors import ToolchainRefusal
from neffbuild.grid.bucketer import QueryLenSupport
from neffbuild.grid.shapes import DecodeShape, Shape
from neffbuild.toolchain.base import (
    ENGINE_FILES,
    Artifact,
    Capabilities,
    Captured,
    Expectation,
    Finding,
    KVGroup,
    Unit,
)
from neffbuild.toolchain.inductor.cpu_level import cpu_level
from neffbuild.toolchain.inductor.engines import target_level
from neffbuild.toolchain.inductor.findings import inductor_findings
from neffbuild.toolchain.inductor.fit import host_fit
from neffbuild.toolchain.inductor.identity import NAME, inductor_identity
from neffbuild.toolchain.inductor.prior import inductor_prior
from neffbuild.toolchain.inductor.refusal import config_refusal, host_refusal, shape_refusal

if TYPE_CHECKING:
    from neffbuild.toolchain.inductor.executable import Executable


class InductorToolchain:
    """AOTInductor for x86-64 CPUs, compiling the reference model or what vLLM captures."""

    name = NAME
    capabilities = Capabilities(
        query_len_support=QueryLenSupport.VARLEN,
        kv_groups=frozenset({KVGroup.FULL, KVGroup.SLIDING_WINDOW}),
    )
    preload: tuple[str, ...] = ("neffbuild.toolchain.inductor.preload",)

    def identity(self, config: BuildConfig) -> ToolchainIdentity:
        return inductor_identity(config)

    def refusal(self, config: BuildConfig, shape: Shape | None = None) -> str | None:
        return config_refusal(config) or (shape_refusal(shape) if shape else None)

    def host_refusal(self, config: BuildConfig) -> str | None:
        return host_refusal(config)

    def fit(self, platform: Mapping[str, Any]) -> Fit:
        return host_fit(platform)

    def findings(self) -> list[Finding]:
        return inductor_findings()

    def prior(self, config: BuildConfig, shape: Shape) -> Expectation:
        return inductor_prior(config, shape)

    def capture(self, unit: Unit) -> Captured:
        if reason := self.refusal(unit.config, unit.shape):
            raise ToolchainRefusal(reason)
        if not isinstance(unit.shape, DecodeShape):
            from neffbuild.toolchain.inductor.vllm_capture import capture_engine

            return capture_engine(unit.config)
        from neffbuild.toolchain.inductor.capture import capture_unit

        return capture_unit(unit.config, unit.shape)

    def compile(
        self, unit: Unit, captured: Captured, scratch: Path, *, shared: Path | None = None
    ) -> Artifact:
        if reason := self.host_refusal(unit.config) or self._difference(unit):
            raise ToolchainRefusal(
                reason, hint="compile where the plan was made for, or plan again"
            )
        from neffbuild.toolchain.inductor.compile import compile_graph

        toolchain = unit.config.toolchain
        level = cpu_level(target_level(toolchain.target))
        # Headers are worth precompiling for many units, and a symbolic one is alone in its config.
        headers = shared if isinstance(unit.shape, DecodeShape) else None
        artifact = compile_graph(captured.graph, level, toolchain.flags, scratch, headers)
        return replace(artifact, files={**artifact.files, **_engine_files(captured, scratch)})

    def load(self, files: Path, recipe: Mapping[str, Any]) -> Executable:
        from neffbuild.toolchain.inductor.executable import load_executable

        return load_executable(files, recipe)

    def _difference(self, unit: Unit) -> str | None:
        """What this host would build instead of what the recipe says, or None."""
        planned, here = unit.recipe["toolchain"], self.identity(unit.config).document()
        differing = [name for name in here if planned.get(name) != here[name]]
        if not differing:
            return None
        name = differing[0]
        return (
            f"the unit's recipe says {name} {planned.get(name)!r}, this host would build "
            f"{here[name]!r}"
        )


def _engine_files(captured: Captured, scratch: Path) -> dict[str, Path]:
    """The engine's own files as files of the artifact."""
    files = {}
    for name, content in captured.engine_files.items():
        path = files[f"{ENGINE_FILES}/{name}"] = scratch / ENGINE_FILES / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return files
