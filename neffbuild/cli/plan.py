"""`neffbuild plan`: what a serve config needs compiled, and what the cache already has."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from neffbuild.cli import options, output, tiers

if TYPE_CHECKING:
    from neffbuild.cache.plan import Plan, PlannedUnit

_SHOWN = 60


@click.command(name="plan")
@options.config_arguments
@options.cache_option
@tiers.remote_option
@click.option("--check", is_flag=True, help="Exit 1 when a unit is missing or unresolved.")
@click.option("--all", "show_all", is_flag=True, help=f"List more than {_SHOWN} units.")
@options.json_option
def command(
    words: tuple[str, ...],
    cache: Path | None,
    remote: str | None,
    check: bool,
    show_all: bool,
    as_json: bool,
) -> int:
    """What CONFIG needs compiled, and what the local cache or a remote already has.

    \b
    neffbuild plan configs/quickstart.yaml
    neffbuild plan -- vllm serve DIR --max-model-len 131072 --max-num-seqs 8
    """
    from neffbuild.toolchain.planning import plan_with
    from neffbuild.toolchain.registry import load_toolchain

    config = options.only_config(words, cache)
    toolchain = load_toolchain(config.toolchain.name)
    tiered = tiers.tiered_store(config, remote)
    plan = plan_with(config, toolchain, tiered.stored_keys)
    refusal = toolchain.refusal(config)
    if as_json:
        remotes = tiers.remotes_document(tiered)
        output.print_json({**plan_document(plan, refusal), "remotes": remotes})
    else:
        output.write(plan_text(plan, tiered.local.url, len(plan.units) if show_all else _SHOWN))
        for line in tiers.remotes_lines(tiered):
            output.write(line)
        if refusal:
            output.write(f"to plan with only: {refusal}")
        elif plan.counts["missing"]:
            output.write(f"next: neffbuild compile {options.config_words(words, cache)}")
    incomplete = plan.counts["missing"] + plan.counts["unresolved"]
    return 1 if check and incomplete else 0


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
        "units": [_unit_document(plan, unit) for unit in plan.units],
    }


def plan_text(plan: Plan, cache: str, shown: int) -> str:
    """The plan for a person; `cache` is where its units were looked for."""
    from neffbuild.report.text import columns

    identity, counts = plan.identity, plan.counts
    versions = ", ".join(f"{tool} {version}" for tool, version in identity.versions.items())
    lines = [f"{plan.config.model.name}: {identity.name} for {identity.target} ({versions})"]
    lines.append(f"cache: {cache}")
    lines += [f"note: {note}" for note in plan.config.notes]
    rows = [
        (
            unit.bucket_name,
            unit.status.value,
            unit.need.value,
            (unit.key or "-")[:12],
            unit.reason or "",
        )
        for unit in plan.units[:shown]
    ]
    lines += ["", columns(("unit", "status", "need", "key", ""), rows)]
    if len(plan.units) > shown:
        lines.append(f"… and {len(plan.units) - shown} more (--all lists them)")
    families = ", ".join(f"{count} {family}" for family, count in counts["by_family"].items())
    summary = f"{counts['units']} units ({families}): {counts['cached']} cached, {counts['missing']} missing"
    if counts["unresolved"]:
        summary += f", {counts['unresolved']} unresolved"
    lines += ["", summary]
    if counts["cannot_occur"]:
        lines.append(f"{counts['cannot_occur']} shapes cannot occur and need no program")
    return "\n".join(lines)


def _unit_document(plan: Plan, unit: PlannedUnit) -> dict[str, Any]:
    from neffbuild.grid.shapes import DecodeShape

    shape = unit.shape.document()
    return {
        "bucket_name": unit.bucket_name,
        "family": shape["family"],
        "num_seqs": shape.get("num_seqs"),
        "query_len": shape.get("query_len"),
        "context_len": shape.get("context_len"),
        "block_table_width": (
            plan.bucketer.block_table_width(unit.shape)
            if isinstance(unit.shape, DecodeShape)
            else None
        ),
        "status": unit.status.value,
        "need": unit.need.value,
        "key": unit.key,
        "reason": unit.reason,
    }
