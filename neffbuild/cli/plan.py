"""`neffbuild plan`: what a serve config needs compiled, and what the cache already has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from neffbuild.cli import options, output, tiers
from neffbuild.cli.shards import shard_option, shard_words

if TYPE_CHECKING:
    from neffbuild.cache.plan import Plan, PlannedUnit
    from neffbuild.farm.shards import Shard
    from neffbuild.grid.coverage import UncoveredStates
    from neffbuild.toolchain.base import Toolchain

_SHOWN = 60


@click.command(name="plan")
@options.config_arguments
@options.cache_option
@tiers.remote_option
@shard_option
@click.option("--check", is_flag=True, help="Exit 1 when a unit is missing or unresolved.")
@click.option("--all", "show_all", is_flag=True, help=f"List more than {_SHOWN} units.")
@options.json_option
def command(
    words: tuple[str, ...],
    cache: Path | None,
    remote: str | None,
    shard: Shard | None,
    check: bool,
    show_all: bool,
    as_json: bool,
) -> int:
    """What CONFIG needs compiled, and what the local cache or a remote already has.

    \b
    neffbuild plan configs/quickstart.yaml
    neffbuild plan -- vllm serve DIR --max-model-len 131072 --max-num-seqs 8
    """
    from neffbuild.report.text import counted
    from neffbuild.toolchain.planning import plan_with
    from neffbuild.toolchain.registry import load_toolchain

    config = options.only_config(words, cache)
    toolchain = load_toolchain(config.toolchain.name)
    tiered = tiers.tiered_store(config, remote)
    plan = plan_with(config, toolchain, tiered.stored_keys)
    of_units = plan.counts["units"]
    if shard is not None:
        plan = _part(plan, toolchain, shard)
    refusal = toolchain.refusal(config)
    if as_json:
        document = {**plan_document(plan, refusal), "remotes": tiers.remotes_document(tiered)}
        if shard is not None:
            document["shard"] = {**shard.document(), "of_units": of_units}
        output.print_json(document)
    else:
        if shard is not None:
            output.write(f"shard {shard}: {len(plan.units)} of {counted(of_units, 'unit')}")
        output.write(plan_text(plan, tiered.local.url, len(plan.units) if show_all else _SHOWN))
        for line in tiers.remotes_lines(tiered):
            output.write(line)
        if refusal:
            output.write(f"to plan with only: {refusal}")
        elif plan.counts["missing"]:
            again = f"{shard_words(shard)}{tiers.remote_words(remote)}{options.config_words(words, cache)}"
            output.write(f"next: neffbuild compile {again}")
    incomplete = plan.counts["missing"] + plan.counts["unresolved"]
    return 1 if check and incomplete else 0


def _part(plan: Plan, toolchain: Toolchain, shard: Shard) -> Plan:
    """The shard's units of a plan."""
    from neffbuild.farm.expectations import prior_of
    from neffbuild.farm.shards import shard_of_groups

    prior, together = prior_of(toolchain), toolchain.capabilities.together
    units = [unit for unit in plan.units if unit.status.value != "cannot_occur"]
    seconds = [prior(plan.config, unit.shape).seconds for unit in units]
    groups = [together(plan.config, unit.shape) for unit in units]
    members = shard_of_groups(seconds, groups, shard)
    return replace(plan, units=tuple(units[place] for place in members))


def plan_document(plan: Plan, refusal: str | None) -> dict[str, Any]:
    """The `neffbuild.plan/1` document; `refusal` is why the toolchain cannot build the config."""
    identity = plan.identity
    return {
        "schema": "neffbuild.plan/1",
        "toolchain": {
            "name": identity.name,
            "route": identity.route,
            "target": identity.target,
            "engine": identity.engine,
            "versions": dict(identity.versions),
            "flags": list(identity.flags),
        },
        "counts": plan.counts,
        "refusal": refusal,
        "notes": list(plan.config.notes),
        "phases": [phase.value for phase in plan.bucketer.phases],
        "prefill_gaps": [gap.document() for gap in _prefill_gaps(plan)],
        "units": [_unit_document(plan, unit) for unit in plan.units],
    }


def plan_text(plan: Plan, cache: str, shown: int) -> str:
    """The plan for a person; `cache` is where its units were looked for."""
    from neffbuild.grid.phases import leaves_prefill_to_others
    from neffbuild.report.text import columns

    identity, counts = plan.identity, plan.counts
    versions = ", ".join(f"{tool} {version}" for tool, version in identity.versions.items())
    lines = [f"{plan.config.model.name}: {identity.name} for {identity.target}"]
    if versions:
        lines[0] += f" ({versions})"
    lines.append(f"cache: {cache}")
    lines += [f"note: {note}" for note in plan.config.notes]
    rows = [
        (
            unit.bucket_name,
            unit.status.value,
            unit.need.value,
            (unit.key or "-")[:12],
            "; ".join(filter(None, (unit.needs and f"needs: {unit.needs}", unit.reason))),
        )
        for unit in plan.units[:shown]
    ]
    lines += ["", columns(("unit", "status", "need", "key", ""), rows)]
    if len(plan.units) > shown:
        lines.append(f"… and {len(plan.units) - shown} more (--all lists them)")
    if identity.symbolic_shapes:
        lines += [
            "",
            "num_seqs, query_len and context_len are symbolic: one program serves every step",
        ]
    families = ", ".join(f"{count} {family}" for family, count in counts["by_family"].items())
    noun = "unit" if counts["units"] == 1 else "units"
    summary = f"{counts['units']} {noun} ({families}): {counts['cached']} cached, {counts['missing']} missing"
    if counts["unresolved"]:
        summary += f", {counts['unresolved']} unresolved"
    lines += ["", summary]
    if counts["cannot_occur"]:
        lines.append(f"{counts['cannot_occur']} shapes cannot occur and need no program")
    if leaves_prefill_to_others(plan.config):
        lines += [f"prefill is not covered: {gap.reason}" for gap in _prefill_gaps(plan)]
    return "\n".join(lines)


def _prefill_gaps(plan: Plan) -> list[UncoveredStates]:
    """The prefill steps for which a plan has no units."""
    from neffbuild.grid.coverage import prefill_gaps
    from neffbuild.grid.phases import Phase

    if plan.identity.symbolic_shapes or Phase.PREFILL in plan.bucketer.phases:
        return []
    return prefill_gaps(plan.bucketer, ())


def _unit_document(plan: Plan, unit: PlannedUnit) -> dict[str, Any]:
    from neffbuild.grid.shapes import DecodeShape

    shape = unit.shape.document()
    decode = unit.shape if isinstance(unit.shape, DecodeShape) else None
    return {
        "bucket_name": unit.bucket_name,
        "family": shape["family"],
        "num_seqs": shape.get("num_seqs"),
        "query_len": shape.get("query_len"),
        "context_len": shape.get("context_len"),
        "num_batched_tokens": shape.get("num_batched_tokens"),
        "kv_segment": shape.get("kv_segment"),
        "rank_scope": unit.rank_scope,
        "symbolic": shape["kind"] == "symbolic",
        "block_table_width": decode and plan.bucketer.block_table_width(decode),
        "window_table_width": decode and plan.bucketer.window_table_width(decode),
        "status": unit.status.value,
        "need": unit.need.value,
        "needs": unit.needs,
        "key": unit.key,
        "reason": unit.reason,
    }
