"""The whole of what one neffbuild command works from: serve config, architectures, own sections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from neffbuild.config.model import ModelConfig
from neffbuild.config.serve import ServeConfig


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ToolchainConfig(_Section):
    """`toolchain:` which compiler, for what, and the exact versions where this machine lacks it."""

    name: str = "inductor"
    target: str | None = None
    route: str | None = None
    engine: str | None = None
    versions: dict[str, str] = Field(default_factory=dict)
    flags: tuple[str, ...] = ()


class RemoteConfig(_Section):
    """One remote tier."""

    url: str
    mode: Literal["rw", "ro"] = "rw"


class CacheConfig(_Section):
    """`cache:` where artifacts are kept and whom to believe."""

    name: str = "default"
    local: str | None = None
    remotes: tuple[RemoteConfig, ...] = ()
    keys: tuple[str, ...] = ()
    require_signature: bool = False
    min_sequence: int = Field(default=0, ge=0)


class FarmConfig(_Section):
    """`farm:` how compiles run. `timeout` in seconds per unit, `memory` in bytes per unit."""

    executor: Literal["local", "ray"] = "local"
    workers: int | None = Field(default=None, ge=1)
    timeout: float | None = Field(default=None, gt=0)
    retries: int = Field(default=0, ge=0)
    memory: int | None = Field(default=None, gt=0)


@dataclass(frozen=True, slots=True)
class BuildConfig:
    """A loaded configuration.

    `source` names the file (or command line) for messages; `notes` are normalisations a user should
    hear about (a numeric string turned into a number, a default that was assumed).
    """

    source: str
    serve: ServeConfig
    model: ModelConfig
    draft_model: ModelConfig | None = None
    toolchain: ToolchainConfig = ToolchainConfig()
    cache: CacheConfig = CacheConfig()
    farm: FarmConfig = FarmConfig()
    notes: tuple[str, ...] = ()
