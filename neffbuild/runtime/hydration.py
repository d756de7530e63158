"""What a hydration is told, and how it went, as the processes of one engine tell each other.

The first process of an engine hydrates; those it starts find in their environment how that went and
do nothing. A hydration is of one host: a process that inherits the environment on another one does
its own.
"""

from __future__ import annotations

import json
import math
import os
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from neffbuild.cache.reference import Reference
from neffbuild.config.errors import ConfigError

PASSED_ON = "NEFFBUILD_HYDRATION"
"""The variable in which a process tells those it starts. Nobody else sets it."""

DEFAULT_WAIT = 300.0
_LONGEST_WAIT = 86400.0
_SWITCH = {"1": True, "0": False, "": False}


@dataclass(frozen=True, slots=True)
class HydrationSettings:
    """`wait` in seconds, for everything together; `keys` are files of public keys, and signatures are
    required where there are any."""

    reference: Reference
    strict: bool
    wait: float
    keys: tuple[str, ...]
    min_sequence: int
    ready_file: Path | None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self | None:
        """The settings, or None where `NEFFBUILD_MANIFEST` is unset or names no store. Raises
        `ConfigError` naming the variable that is wrong."""
        reference = Reference.parse(environment.get("NEFFBUILD_MANIFEST", ""))
        if reference is None:
            return None
        return cls(
            reference=reference,
            strict=_switch("NEFFBUILD_STRICT", environment),
            wait=_wait("NEFFBUILD_HYDRATE_WAIT", environment),
            keys=_keys("NEFFBUILD_KEYS", environment),
            min_sequence=_whole("NEFFBUILD_MIN_SEQUENCE", environment),
            ready_file=_ready_file("NEFFBUILD_READY_FILE", environment),
        )


@dataclass(frozen=True, slots=True)
class Hydration:
    """How a hydration went. `manifest` is the digest of what is in the local cache now, None where it
    failed: then `cause` says why. `hits` are units that are stored, `misses` units of the plan that
    are not; `shared`: another process of this host did the work while this one waited."""

    reference: str
    host: str
    manifest: str | None = None
    cause: str | None = None
    seconds: float = 0.0
    blobs_copied: int = 0
    bytes_copied: int = 0
    hits: int = 0
    misses: int = 0
    shared: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises `ValueError` or `TypeError` for anything else than what `to_json` returns."""
        document = json.loads(text)
        if not isinstance(document, dict):
            raise TypeError(f"no JSON object: {text[:80]!r}")
        return cls(**document)


def inherited(environment: Mapping[str, str]) -> Hydration | None:
    """How the hydration of `NEFFBUILD_MANIFEST` went that a process above this one, on this host, did;
    None where there was none."""
    text = environment.get(PASSED_ON)
    if not text:
        return None
    try:
        hydration = Hydration.from_json(text)
    except (TypeError, ValueError):
        return None
    asked = environment.get("NEFFBUILD_MANIFEST")
    same = hydration.reference == asked and hydration.host == socket.gethostname()
    return hydration if same else None


def pass_on(hydration: Hydration, environment: MutableMapping[str, str]) -> None:
    """Tell the processes that inherit this environment."""
    environment[PASSED_ON] = hydration.to_json()


def _switch(name: str, environment: Mapping[str, str]) -> bool:
    text = environment.get(name, "")
    if text not in _SWITCH:
        raise _error(name, text, "1, 0")
    return _SWITCH[text]


def _keys(name: str, environment: Mapping[str, str]) -> tuple[str, ...]:
    text = environment.get(name)
    keys = tuple(part for part in (text or "").split(os.pathsep) if part)
    if text is not None and not keys:
        # An unset variable in its place must not mean that anybody is believed.
        raise _error(name, text, "files of public keys; leave it out where nothing is signed")
    return keys


def _ready_file(name: str, environment: Mapping[str, str]) -> Path | None:
    text = environment.get(name)
    if not text:
        return None
    path = Path(text)
    if not path.parent.is_dir() or (path.exists() and not path.is_file()):
        raise _error(name, text, "a file, there or not, in a folder that is there")
    return path


def _wait(name: str, environment: Mapping[str, str]) -> float:
    text = environment.get(name, "")
    if not text:
        return DEFAULT_WAIT
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= _LONGEST_WAIT:
        raise _error(name, text, f"seconds, above 0 and up to {_LONGEST_WAIT:g}")
    return seconds


def _whole(name: str, environment: Mapping[str, str]) -> int:
    text = environment.get(name, "")
    if not text:
        return 0
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise _error(name, text, "an integer of at least 0")
    return int(text)


def _error(name: str, text: str, allowed: str) -> ConfigError:
    return ConfigError(f"{name} is {text!r}; allowed: {allowed}", field=name, value=text)
