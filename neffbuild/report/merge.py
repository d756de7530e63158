"""One `neffbuild.run/1` document of several: what the shards of a config report, joined."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from neffbuild.cache.canonical import canonical_json
from neffbuild.config.documents import parse_json_text, read_text
from neffbuild.config.errors import ConfigError
from neffbuild.grid.shapes import Family
from neffbuild.report.rows import UnitRow

_MAX_BYTES = 256 << 20
_MOST_SHARDS = 100_000
_BEST_FIRST = ("built", "cached", "failed", "cancelled", "skipped")
_FAMILIES = {family.value: number for number, family in enumerate(Family)}
_LABEL = re.compile(r"_([a-z]+)([0-9]+)")
_ORDER = ("kv", "b", "s", "ctx")
"""The numbers in a bucket name, in the order in which a plan's loops are nested."""
_COLUMNS = tuple(field.name for field in fields(UnitRow))
_SUMMED = ("hits", "published", "faults")


class _Part(BaseModel):
    # What later versions add passes through.
    model_config = ConfigDict(extra="allow", strict=True)


class _Unit(_Part):
    bucket_name: str
    family: str
    key: str | None = Field(pattern=r"^[0-9a-f]{64}$")
    outcome: Literal["built", "cached", "failed", "cancelled", "skipped"]
    compile_seconds: float | None = Field(ge=0)
    peak_memory_bytes: int | None = Field(ge=0)
    artifact_bytes: int | None = Field(ge=0)


class _Remote(_Part):
    url: str
    mode: Literal["rw", "ro"]
    readable: bool
    hits: int = Field(ge=0)
    published: int = Field(ge=0)
    faults: int = Field(ge=0)
    last_fault: str | None


class _Shard(_Part):
    index: int = Field(ge=1)
    count: int = Field(ge=1, le=_MOST_SHARDS)
    of_units: int = Field(ge=0)


class _Run(_Part):
    wall_seconds: float = Field(ge=0)
    absent_units: int = Field(default=0, ge=0)
    units: list[_Unit]
    remotes: list[_Remote] = Field(default_factory=list)
    shard: _Shard | None = None


@dataclass(frozen=True, slots=True)
class RunReport:
    """A `neffbuild.run/1` document and the file it was read from."""

    source: str
    run: _Run


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


def read_report(path: Path) -> RunReport:
    """The report in a file, as `parse_report` says. Raises `ConfigError` for a file that cannot be read,
    too."""
    return parse_report(read_text(path, "a report", _MAX_BYTES), str(path))


def parse_report(text: str, source: str) -> RunReport:
    """The report that `--json` printed (or `--json-lines`: its last line) into the file `source`.

    Raises `ConfigError`, naming the file, for whatever is no `neffbuild.run/1` document.
    """
    lines = text.strip().splitlines()
    if not lines:
        raise ConfigError(
            f"{source} is empty",
            value=source,
            hint="the command that should have written it did not end; run it again",
        )
    try:
        events = len(lines) > 1 and lines[0].startswith("{") and lines[0].endswith("}")
        document = parse_json_text(lines[-1] if events else text)
    except ValueError as error:
        raise ConfigError(f"{source} is not valid JSON: {error}", value=source) from error
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema == "neffbuild.error/1":
        raise ConfigError(
            f"{source} reports no run but an error: {_message(document)}",
            value=source,
            hint="run that shard again, or leave its file out",
        )
    if schema != "neffbuild.run/1":
        raise ConfigError(
            f"{source} is no report: its schema is {schema!r}; allowed: 'neffbuild.run/1'",
            value=source,
            hint="give it what `neffbuild compile --json` or `neffbuild report --json` printed",
        )
    try:
        return RunReport(source, _Run.model_validate(document))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"{source} is a damaged report: {where}: {first['msg']}",
            field=where,
            value=source,
        ) from error


def merge_reports(reports: Sequence[RunReport]) -> Merged:
    """Join the reports of the shards of one config.

    Units come in the order of the plan. Of a unit that several reports have, the best outcome counts
    (built, cached, failed, cancelled, skipped). `wall_seconds` is the longest of the runs, which go on
    beside each other; `compile_seconds` is the sum over the units that were built. In whatever order
    reports are given, the units come out the same.

    Raises `ConfigError` where reports are not of one config: two keys for one unit, or another number of
    units.
    """
    units = _joined_units(reports)
    shards = [(report, report.run.shard) for report in reports if report.run.shard]
    # A report may itself be of several that were joined.
    expected = max(
        (len(report.run.units) + report.run.absent_units for report in reports), default=0
    )
    for report, shard in shards:
        first, other = shards[0][1].of_units, shard.of_units
        if first != other:
            raise ConfigError(
                f"{shards[0][0].source} is a shard of {first} units, {report.source} one of {other}: "
                "they are not of one config",
                value=report.source,
                hint="start every shard with the same config, options and version of neffbuild",
            )
        expected = max(expected, other)
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
    return Merged(document, absent, _absent([shard for _, shard in shards]) if absent else ())


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
            found = unit.model_dump()
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


def _absent(shards: Sequence[_Shard]) -> tuple[str, ...]:
    """The shards that no report is of. Where there was more than one split, nobody can tell."""
    counts = {shard.count for shard in shards}
    if len(counts) != 1:
        return ()
    [count] = counts
    absent = set(range(1, count + 1)) - {shard.index for shard in shards}
    return tuple(f"{index}/{count}" for index in sorted(absent))


def _message(document: dict[str, Any]) -> str:
    error = document.get("error")
    return str(error.get("message")) if isinstance(error, dict) else "it does not say which"
