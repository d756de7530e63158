"""A toolchain whose artifacts take a moment to make, to write and to copy: something to be killed at."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from neffbuild.cache.canonical import digest_bytes, digest_document
from neffbuild.cache.index import Fit
from neffbuild.cache.recipe import ToolchainIdentity
from neffbuild.config.build import BuildConfig
from neffbuild.config.errors import ToolchainRefusal
from neffbuild.grid.bucketer import QueryLenSupport
from neffbuild.grid.shapes import Shape
from neffbuild.toolchain.base import (
    Artifact,
    Capabilities,
    Captured,
    Executable,
    Finding,
    KVGroup,
    Unit,
)

SIZES = {"program.bin": 400_000, "weights/layout.bin": 60_000, "notes.json": 100}
"""Bytes of each file, which do not compress."""


class BulkyToolchain:
    """See above."""

    name = "bulky"
    capabilities = Capabilities(QueryLenSupport.VARLEN, frozenset(KVGroup))
    preload: tuple[str, ...] = ()

    def identity(self, config: BuildConfig) -> ToolchainIdentity:
        return ToolchainIdentity(
            name=self.name,
            route="native",
            target="any",
            engine="none",
            versions={"bulky": "1.0"},
            flags=config.toolchain.flags,
            source_digest=digest_bytes(b""),
            environment={},
        )

    def refusal(self, config: BuildConfig, shape: Shape | None = None) -> str | None:
        return None

    def host_refusal(self, config: BuildConfig) -> str | None:
        return None

    def fit(self, platform: Mapping[str, Any]) -> Fit:
        return Fit(None)

    def findings(self) -> list[Finding]:
        return []

    def capture(self, unit: Unit) -> Captured:
        return Captured(digest_document(unit.shape.document()), None)

    def compile(
        self, unit: Unit, captured: Captured, scratch: Path, *, shared: Path | None = None
    ) -> Artifact:
        # As compilers do, in a program of their own.
        subprocess.run(["sleep", "0.05"], check=True)
        content = random.Random(unit.key)
        files = {name: scratch / name for name in SIZES}
        for name, path in files.items():
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content.randbytes(SIZES[name]))
        return Artifact(files, {"tool": "bulky"})

    def load(self, files: Path, recipe: Mapping[str, Any]) -> Executable:
        raise ToolchainRefusal("what this toolchain builds runs nowhere")
