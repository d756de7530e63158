"""What the torch.compile backend works from: `torch.compile(options={…})`, else the environment.

- `strict`, or `NEFFBUILD_STRICT` (`1` or `0`): a program that is not stored is an error, never a compile.
- `manifest`, or `NEFFBUILD_MANIFEST`: the digest of a manifest in the cache, the path of a manifest's
  file, or what vLLM's plugin hydrates (`s3://bucket/prefix#llama:prod`). Default: every manifest that was
  compiled or pulled into the cache.
- `cache`, or `NEFFBUILD_CACHE`: the directory of the local store.
- `target` and `flags`: as in a config's `toolchain` section.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from neffbuild.cache.canonical import is_digest
from neffbuild.cache.catalog import manifest_name, read_addressed
from neffbuild.cache.directory import DirectoryStore
from neffbuild.cache.manifest import Manifest
from neffbuild.cache.records import read_pointers
from neffbuild.cache.reference import Reference
from neffbuild.config.build import CacheConfig, ToolchainConfig, cache_directory, local_directory
from neffbuild.config.errors import ConfigError, IntegrityError
from neffbuild.runtime.hydration import inherited

OPTIONS = ("strict", "manifest", "cache", "target", "flags")
_log = logging.getLogger(__name__)
_SWITCH = {"1": True, "0": False, "": False}


@dataclass(frozen=True, slots=True)
class BackendSettings:
    """`manifests` in the order they are looked up."""

    strict: bool
    toolchain: ToolchainConfig
    store: DirectoryStore
    manifests: tuple[Manifest, ...]


def backend_settings(options: Mapping[str, Any], environment: Mapping[str, str]) -> BackendSettings:
    """Raises `ConfigError` for an unknown option, a bad value or a manifest that is not there, and
    `IntegrityError` for a damaged one."""
    for name in options:
        if name not in OPTIONS:
            near = difflib.get_close_matches(name, OPTIONS, n=1)
            raise ConfigError(
                f"the neffbuild backend has no option {name!r}; allowed: {', '.join(OPTIONS)}",
                field=f"options.{name}",
                value=options[name],
                hint=f"did you mean {near[0]!r}?" if near else None,
            )
    cache = _path(options, "cache")
    store = DirectoryStore(cache or cache_directory(CacheConfig()))
    named = options.get("manifest", environment.get("NEFFBUILD_MANIFEST"))
    if named and Reference.parse(str(named)) is not None:
        named = _hydrated_manifest(str(named), environment)
    manifests = [_named_manifest(store, str(named))] if named else _stored_manifests(store)
    return BackendSettings(
        strict=_strict(options, environment),
        toolchain=_toolchain(options),
        store=store,
        manifests=tuple(manifests),
    )


def _strict(options: Mapping[str, Any], environment: Mapping[str, str]) -> bool:
    if "strict" in options:
        strict = options["strict"]
        if not isinstance(strict, bool):
            raise ConfigError(
                f"the option strict is {strict!r}; allowed: True, False",
                field="options.strict",
                value=strict,
            )
        return strict
    text = environment.get("NEFFBUILD_STRICT", "")
    if text not in _SWITCH:
        raise ConfigError(
            f"NEFFBUILD_STRICT is {text!r}; allowed: 1, 0", field="NEFFBUILD_STRICT", value=text
        )
    return _SWITCH[text]


def _toolchain(options: Mapping[str, Any]) -> ToolchainConfig:
    flags = options.get("flags", ())
    try:
        return ToolchainConfig(
            target=options.get("target"),
            flags=tuple(flags) if isinstance(flags, list) else flags,
        )
    except ValidationError as error:
        [first, *_] = error.errors()
        name = str(first["loc"][0])
        allowed = "a list of name=value strings" if name == "flags" else "a target's name"
        raise ConfigError(
            f"the option {name} is {options[name]!r}; allowed: {allowed}",
            field=f"options.{name}",
            value=options[name],
        ) from error


def _path(options: Mapping[str, Any], name: str) -> Path | None:
    value = options.get(name)
    if value is None:
        return None
    if not isinstance(value, str | Path):
        raise ConfigError(
            f"the option {name} is {value!r}; allowed: a path",
            field=f"options.{name}",
            value=value,
        )
    return local_directory(str(value), Path.cwd(), f"options.{name}")


def _named_manifest(store: DirectoryStore, reference: str) -> Manifest:
    if is_digest(reference):
        manifest = _stored_manifest(store, reference)
        if manifest is not None:
            return manifest
        where = f"is not in {store.url}"
    else:
        try:
            return _parsed(Path(reference).read_bytes())
        except OSError as error:
            where = f"cannot be read: {error.strerror}"
    raise ConfigError(
        f"the manifest {reference} {where}",
        field="NEFFBUILD_MANIFEST",
        value=reference,
        hint="give the digest of a manifest in the local cache, or the path of a manifest's file",
    )


def _hydrated_manifest(reference: str, environment: Mapping[str, str]) -> str | None:
    """The digest of the manifest that vLLM's plugin hydrated; None where it could not and the engine
    was to start all the same."""
    hydration = inherited(environment)
    if hydration is None or hydration.reference != reference:
        raise ConfigError(
            f"NEFFBUILD_MANIFEST is {reference!r}, and nothing was pulled from there for this process",
            field="NEFFBUILD_MANIFEST",
            value=reference,
            hint="only vLLM's plugin pulls; elsewhere `neffbuild pull URL --tag NAME:TAG` first, then "
            "give the manifest's digest or leave the variable out",
        )
    return hydration.manifest


def _stored_manifests(store: DirectoryStore) -> Iterator[Manifest]:
    for digest in read_pointers(store):
        try:
            manifest = _stored_manifest(store, digest)
        except IntegrityError as error:
            # Nobody asked for this one; what it names is a miss.
            _log.warning("ignoring a manifest in %s: %s", store.url, error)
            continue
        if manifest is not None:
            yield manifest


def _stored_manifest(store: DirectoryStore, digest: str) -> Manifest | None:
    data = read_addressed(store, manifest_name(digest))
    return None if data is None else _parsed(data)


@lru_cache(maxsize=16)
def _parsed(data: bytes) -> Manifest:
    """A process asks for the same manifests once per graph."""
    return Manifest.from_json(data)
