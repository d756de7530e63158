"""One `neffbuild.run/1` document of several: what the shards of a config report, joined."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from neffbuild.cache.canonical import canonical_json
from neffbuild.config.errors import ConfigError
from neffbuild.grid.shapes import Family
from neffbuild.report.rows import UnitRow
from neffbuild.report.run_files import RunReport, ShardOfRun

_BEST_FIRST = ("built", "cached", "failed", "cancelled", "skipped")
_FAMILIES = {family.value: number for number, family in enumerate(Family)}
_LABEL = re.compile(r"_([a-z]+)([0-9]+)")
_ORDER = ("kv", "b", "s", "ctx")
"""The numbers in a bucket name, in the order in which a plan's loops are nested."""
_COLUMNS = tuple(field.name for field in fields(UnitRow))
_SUMMED = ("hits", "published", "faults")


@dataclass(frozen=True, slots=True)
class Merged:
    """The joined document; `absent_units` of the config are in none of the reports, those of the shards
    `absent_shards` (`2/3`) as far as the reports say."""

    document: dict[str, Any]
    absent_units: int
    absent_shards: tuple[str, ...]

    @property
    def rows(self) -> list[UnitRow]:
        """The units as rows of a report."""
        return [
            UnitRow(**{name: unit.get(name) for name in _COLUMNS})
            for unit in self.document["units"]
        ]

    @property
    def complete(self) -> bool:
        """Whether every unit is reported and has an artifact."""
        units = self.document["units"]
        return not self.absent_units and all(
            unit["outcome"] in ("built", "cached") for unit in units
        )


def merge_reports(reports: Sequence[RunReport]) -> Merged:
    """Join the reports of the shards of one config.

    Units come in the order of the plan. Of a unit that several reports have, the best outcome counts
    (built, cached, failed, cancelled, skipped). `wall_seconds` is the longest of the runs, which go on
    beside each other; `compile_seconds` is the sum over the units that were built. In whatever order
    reports are given, the units come out the same.

    Raises `ConfigError` where reports are not of one config in one split: two keys for one unit, another
    number of units or of shards, a unit in two shards, or reports of one shard with different units.
    """
    units = _joined_units(reports)
    shards = [(report, report.run.shard) for report in reports if report.run.shard]
    _refuse_two_splits(shards)
    # A report may itself be of several that were joined.
    expected = max(
        (len(report.run.units) + report.run.absent_units for report in reports), default=0
    )
    expected = max([expected, *(shard.of_units for _, shard in shards)])
    absent = max(0, expected - len(units))
    counts = Counter(unit["outcome"] for unit in units)
    document = {
        "schema": "neffbuild.run/1",
        "counts": {name: counts[name] for name in ("built", "cached", "failed")},
        "wall_seconds": max((report.run.wall_seconds for report in reports), default=0.0),
        "compile_seconds": round(
            sum(unit["compile_seconds"] or 0.0 for unit in units if unit["outcome"] == "built"), 3
        ),
        "reports": len(reports),
        "absent_units": absent,
        "units": units,
        "remotes": _joined_remotes(reports),
    }
    return Merged(
        document, absent, _absent([shard for _, shard in shards]) if absent and shards else ()
    )


def _joined_units(reports: Sequence[RunReport]) -> list[dict[str, Any]]:
    best: dict[tuple[str, str], dict[str, Any]] = {}
    keyed: dict[tuple[str, str], tuple[str, str]] = {}
    for report in reports:
        for unit in report.run.units:
            name = (unit.family, unit.bucket_name)
            if unit.key is not None:
                key, source = keyed.setdefault(name, (unit.key, report.source))
                if key != unit.key:
                    raise ConfigError(
                        f"unit {unit.bucket_name} has two keys: {key} in {source}, {unit.key} in "
                        f"{report.source}; the reports are not of one config on one platform",
                        field=unit.bucket_name,
                        value=[key, unit.key],
                        hint="`neffbuild explain CONFIG UNIT` on both machines shows where they differ",
                    )
            found = unit.model_dump(exclude_unset=True)
            best[name] = min(best.get(name, found), found, key=_rank)
    return sorted(best.values(), key=_place)


def _rank(unit: dict[str, Any]) -> tuple[int, bytes]:
    """Better outcomes first; between equal ones any order will do that is the same in every run."""
    return _BEST_FIRST.index(unit["outcome"]), canonical_json(unit)


def _place(unit: dict[str, Any]) -> tuple[int, list[int], str]:
    """Where a plan has the unit: by family, then in the order of the loops over its numbers."""
    numbers = {label: int(number) for label, number in _LABEL.findall(unit["bucket_name"])}
    family = _FAMILIES.get(unit["family"], len(_FAMILIES))
    return family, [numbers.get(label, 0) for label in _ORDER], unit["bucket_name"]


def _joined_remotes(reports: Sequence[RunReport]) -> list[dict[str, Any]]:
    joined: dict[tuple[str, str], dict[str, Any]] = {}
    for remote in (remote for report in reports for remote in report.run.remotes):
        found = remote.model_dump()
        earlier = joined.setdefault((remote.url, remote.mode), found)
        if earlier is not found:
            earlier.update({name: earlier[name] + found[name] for name in _SUMMED})
            earlier["last_fault"] = found["last_fault"] or earlier["last_fault"]
    return list(joined.values())


def _refuse_two_splits(shards: Sequence[tuple[RunReport, ShardOfRun]]) -> None:
    """Raise `ConfigError` where these are not shards of one split: of another number of units or shards,
    with a unit in two of them, or one shard with other units in another report."""
    if not shards:
        return
    (one, first), *others = shards
    for report, shard in others:
        if first.of_units != shard.of_units:
            raise _not_one_split(
                f"{one.source} is a shard of {first.of_units} units, {report.source} one of "
                f"{shard.of_units}: they are not of one config",
                report,
            )
        if first.count != shard.count:
            raise _not_one_split(
                f"{one.source} is shard {first}, {report.source} shard {shard}: they are not of one split",
                report,
            )
    homes: dict[tuple[str, str], tuple[RunReport, ShardOfRun]] = {}
    held: dict[int, list[tuple[RunReport, set[tuple[str, str]]]]] = {}
    for report, shard in shards:
        names = {(unit.family, unit.bucket_name) for unit in report.run.units}
        for name in names:
            home, other = homes.setdefault(name, (report, shard))
            if other.index != shard.index:
                raise _not_one_split(
                    f"unit {name[1]} is in shard {other} ({home.source}) and in shard {shard} "
                    f"({report.source})",
                    report,
                )
        # A second run of a shard may report fewer units (`--retry-failed`, `--limit`), not others.
        for earlier, there in held.setdefault(shard.index, []):
            if not (names <= there or there <= names):
                raise _not_one_split(
                    f"{earlier.source} and {report.source} are both shard {shard}, of different units",
                    report,
                )
        held[shard.index].append((report, names))


def _not_one_split(message: str, report: RunReport) -> ConfigError:
    return ConfigError(
        message,
        value=report.source,
        hint="start every shard with the same config, options, split and version of neffbuild; what is "
        "left can be run without --shard",
    )


def _absent(shards: Sequence[ShardOfRun]) -> tuple[str, ...]:
    """The shards that no report is of."""
    count = shards[0].count
    absent = set(range(1, count + 1)) - {shard.index for shard in shards}
    return tuple(f"{index}/{count}" for index in sorted(absent))
