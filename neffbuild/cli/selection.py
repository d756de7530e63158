"""Which of a plan's units one `compile` is about."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeVar

import click

from neffbuild.config.errors import ConfigError

if TYPE_CHECKING:
    from neffbuild.cache.plan import Plan, PlannedUnit
    from neffbuild.cache.records import Failure
    from neffbuild.farm.shards import Shard
    from neffbuild.grid.shapes import Shape

_Command = TypeVar("_Command", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Selection:
    """What the command line says. `only` is a pattern of bucket names, `limit` a number of units; of what
    matches, the shard is a part."""

    only: str | None
    shard: Shard | None
    limit: int | None
    skip_failed: bool
    retry_failed: bool


@dataclass(frozen=True, slots=True)
class Chosen:
    """`units` are what the command answers for, `to_compile` those of them that are to be compiled now;
    `put_off` are missing and not asked for this time. `left_out` are the keys of those that are not to
    be compiled because their last compile failed."""

    units: tuple[PlannedUnit, ...]
    to_compile: tuple[PlannedUnit, ...]
    put_off: tuple[PlannedUnit, ...]
    left_out: frozenset[str]


def selection_options(command: _Command) -> _Command:
    for option in (
        click.option(
            "--retry-failed",
            is_flag=True,
            help="Only units whose last compile failed.",
        ),
        click.option(
            "--skip-failed",
            is_flag=True,
            help="Leave out units whose last compile failed (by default they are tried again).",
        ),
        click.option(
            "--limit",
            type=click.IntRange(min=1),
            help="Compile at most this many of the missing units.",
        ),
        click.option("--only", metavar="GLOB", help="Only units whose bucket name matches."),
    ):
        command = option(command)
    return command


@dataclass(frozen=True, slots=True)
class Part:
    """The names of the units that a command is about, of `of_units` that it and the other shards are
    about."""

    names: frozenset[str]
    of_units: int


def part_of(
    plan: Plan,
    selection: Selection,
    seconds: Callable[[Shape], float],
    together: Callable[[Shape], str | None] = lambda _: None,
) -> Part:
    """What a selection is about, whatever is cached. `seconds` is what the toolchain's prior expects of a
    shape, `together` which come of one compile: nothing that machines know differently.

    Raises `ConfigError` for a pattern that matches nothing, and a matching unit that cannot be keyed here.
    """
    from neffbuild.farm.shards import shard_of_groups

    units = [unit for unit in plan.units if unit.status.value != "cannot_occur"]
    units = _matching(units, selection.only)
    _refuse_unresolved(units)
    of_units = len(units)
    if selection.shard is not None:
        members = shard_of_groups(
            [seconds(unit.shape) for unit in units],
            [together(unit.shape) for unit in units],
            selection.shard,
        )
        units = [units[place] for place in members]
    return Part(frozenset(unit.bucket_name for unit in units), of_units)


def choose(plan: Plan, part: Part, selection: Selection, failures: Mapping[str, Failure]) -> Chosen:
    """The units of a part that are selected; `failures` are the recorded ones, by key.

    Raises `ConfigError` for a selection that contradicts itself.
    """
    if selection.skip_failed and selection.retry_failed:
        raise ConfigError(
            "--skip-failed and --retry-failed exclude each other", field="--retry-failed"
        )
    units = [unit for unit in plan.units if unit.bucket_name in part.names]
    missing = [unit for unit in units if unit.status.value == "missing"]
    if selection.retry_failed:
        units = missing = [unit for unit in missing if unit.key in failures]
    left_out = frozenset(failures if selection.skip_failed else ())
    wanted = [unit for unit in missing if unit.key not in left_out]
    to_compile = wanted[: selection.limit]
    later = {unit.key for unit in wanted[len(to_compile) :]}
    return Chosen(
        units=tuple(unit for unit in units if unit.key not in later),
        to_compile=tuple(to_compile),
        put_off=tuple(wanted[len(to_compile) :]),
        left_out=left_out,
    )


def _matching(units: Sequence[PlannedUnit], pattern: str | None) -> list[PlannedUnit]:
    if pattern is None:
        return list(units)
    chosen = [
        unit
        for unit in units
        if fnmatchcase(unit.bucket_name, pattern) or fnmatchcase(unit.shape.bucket_name, pattern)
    ]
    if not chosen:
        raise ConfigError(
            f"--only {pattern!r} matches none of the {len(units)} units",
            field="--only",
            value=pattern,
            hint=f"unit names look like {units[0].bucket_name!r}" if units else None,
        )
    return chosen


def _refuse_unresolved(units: Sequence[PlannedUnit]) -> None:
    unresolved = [unit for unit in units if unit.status.value == "unresolved"]
    if unresolved:
        from neffbuild.report.text import counted

        raise ConfigError(
            f"{counted(len(unresolved), 'unit')} cannot be keyed here: {unresolved[0].reason}",
            field="toolchain",
            hint="pin what is named; what is not installed here compiles where it is",
        )
