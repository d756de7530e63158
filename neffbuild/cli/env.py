"""`neffbuild env`: the environment in which an engine serves from its filled cache and compiles nothing."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from neffbuild.cli import layouts, options, output

if TYPE_CHECKING:
    from neffbuild.cache.layouts.filled import Filled
    from neffbuild.cli.engine_env import Served
    from neffbuild.config.build import BuildConfig

_SHOWN = 20


@click.command(name="env")
@options.config_arguments
@click.option(
    "--root",
    type=layouts.Folder(),
    metavar="DIR",
    help="The engine's VLLM_CACHE_ROOT, or its compile cache DIR/neuron/compile_cache; of TorchNeuron its "
    "TORCH_NEURONX_NEFF_CACHE_DIR. It is checked.",
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
    """The variables with which vLLM Neuron serves CONFIG strictly, or TorchNeuron from its cache, as lines
    for a shell.

    \b
    neffbuild env my.yaml --root /opt/vllm-cache > serve.env && . ./serve.env

    With --root, the cache there is compared with what the local cache has for CONFIG: what is missing is
    named on stderr, and the exit status is 1. Fill it first: `neffbuild pull URL --tag T --layout vllm-neuron
    --into DIR/neuron/compile_cache`, of TorchNeuron `--layout torch-neuronx --into DIR`.
    """
    from neffbuild.cli.engine_env import served

    config = options.only_config(words, cache)
    engine = served(config, root, plugin_version)
    checked = None if root is None else _check(config, engine)
    if as_json:
        document = {
            "schema": "neffbuild.env/1",
            "config": config.source,
            "engine": engine.engine,
            "route": engine.route,
            "plugin_version": engine.plugin_version,
            "cache_root": str(engine.cache_root),
            "compile_cache": str(engine.compile_cache),
            "settings": [one.document() for one in engine.settings],
            "check": None if checked is None else _check_document(*checked),
        }
        output.print_json(document)
    else:
        output.write(_text(engine))
        if checked is not None:
            _remark(*checked, engine)
    return 0 if checked is None or checked[0].ready else 1


def _check(config: BuildConfig, engine: Served) -> tuple[Filled, str | None]:
    """How far the cache is filled, and with the entries of which manifest it was compared."""
    from neffbuild.cache.catalog import read_manifest
    from neffbuild.cache.layouts.candidates import places_of
    from neffbuild.cache.layouts.filled import filled
    from neffbuild.cache.recipe import config_digest
    from neffbuild.cache.records import read_pointer

    store = options.local_store(config)
    digest = read_pointer(store, config_digest(config))
    manifest = read_manifest(store, digest) if digest else None
    entries = manifest.entries if manifest and places_of(engine.layout, manifest.entries) else None
    return filled(engine.layout, engine.compile_cache, entries), digest if entries else None


def _check_document(checked: Filled, manifest: str | None) -> dict[str, Any]:
    return {
        "ready": checked.ready,
        "manifest": manifest,
        "hits": checked.hits,
        "lacking": [one.document() for one in checked.lacking],
    }


def _text(engine: Served) -> str:
    lines = [
        f"# {engine.heading}",
        "# From its published documentation; not run on a Neuron device.",
    ]
    for one in engine.settings:
        mark = "" if one.verified else "unverified: "
        lines.append(f"# {mark}{one.why}")
        lines.append(
            f"unset {one.name}"
            if one.value is None
            else f"export {one.name}={shlex.quote(one.value)}"
        )
    return "\n".join(lines)


def _remark(checked: Filled, manifest: str | None, engine: Served) -> None:
    against = f"what manifest {manifest[:12]} has" if manifest else "no manifest"
    place = engine.compile_cache
    for one in checked.lacking[:_SHOWN]:
        output.remark(f"neffbuild: {one.place}: {one.state.value}, {one.reason}")
    if len(checked.lacking) > _SHOWN:
        output.remark(f"neffbuild: … and {len(checked.lacking) - _SHOWN} more (--json lists them)")
    if checked.ready:
        output.remark(f"neffbuild: {place} holds {checked.hits} hits, compared with {against}")
    else:
        output.remark(
            f"neffbuild: {place} is not filled: {checked.hits} hits, {len(checked.lacking)} lacking, "
            f"compared with {against}; fill it before the engine starts: neffbuild pull URL --tag T "
            f"--layout {engine.layout.name} --into {shlex.quote(str(place))}"
        )
