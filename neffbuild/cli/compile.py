"""`neffbuild compile`: compile what is missing into the local cache."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from neffbuild.cli import options, output, tiers
from neffbuild.config.errors import ConfigError, ToolchainRefusal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from neffbuild.cache.directory import DirectoryStore
    from neffbuild.cache.plan import Plan, PlannedUnit
    from neffbuild.cache.tiered import TieredStore
    from neffbuild.farm.outcomes import RunResult
    from neffbuild.report.rows import UnitRow
    from neffbuild.toolchain.base import Toolchain


@click.command(name="compile")
@options.config_arguments
@options.cache_option
@tiers.remote_option
@click.option("--workers", type=click.IntRange(min=1), help="Units compiled at once.")
@click.option("--only", metavar="GLOB", help="Only units whose bucket name matches.")
@click.option(
    "--limit", type=click.IntRange(min=1), help="Compile at most this many of the missing units."
)
@options.json_option
def command(
    words: tuple[str, ...],
    cache: Path | None,
    remote: str | None,
    workers: int | None,
    only: str | None,
    limit: int | None,
    as_json: bool,
) -> int:
    """Compile what CONFIG is missing into the local cache.

    A unit is stored as soon as it is built: interrupt a run and the next one goes on from there. One
    Ctrl-C finishes the units that are running, a second one ends them.
    """
    from neffbuild.report.rows import run_document
    from neffbuild.report.text import report_text
    from neffbuild.toolchain.planning import plan_with
    from neffbuild.toolchain.registry import load_toolchain

    config = options.only_config(words, cache)
    toolchain = load_toolchain(config.toolchain.name)
    if reason := toolchain.refusal(config):
        raise ToolchainRefusal(reason, hint="`neffbuild plan` works for this config all the same")
    tiered = tiers.tiered_store(config, remote)
    store = tiered.local
    plan = _fetched(plan_with(config, toolchain, tiered.stored_keys), tiered)
    chosen = _chosen(plan, only)
    missing = [unit for unit in chosen if unit.status.value == "missing"]
    _refuse_unresolved(chosen)

    run = _compile(plan, missing[:limit], toolchain, tiered, workers) if missing else None
    _conclude(plan, tiered)
    put_off = {unit.key for unit in missing[len(missing[:limit]) :]}
    rows = _rows([unit for unit in chosen if unit.key not in put_off], run, store)
    failed = [row for row in rows if row.outcome not in ("built", "cached")]
    if as_json:
        document = run_document(rows, run.wall_seconds if run else 0.0)
        output.print_json({**document, "remotes": tiers.remotes_document(tiered)})
    elif run is None:
        output.write(f"nothing to do: all {len(rows)} units are cached in {store.url}")
        for line in tiers.remotes_lines(tiered):
            output.write(line)
    else:
        output.write(report_text(rows))
        output.write(f"cache: {store.url}")
        for line in tiers.remotes_lines(tiered):
            output.write(line)
        again = f"neffbuild compile {options.config_words(words, cache)}"
        if failed:
            output.write(f"{len(failed)} units are not compiled; try them again: {again}")
        elif put_off:
            output.write(f"{len(put_off)} more units are missing; next: {again}")
    if run is not None and run.interrupted:
        return output.INTERRUPTED
    return 1 if failed else 0


def _fetched(plan: Plan, tiered: TieredStore) -> Plan:
    """The plan after what only remotes have of it was fetched, as far as they hand it over."""
    from neffbuild.cli.transfer import progress_line

    keys = [unit.key for unit in plan.units if unit.key and unit.status.value == "cached"]
    with progress_line("fetch") as progress:
        return plan.without(tiered.back_fill(keys, progress=progress))


def _conclude(plan: Plan, tiered: TieredStore) -> None:
    """Write the manifest of what there is now, and bring remotes up to date with it."""
    from neffbuild.cache.plan import store_plan_manifest

    store_plan_manifest(plan, tiered.local)
    tiered.publish([unit.key for unit in plan.units if unit.key])


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
    tiered: TieredStore,
    workers: int | None,
) -> RunResult:
    from neffbuild.cli.progress import farm_progress
    from neffbuild.farm.outcomes import Event, Outcome, UnitFinished
    from neffbuild.farm.run import compile_units
    from neffbuild.toolchain.base import Unit

    # Both would come out with the first unit, for each unit again and after its whole compile.
    if reason := toolchain.host_refusal(plan.config):
        raise ToolchainRefusal(
            reason, hint="compile on another host, or pull what was compiled there"
        )
    store = tiered.local
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
    with farm_progress() as show, tiered.publishing() as publish:

        def on_event(event: Event) -> None:
            show(event)
            if isinstance(event, UnitFinished) and event.result.outcome is Outcome.BUILT:
                publish(event.unit.key)

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
