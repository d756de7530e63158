"""`neffbuild replay`: decode steps through the dispatcher, and what they read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from neffbuild.cli import options, output

if TYPE_CHECKING:
    from neffbuild.config.build import BuildConfig


@click.command(name="replay")
@options.config_arguments
@options.cache_option
@click.option("--steps", type=click.IntRange(1, 1_000_000), default=200, show_default=True)
@click.option(
    "--execute", is_flag=True, help="Run the stored programs, in strict mode, with random weights."
)
@options.json_option
def command(
    words: tuple[str, ...], cache: Path | None, steps: int, execute: bool, as_json: bool
) -> int:
    """Take decode steps whose contexts grow across every bucket boundary of CONFIG.

    Prints which programs served them, where they changed over, and the KV bytes they read beside what
    the requests needed and what programs at max_model_len would have read.
    """
    from neffbuild.toolchain.planning import require_buckets
    from neffbuild.toolchain.registry import load_toolchain

    config = options.only_config(words, cache)
    require_buckets(config, load_toolchain(config.toolchain.name))
    document = _execute(config, steps) if execute else _simulate(config, steps)
    if as_json:
        output.print_json(document)
    else:
        output.write(_text(document))
    return 0


def _execute(config: BuildConfig, steps: int) -> dict[str, Any]:
    from neffbuild.runtime.replay import execute_replay

    return execute_replay(config, options.local_store(config), steps)


def _simulate(config: BuildConfig, steps: int) -> dict[str, Any]:
    from neffbuild.cache.catalog import read_hits
    from neffbuild.grid.kv_blocks import kv_bytes_per_position
    from neffbuild.grid.ranks import shapes_on_every_rank
    from neffbuild.grid.replay import simulate_replay
    from neffbuild.toolchain.planning import units_to_serve
    from neffbuild.toolchain.registry import load_toolchain

    store = options.local_store(config)
    bucketer, units = units_to_serve(config, load_toolchain(config.toolchain.name), store)
    shapes = {key: unit.shape for key, unit in units.items()}
    stored = shapes_on_every_rank(shapes, read_hits(store, shapes))
    kv_bytes = kv_bytes_per_position(config.serve, config.model)
    return simulate_replay(bucketer, kv_bytes, steps, stored)


def _text(document: dict[str, Any]) -> str:
    from neffbuild.report.text import columns, size

    timed = "ready_seconds" in document
    header = ("unit", "steps", "median step") if timed else ("unit", "steps")
    rows = [
        (
            unit["bucket_name"],
            str(unit["steps"]),
            *([f"{unit['median_step_seconds'] * 1000:.2f} ms"] if timed else []),
        )
        for unit in document["units"]
    ]
    lines = [columns(header, rows), ""]
    for change in document["transitions"]:
        before = change["from"] or "start"
        lines.append(f"step {change['step']}: {before} → {change['to']}")
    lines += [
        "",
        f"{document['steps']} steps: {document['compiles']} compiles, {document['hits']} hits, "
        f"{document['misses']} misses",
        f"KV read {size(document['kv_bytes_read'])}, "
        f"{document['amplification']:.2f} times what the requests needed "
        f"(programs at max_model_len: {size(document['kv_bytes_full_length'])}, "
        f"{document['amplification_full_length']:.2f} times)",
    ]
    if acceptance := document.get("acceptance"):
        counts = ", ".join(f"{at['accepted']} of {at['verified']}" for at in acceptance)
        lines.append(f"drafts accepted, by position: {counts} (random weights)")
    if timed:
        lines.append(f"all programs ready in {document['ready_seconds'] * 1000:.1f} ms")
    if small := document.get("small_step"):
        lines.append(
            f"one step at the smallest context, {small['bucket_name']} against "
            f"{small['bucket_name_full_length']}: {small['kv_bytes_ratio']:.1f} times fewer KV bytes, "
            f"{small['time_ratio']:.1f} times faster "
            f"({small['step_seconds'] * 1000:.2f} ms against "
            f"{small['step_seconds_full_length'] * 1000:.2f} ms)"
        )
    return "\n".join(lines)
