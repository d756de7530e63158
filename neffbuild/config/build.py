"""The whole of what one neffbuild command works from: serve config, architectures, own sections."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator
from pydantic_core import PydanticCustomError

from neffbuild.config.errors import ConfigError
from neffbuild.config.model import ModelConfig
from neffbuild.config.serve import ServeConfig

# Also as a path has it once it was taken for one: with a single slash. Not a drive of one letter.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")

_NonEmpty = Annotated[str, StringConstraints(min_length=1)]


class _Section(BaseModel):
    # Strict: a version written without quotes (2.10) must not silently become another one (2.1).
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ToolchainConfig(_Section):
    """`toolchain:` which compiler, for what, and the exact versions where this machine lacks it.

    `phases` says which steps the worker has programs for where its role in KV transfer does not, or
    other ones than its role says. `hlo_dir` is a folder of captured graphs, for a toolchain and route that
    take them from there.
    """

    name: _NonEmpty = "inductor"
    target: _NonEmpty | None = None
    route: _NonEmpty | None = None
    engine: _NonEmpty | None = None
    versions: dict[str, _NonEmpty] = Field(default_factory=dict)
    flags: tuple[_NonEmpty, ...] = ()
    phases: Literal["decode", "prefill", "both"] | None = None
    hlo_dir: _NonEmpty | None = None


class RemoteConfig(_Section):
    """One remote tier. A `url` without a scheme is a directory."""

    url: _NonEmpty
    mode: Literal["rw", "ro"] = "rw"


class CacheConfig(_Section):
    """`cache:` where artifacts are kept and whom to believe.

    `name` is the default NAME of `NAME:TAG`: letters, digits, `.`, `_` and `-`. `keys` are files of
    public keys; `require_signature` is true by default where there are any.
    """

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")] = (
        "default"
    )
    local: _NonEmpty | None = None
    remotes: tuple[RemoteConfig, ...] = ()
    keys: tuple[_NonEmpty, ...] = ()
    require_signature: bool | None = None
    min_sequence: int = Field(default=0, ge=0)

    @property
    def signature_required(self) -> bool:
        """`require_signature`, with its default."""
        return bool(self.keys) if self.require_signature is None else self.require_signature


class FarmConfig(_Section):
    """`farm:` how compiles run. `workers` is the most units at once, by default (`auto`) as many as fit.
    `timeout` in seconds per unit; `memory` in bytes per unit, both reserved for it and its limit;
    `cpus` reserved per unit. Units together reserve up to `memory_fraction` of the host's memory, and
    of its free scratch space. `retries` bounds how often a unit is tried again in a run; after a failure
    nothing more is started where `fail_fast` is set.

    For the executor `ray`: `address` of the cluster (`auto`: `$RAY_ADDRESS`, else the one this machine is
    a node of); `resources`, what each unit asks for beside or instead of what the farm works out (Ray's
    names; `memory` in bytes); `node_wait`, for how many seconds a unit that no node could hold waits
    for one to join.
    """

    executor: Literal["local", "ray"] = "local"
    workers: int | Literal["auto"] | None = None
    timeout: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    retries: int = Field(default=2, ge=0)
    memory: int | None = Field(default=None, gt=0)
    memory_fraction: float = Field(default=0.9, gt=0, le=1)
    cpus: int = Field(default=1, ge=1)
    fail_fast: bool = False
    address: _NonEmpty = "auto"
    resources: dict[_NonEmpty, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(
        default_factory=dict
    )
    node_wait: float = Field(default=0.0, ge=0, allow_inf_nan=False)

    @field_validator("workers", mode="plain")
    @classmethod
    def _check_workers(cls, value: object) -> object:
        if value is None or value == "auto" or (type(value) is int and value >= 1):
            return value
        raise PydanticCustomError("workers", "auto, or an integer of at least 1")


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
    toolchain: ToolchainConfig = field(default_factory=ToolchainConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    farm: FarmConfig = field(default_factory=FarmConfig)
    notes: tuple[str, ...] = ()


def cache_directory(cache: CacheConfig) -> Path:
    """Where local artifacts are kept: `cache.local`, else `$NEFFBUILD_CACHE`, else
    `$XDG_CACHE_HOME/neffbuild`, else `~/.cache/neffbuild`. Raises as `local_directory` does."""
    for place, below, name in (
        (cache.local, "", "cache.local"),
        (os.environ.get("NEFFBUILD_CACHE"), "", "NEFFBUILD_CACHE"),
        (os.environ.get("XDG_CACHE_HOME"), "neffbuild", "XDG_CACHE_HOME"),
    ):
        if place:
            return local_directory(place, Path.cwd(), name) / below
    return Path.home() / ".cache" / "neffbuild"


def local_directory(text: str, base: Path, field: str) -> Path:
    """`expanded_path` of a directory for local artifacts that was given as `field`.

    Raises `ConfigError` for a URL too: as a path it would be a folder `s3:` in the working directory.
    """
    if _URL.match(os.path.expandvars(text)):
        raise ConfigError(
            f"{field} is {text!r}, a URL; a local cache is a directory",
            field=field,
            value=text,
            hint="name a directory, and put a URL into cache.remotes",
        )
    return expanded_path(text, base)


def expanded_path(text: str, base: Path) -> Path:
    """`text` as a path, `~` and `$VARIABLES` expanded, relative to `base`.

    Raises `ConfigError` for the home of a user there is not.
    """
    try:
        return base / Path(os.path.expandvars(text)).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"the path {text!r} cannot be expanded: {error}",
            value=text,
            hint="`~NAME` is the home directory of user NAME",
        ) from error
