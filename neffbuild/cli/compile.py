"""`neffbuild compile`: compile what is missing into the local cache."""

from __future__ import annotations

import contextlib
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from neffbuild.cli import options, output, tiers
from neffbuild.cli.farm import farm_options, unused_fields
from neffbuild.cli.selection import Selection, choose, part_of, selection_options
from neffbuild.cli.shards import shard_option, shard_words
from neffbuild.config.errors import ConfigError, ToolchainRefusal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from neffbuild.cache.directory import DirectoryStore
    from neffbuild.cache.plan import Plan, PlannedUnit
    from neffbuild.cache.tiered import TieredStore
    from neffbuild.cli.events import EventLines
    from neffbuild.cli.selection import Chosen, Part
    from neffbuild.farm.outcomes import RunResult
    from neffbuild.farm.shards import Shard
    from neffbuild.report.rows import UnitRow
    from neffbuild.toolchain.base import Toolchain


@click.command(name="compile")
@options.config_arguments
@options.cache_option
@tiers.remote_option
@farm_options
@selection_options
@shard_option
@click.option(
    "--json-lines",
    is_flag=True,
    help="Print each event of the run as a JSON document on a line of stdout; the last is the result.",
)
@options.json_option
def command(
    words: tuple[str, ...],
    cache: Path | None,
    remote: str | None,
    farm: dict[str, Any],
    only: str | None,
    limit: int | None,
    skip_failed: bool,
    retry_failed: bool,
    shard: Shard | None,
    json_lines: bool,
    as_json: bool,
) -> int:
    """Compile what CONFIG is missing into the local cache.

    A unit is stored as soon as it is built: interrupt a run and the next one goes on from there. One
    Ctrl-C finishes the units that are running, a second one ends them.
    """
    from neffbuild.cache.records import read_failures
    from neffbuild.cli.events import EventLines
    from neffbuild.farm.expectations import prior_of
    from neffbuild.report.rows import run_document
    from neffbuild.report.text import counted
    from neffbuild.toolchain.planning import plan_with
    from neffbuild.toolchain.registry import load_toolchain

    if json_lines and as_json:
        raise ConfigError("--json and --json-lines exclude each other", field="--json-lines")
    config = options.only_config(words, cache, {"farm": farm})
    if unused := unused_fields(config.farm, farm):
        output.remark(unused)
    toolchain = load_toolchain(config.toolchain.name)
    toolchain.identity(config)  # raises what is wrong with the config itself, with its own advice
    if reason := toolchain.refusal(config):
        raise ToolchainRefusal(reason, hint="`neffbuild plan` works for this config all the same")
    tiered = tiers.tiered_store(config, remote)
    plan = plan_with(config, toolchain, tiered.stored_keys)
    selection = Selection(only, shard, limit, skip_failed, retry_failed)
    prior = prior_of(toolchain)
    together = toolchain.capabilities.together
    part = part_of(
        plan,
        selection,
        lambda shape: prior(config, shape).seconds,
        lambda shape: together(config, shape),
    )
    plan = _fetched(plan, part, tiered)
    failures = read_failures(tiered.local, [unit.key for unit in plan.units if unit.key])
    chosen = choose(plan, part, selection, failures)

    run = None
    lines = EventLines() if json_lines else None
    if chosen.to_compile:
        run = _compile(plan, chosen.to_compile, toolchain, tiered, lines)
    _conclude(plan, tiered)
    rows = _rows(chosen, run, tiered.local)
    document = {
        **run_document(rows, run.wall_seconds if run else 0.0),
        "remotes": tiers.remotes_document(tiered),
    }
    if shard is not None:
        document["shard"] = {**shard.document(), "of_units": part.of_units}
    failed = sum(row.outcome not in ("built", "cached") for row in rows)
    if lines is not None:
        output.print_json_line(document)
        if lines.unwritten is not None:
            raise lines.unwritten
    elif as_json:
        output.print_json(document)
    else:
        if shard is not None:
            output.write(f"shard {shard}: {len(part.names)} of {counted(part.of_units, 'unit')}")
        same = shard_words(shard) + tiers.remote_words(remote)
        if only is not None:
            same += f"--only {shlex.quote(only)} "
        again = f"neffbuild compile {same}{options.config_words(words, cache)}"
        none = "no failure of these units is recorded" if retry_failed else "no unit is chosen"
        _print(rows, run, tiered, failed, len(chosen.put_off), again, none)
    if run is not None and run.interrupted:
        return output.INTERRUPTED
    return 1 if failed else 0


def _print(
    rows: Sequence[UnitRow],
    run: RunResult | None,
    tiered: TieredStore,
    failed: int,
    put_off: int,
    again: str,
    none: str,
) -> None:
    """`none` says what it means that there are no rows."""
    from neffbuild.report.text import counted_are, report_text

    place = tiered.local.url
    if run is None and not failed:
        what = f"all {len(rows)} units are cached in {place}" if rows else none
        output.write(f"nothing to do: {what}")
    else:
        output.write(report_text(rows))
        output.write(f"cache: {place}")
    for line in tiers.remotes_lines(tiered):
        output.write(line)
    if failed:
        output.write(f"{counted_are(failed, 'unit')} not compiled; try again: {again}")
    elif put_off:
        output.write(f"{counted_are(put_off, 'more unit')} missing; next: {again}")


def _fetched(plan: Plan, part: Part, tiered: TieredStore) -> Plan:
    """The plan after what only remotes have of a part was fetched, as far as they hand it over."""
    from neffbuild.cli.transfer import progress_line

    cached = (unit for unit in plan.units if unit.status.value == "cached")
    keys = [unit.key for unit in cached if unit.key and unit.bucket_name in part.names]
    with progress_line("fetch") as progress:
        return plan.without(tiered.back_fill(keys, progress=progress))


def _conclude(plan: Plan, tiered: TieredStore) -> None:
    """Write the manifest of what there is now, and bring remotes up to date with it."""
    from neffbuild.cache.plan import store_plan_manifest

    store_plan_manifest(plan, tiered.local)
    tiered.publish([unit.key for unit in plan.units if unit.key])


def _compile(
    plan: Plan,
    missing: Sequence[PlannedUnit],
    toolchain: Toolchain,
    tiered: TieredStore,
    lines: EventLines | None,
) -> RunResult:
    from neffbuild.cli.progress import farm_progress
    from neffbuild.farm.outcomes import Event, Outcome, UnitFinished
    from neffbuild.farm.run import compile_units
    from neffbuild.toolchain.base import Unit

    farm = plan.config.farm
    shared = tiered.shared() if farm.executor == "ray" else None
    # Both would come out with the first unit, for each unit again and after its whole compile.
    if shared is None and (reason := toolchain.host_refusal(plan.config)):
        raise ToolchainRefusal(
            reason, hint="compile on another host, or pull what was compiled there"
        )
    store = tiered.local
    with store.scratch_folder():
        pass
    units = [
        Unit(plan.config, unit.shape, unit.recipe, unit.key)
        for unit in missing
        if unit.recipe is not None and unit.key is not None
    ]
    stored = (Outcome.BUILT, Outcome.CACHED)
    shown = farm_progress() if lines is None else contextlib.nullcontext(lines)
    with shown as show, tiered.fetching() if shared else tiered.publishing() as copy:

        def on_event(event: Event) -> None:
            show(event)
            if not isinstance(event, UnitFinished):
                return
            if shared is not None and event.result.outcome is Outcome.BUILT:
                tiered.count_published(shared)
            if event.result.outcome in stored:
                # Where no thread can be started (a limit of processes), what follows the run does it.
                with contextlib.suppress(RuntimeError):
                    copy(event.unit.key)

        return compile_units(
            units,
            toolchain,
            store,
            farm,
            logs=store.root / "logs",
            on_event=on_event,
            shared=shared,
        )


def _rows(chosen: Chosen, run: RunResult | None, store: DirectoryStore) -> list[UnitRow]:
    """What became of each chosen unit: as the run says, else as the store has it."""
    from neffbuild.cache.catalog import read_hits
    from neffbuild.cache.records import read_failures
    from neffbuild.report.rows import UnitRow, stored_rows

    keys = [unit.key for unit in chosen.units if unit.key]
    stored = stored_rows(chosen.units, read_hits(store, keys), read_failures(store, keys))
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
            result.cause.kind.value if result.cause else None,
        )
        if (result := ran.get(row.key or ""))
        else replace(row, outcome="skipped")
        if row.key in chosen.left_out
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
