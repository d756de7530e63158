"""`neffbuild explain`: the recipe of a unit, or the difference of two."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from neffbuild.cli import options, output
from neffbuild.config.errors import ConfigError

if TYPE_CHECKING:
    from neffbuild.cache.plan import Plan, PlannedUnit


@click.command(name="explain")
@options.config_arguments
@options.cache_option
@options.json_option
def command(words: tuple[str, ...], cache: Path | None, as_json: bool) -> int:
    """The recipe of a unit, ingredient by ingredient; with OTHER, where two recipes differ.

    UNIT and OTHER are bucket names of CONFIG; OTHER may also be another config file, whose unit of
    the same name is compared.

    \b
    neffbuild explain CONFIG UNIT [OTHER]
    """
    from neffbuild.cache.recipe import difference
    from neffbuild.cache.serve_options import removed_options
    from neffbuild.toolchain.planning import plan_config
    from neffbuild.toolchain.registry import load_toolchain

    config, rest = options.load_config(words, cache)
    if not 1 <= len(rest) <= 2:
        raise ConfigError(
            "explain takes CONFIG UNIT [OTHER]", hint="see `neffbuild plan` for units"
        )

    def planned(source: Any) -> Plan:
        toolchain = load_toolchain(source.toolchain.name)
        return plan_config(source, toolchain, options.local_store(source))

    plan = planned(config)
    unit = find_unit(plan, rest[0])
    left_out = [
        {"option": path, "reason": reason}
        for path, reason in removed_options(config.serve, unit.shape.family)
    ]
    document: dict[str, Any] = {
        "schema": "neffbuild.explain/1",
        "unit": unit.bucket_name,
        "key": unit.key,
        "recipe": _recipe(unit),
        "left_out": left_out,
    }
    if len(rest) == 2:
        other = _other(rest[1], plan, unit, planned)
        document |= {
            "other": rest[1],
            "other_key": other.key,
            "differences": [
                {"path": path, "unit": mine, "other": theirs}
                for path, mine, theirs in difference(_recipe(unit), _recipe(other))
            ],
        }
    if as_json:
        output.print_json(document)
    else:
        output.write(_text(document))
    return 0


def find_unit(plan: Plan, name: str) -> PlannedUnit:
    """The unit of a plan with this bucket name. Raises `ConfigError` naming the nearest."""
    import difflib

    by_name = {unit.bucket_name: unit for unit in plan.units}
    if name in by_name:
        return by_name[name]
    near = difflib.get_close_matches(name, by_name, n=3, cutoff=0.0)
    raise ConfigError(
        f"{plan.config.source} has no unit {name!r}",
        field="unit",
        value=name,
        hint=f"nearest: {', '.join(near)}; `neffbuild plan` lists all {len(by_name)}",
    )


def _recipe(unit: PlannedUnit) -> Mapping[str, Any]:
    if unit.recipe is None:
        raise ConfigError(
            f"{unit.bucket_name} has no recipe: {unit.status.value} ({unit.reason})",
            field="unit",
            value=unit.bucket_name,
        )
    return unit.recipe


def _other(name: str, plan: Plan, unit: PlannedUnit, planned: Any) -> PlannedUnit:
    from neffbuild.config.load import load_config

    if Path(name).is_file():
        return find_unit(planned(load_config(Path(name))), unit.bucket_name)
    return find_unit(plan, name)


def _text(document: Mapping[str, Any]) -> str:
    if "other" in document:
        lines = [
            f"{document['unit']}  {document['key']}",
            f"{document['other']}  {document['other_key']}",
            "",
        ]
        if not document["differences"]:
            lines.append("the recipes are the same")
        for line in document["differences"]:
            lines.append(
                f"{line['path']}: {json.dumps(line['unit'])} → {json.dumps(line['other'])}"
            )
        return "\n".join(lines)
    lines = [f"{document['unit']}", f"key  {document['key']}", ""]
    lines += [f"{path} = {json.dumps(value)}" for path, value in _leaves(document["recipe"])]
    if document["left_out"]:
        lines += ["", "left out:"]
        lines += [f"  {one['option']}: {one['reason']}" for one in document["left_out"]]
    return "\n".join(lines)


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, child in value.items():
            yield from _leaves(child, f"{path}.{name}" if path else name)
    else:
        yield path, value
