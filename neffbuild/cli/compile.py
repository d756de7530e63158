"""`neffbuild compile`: compile what is missing into the local cache."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from neffbuild.cli import options, output
from neffbuild.config.errors import ConfigError, ToolchainRefusal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from neffbuild.cache.directory import DirectoryStore
    from neffbuild.cache.plan import Plan, PlannedUnit
    from neffbuild.farm.outcomes import RunResult
    from neffbuild.report.rows import UnitRow
    from neffbuild.toolchain.base import Toolchain


@click.command(name="compile")
@options.config_arguments
@options.cache_option
@click.option("--workers", type=click.IntRange(min=1), help="Units compiled at once.")
@click.option("--only", metavar="GLOB", help="Only units whose bucket name matches.")
@click.option(
    "--limit", type=click.IntRange(min=1), help="Compile at most this many of the missing units."
)
@options.json_option
def command(
    words: tuple[str, ...],
    cache: Path | None,
    workers: int | None,
    only: str | None,
    limit: int | None,
    as_json: bool,
) -> int:
    """Compile what CONFIG is missing into the local cache.

    A unit is stored as soon as it is built: interrupt a run and the next one goes on from there. One
    Ctrl-C finishes the units that are running, a second one ends them.
    """
    from neffbuild.cache.plan import store_plan_manifest
    from neffbuild.report.rows import run_document
    from neffbuild.report.text import report_text
    from neffbuild.toolchain.planning import plan_config
    from neffbuild.toolchain.registry import load_toolchain

    config = options.only_config(words, cache)
    toolchain = load_toolchain(config.toolchain.name)
    if reason := toolchain.refusal(config):
        raise ToolchainRefusal(reason, hint="`neffbuild plan` works for this config all the same")
    store = options.local_store(config)
    plan = plan_config(config, toolchain, store)
    chosen = _chosen(plan, only)
    missing = [unit for unit in chosen if unit.status.value == "missing"]
    _refuse_unresolved(chosen)

    run = _compile(plan, missing[:limit], toolchain, store, workers) if missing else None
    store_plan_manifest(plan, store)
    put_off = {unit.key for unit in missing[len(missing[:limit]) :]}
    rows = _rows([unit for unit in chosen if unit.key not in put_off], run, store)
    failed = [row for row in rows if row.outcome not in ("built", "cached")]
    if as_json:
        output.print_json(run_document(rows, run.wall_seconds if run else 0.0))
    elif run is None:
        output.write(f"nothing to do: all {len(rows)} units are cached in {store.url}")
    else:
        output.write(report_text(rows))
        output.write(f"cache: {store.url}")
        again = f"neffbuild compile {options.config_words(words, cache)}"
        if failed:
            output.write(f"{len(failed)} units are not compiled; try them again: {again}")
        elif put_off:
            output.write(f"{len(put_off)} more units are missing; next: {again}")
    if run is not None and run.interrupted:
        return output.INTERRUPTED
    return 1 if failed else 0


def _chosen(plan: Plan, only: str | None) -> list[PlannedUnit]:
    units = [unit for unit in plan.units if unit.status.value != "cannot_occur"]
    if only is None:
        return units
    chosen = [unit for unit in units if fnmatchcase(unit.bucket_name, only)]
    if not chosen:
        raise ConfigError(
            f"--only {only!r} matches none of the {len(units)} units",
            field="--only",
            value=only,
            hint=f"unit names look like {units[0].bucket_name!r}" if units else None,
        )
    return chosen


def _refuse_unresolved(units: Sequence[PlannedUnit]) -> None:
    unresolved = [unit for unit in units if unit.status.value == "unresolved"]
    if unresolved:
        raise ConfigError(
            f"{len(unresolved)} units cannot be keyed here: {unresolved[0].reason}",
            field="toolchain.versions",
            hint="install what is named, or pin its version and compile where it is installed",
        )


def _compile(
    plan: Plan,
    missing: Sequence[PlannedUnit],
    toolchain: Toolchain,
    store: DirectoryStore,
    workers: int | None,
) -> RunResult:
    from neffbuild.cli.progress import farm_progress
    from neffbuild.farm.run import compile_units
    from neffbuild.toolchain.base import Unit

    # Both would come out with the first unit, for each unit again and after its whole compile.
    if reason := toolchain.host_refusal(plan.config):
        raise ToolchainRefusal(
            reason, hint="compile on another host, or pull what was compiled there"
        )
    with store.scratch_folder():
        pass
    farm = plan.config.farm
    if workers is not None:
        farm = farm.model_copy(update={"workers": workers})
    units = [
        Unit(plan.config, unit.shape, unit.recipe, unit.key)
        for unit in missing
        if unit.recipe is not None and unit.key is not None
    ]
    with farm_progress() as on_event:
        return compile_units(
            units, toolchain, store, farm, logs=store.root / "logs", on_event=on_event
        )


def _rows(
    chosen: Sequence[PlannedUnit], run: RunResult | None, store: DirectoryStore
) -> list[UnitRow]:
    """What became of each chosen unit: as the run says, else as the store has it."""
    from neffbuild.cache.catalog import read_hits
    from neffbuild.cache.records import read_failures
    from neffbuild.report.rows import UnitRow, stored_rows

    keys = [unit.key for unit in chosen if unit.key]
    stored = stored_rows(chosen, read_hits(store, keys), read_failures(store, keys))
    ran: dict[str, Any] = {result.key: result for result in run.units} if run else {}
    return [
        UnitRow(
            row.bucket_name,
            row.family,
            row.key,
            result.outcome.value,
            result.compile_seconds,
            result.peak_memory_bytes,
            result.artifact_bytes,
            _cause(result),
        )
        if (result := ran.get(row.key or ""))
        else row
        for row in stored
    ]


def _cause(result: Any) -> str | None:
    if result.cause is None:
        return None
    parts = [result.cause.text]
    if result.cause.advice:
        parts.append(result.cause.advice)
    if result.log:
        parts.append(f"log: {result.log}")
    return "; ".join(parts)
