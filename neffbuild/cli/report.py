"""`neffbuild report`: compile time, memory and artifact size of every unit."""

from __future__ import annotations

from pathlib import Path

import click

from neffbuild.cli import options, output


@click.command(name="report")
@options.config_arguments
@options.cache_option
@options.json_option
def command(words: tuple[str, ...], cache: Path | None, as_json: bool) -> int:
    """Compile time, peak memory, artifact size and state of every unit of CONFIG, as last compiled."""
    from neffbuild.cache.catalog import read_hits
    from neffbuild.cache.records import last_wall_seconds, read_failures
    from neffbuild.report.rows import run_document, stored_rows
    from neffbuild.report.text import report_text
    from neffbuild.toolchain.planning import plan_config
    from neffbuild.toolchain.registry import load_toolchain

    config = options.only_config(words, cache)
    store = options.local_store(config)
    plan = plan_config(config, load_toolchain(config.toolchain.name), store)
    keys = [unit.key for unit in plan.units if unit.key]
    rows = stored_rows(plan.units, read_hits(store, keys), read_failures(store, keys))
    complete = all(row.outcome == "cached" for row in rows)
    if as_json:
        output.print_json(run_document(rows, last_wall_seconds(store, keys)))
    else:
        output.write(report_text(rows))
        if not complete:
            output.write(f"next: neffbuild compile {options.config_words(words, cache)}")
    return 0 if complete else 1
