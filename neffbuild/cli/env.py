"""`neffbuild env`: the environment in which an engine serves from its filled cache and compiles nothing."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from neffbuild.cli import layouts, options, output
from neffbuild.config.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Container

    from neffbuild.cache.layouts.filled import Filled
    from neffbuild.cache.layouts.serving_environment import Setting
    from neffbuild.config.build import BuildConfig

_SHOWN = 20


@click.command(name="env")
@options.config_arguments
@click.option(
    "--root",
    type=layouts.Folder(),
    metavar="DIR",
    help="The engine's VLLM_CACHE_ROOT, or its compile cache DIR/neuron/compile_cache; it is checked.",
)
@click.option(
    "--plugin-version",
    metavar="VERSION",
    help="Version of vLLM Neuron (default: what the config pins, or the last one known for the route).",
)
@options.cache_option
@options.json_option
def command(
    words: tuple[str, ...],
    root: Path | None,
    plugin_version: str | None,
    cache: Path | None,
    as_json: bool,
) -> int:
    """The variables with which vLLM Neuron serves CONFIG strictly, as lines for a shell.

    \b
    neffbuild env my.yaml --root /opt/vllm-cache > serve.env && . ./serve.env

    With --root, the cache there is compared with what the local cache has for CONFIG: what is missing is
    named on stderr, and the exit status is 1. Fill it first: `neffbuild pull URL --tag T --layout vllm-neuron
    --into DIR/neuron/compile_cache`.
    """
    from neffbuild.cache.layouts.engine_root import BELOW, vllm_neuron_cache_root
    from neffbuild.cache.layouts.serving_environment import (
        NATIVE,
        serving_environment,
        settled_version,
    )
    from neffbuild.toolchain.neuronx.command import stated_flags
    from neffbuild.toolchain.neuronx.flags import canonical_flags

    config = options.only_config(words, cache)
    _require_neuron(config)
    flags = [str(flag) for flag in canonical_flags(stated_flags(config, os.environ))]
    route = config.toolchain.route or NATIVE
    version = plugin_version or settled_version(route, config.toolchain.versions)
    cache_root = _printable(
        (vllm_neuron_cache_root(os.environ) if root is None else _cache_root(root)).absolute()
    )
    settings = serving_environment(route=route, version=version, root=cache_root, flags=flags)
    settings += _keyed(config, {one.name for one in settings})
    checked = None if root is None else _check(config, cache_root / BELOW)
    if as_json:
        document = {
            "schema": "neffbuild.env/1",
            "config": config.source,
            "route": route,
            "plugin_version": version,
            "cache_root": str(cache_root),
            "compile_cache": str(cache_root / BELOW),
            "settings": [one.document() for one in settings],
            "check": None if checked is None else _check_document(*checked),
        }
        output.print_json(document)
    else:
        output.write(_text(route, version, settings))
        if checked is not None:
            _remark(*checked, cache_root / BELOW)
    return 0 if checked is None or checked[0].ready else 1


def _require_neuron(config: BuildConfig) -> None:
    from neffbuild.toolchain.neuronx.routes import TORCH_NEURONX, VLLM_NEURON

    name = config.toolchain.name
    if name != "neuronx":
        raise ConfigError(
            f"{config.source} is for the toolchain {name}; these variables are vLLM Neuron's",
            field="toolchain.name",
            value=name,
            hint="set toolchain.name to neuronx; other engines are told with NEFFBUILD_MANIFEST and "
            "NEFFBUILD_STRICT",
        )
    engine = config.toolchain.engine
    if engine not in (None, VLLM_NEURON):
        raise ConfigError(
            f"{config.source} is for the engine {engine}; these variables are vLLM Neuron's",
            field="toolchain.engine",
            value=engine,
            hint="TorchNeuron finds what `neffbuild pull --layout torch-neuronx --into DIR` has written with "
            "TORCH_NEURONX_NEFF_CACHE_DIR=DIR"
            if engine == TORCH_NEURONX
            else "only vLLM Neuron keeps a cache of its own for it",
        )


def _keyed(config: BuildConfig, set_already: Container[str]) -> tuple[Setting, ...]:
    """What this shell sets of what may change a graph."""
    from neffbuild.cache.layouts.serving_environment import Setting
    from neffbuild.toolchain.neuronx.routes import keyed_environment, route_of

    why = "set where this was written, and in the keys: the engine traces other graphs without it"
    keyed = keyed_environment(route_of(config.toolchain, os.environ), os.environ)
    return tuple(
        Setting(name, keyed[name], why) for name in sorted(keyed) if name not in set_already
    )


def _cache_root(root: Path) -> Path:
    from neffbuild.cache.layouts.engine_root import BELOW

    parts = len(BELOW.parts)
    return Path(*root.parts[:-parts]) if root.parts[-parts:] == BELOW.parts else root


def _printable(path: Path) -> Path:
    # A line break in a comment would start a line of the shell's.
    if not str(path).isprintable():
        raise ConfigError(
            f"the path {str(path)!r} holds what cannot be printed",
            field="--root",
            value=str(path),
        )
    return path


def _check(config: BuildConfig, compile_cache: Path) -> tuple[Filled, str | None]:
    """How far the cache is filled, and with the entries of which manifest it was compared."""
    from neffbuild.cache.catalog import read_manifest
    from neffbuild.cache.layouts.candidates import places_of
    from neffbuild.cache.layouts.filled import filled
    from neffbuild.cache.layouts.vllm_neuron import VllmNeuron
    from neffbuild.cache.recipe import config_digest
    from neffbuild.cache.records import read_pointer

    store = options.local_store(config)
    digest = read_pointer(store, config_digest(config))
    manifest = read_manifest(store, digest) if digest else None
    layout = VllmNeuron()
    entries = manifest.entries if manifest and places_of(layout, manifest.entries) else None
    return filled(layout, compile_cache, entries), digest if entries else None


def _check_document(checked: Filled, manifest: str | None) -> dict[str, Any]:
    return {
        "ready": checked.ready,
        "manifest": manifest,
        "hits": checked.hits,
        "lacking": [one.document() for one in checked.lacking],
    }


def _text(route: str, version: str, settings: tuple[Setting, ...]) -> str:
    lines = [
        f"# vLLM Neuron {version}, route {route}: serve from the cache, compile nothing.",
        "# From its published documentation; not run on a Neuron device.",
    ]
    for one in settings:
        mark = "" if one.verified else "unverified: "
        lines.append(f"# {mark}{one.why}")
        lines.append(
            f"unset {one.name}"
            if one.value is None
            else f"export {one.name}={shlex.quote(one.value)}"
        )
    return "\n".join(lines)


def _remark(checked: Filled, manifest: str | None, compile_cache: Path) -> None:
    against = f"what manifest {manifest[:12]} has" if manifest else "no manifest"
    for one in checked.lacking[:_SHOWN]:
        output.remark(f"neffbuild: {one.place}: {one.state.value}, {one.reason}")
    if len(checked.lacking) > _SHOWN:
        output.remark(f"neffbuild: … and {len(checked.lacking) - _SHOWN} more (--json lists them)")
    if checked.ready:
        output.remark(
            f"neffbuild: {compile_cache} holds {checked.hits} hits, compared with {against}"
        )
    else:
        output.remark(
            f"neffbuild: {compile_cache} is not filled: {checked.hits} hits, {len(checked.lacking)} lacking, "
            f"compared with {against}; fill it before the engine starts: neffbuild pull URL --tag T "
            f"--layout vllm-neuron --into {shlex.quote(str(compile_cache))}"
        )
