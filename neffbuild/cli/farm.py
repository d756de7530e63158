"""The `farm` section of a config on the command line."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from neffbuild.config.duration import parse_duration
from neffbuild.config.errors import ConfigError
from neffbuild.config.sizes import parse_size

if TYPE_CHECKING:
    from neffbuild.config.build import FarmConfig


def farm_options(command: Callable[..., int]) -> Callable[..., int]:
    """Options that override `farm` of the config; those that are given arrive in `farm`, by field."""

    @functools.wraps(command)
    def gathered(**arguments: Any) -> int:
        given = {name: arguments.pop(name) for name in _FIELDS}
        fields = {name: value for name, value in given.items() if value is not None}
        return command(**arguments, farm=fields)

    decorated: Callable[..., int] = gathered
    for option in reversed(_OPTIONS):
        decorated = option(decorated)
    return decorated


def unused_fields(farm: FarmConfig, given: Mapping[str, Any]) -> str | None:
    """What to tell the user of fields in the config that its executor does not look at, if there are any.

    Raises `ConfigError` where one of them is `given` on the command line, by field.
    """
    other, fields = _OF_ANOTHER[farm.executor]
    for name in fields:
        if name in given:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{option} is {given[name]!r}, and the executor is {farm.executor}: only {other} looks at it",
                field=option,
                value=given[name],
                hint=f"leave it out, or add --executor {other}",
            )
    unused = [f"farm.{name}" for name in fields if name in farm.model_fields_set]
    if not unused:
        return None
    return f"not looked at by the executor {farm.executor}, only by {other}: {', '.join(unused)}"


def _workers(
    _context: click.Context, option: click.Parameter, text: str | None
) -> int | str | None:
    if text is None or text == "auto":
        return text
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text)):
        raise ConfigError(
            f"--workers is {text!r}; allowed: a number from 1, or auto",
            field=option.opts[0],
            value=text,
        )
    return int(text)


def _seconds(_context: click.Context, option: click.Parameter, text: str | None) -> float | None:
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        return parse_duration(text, field=option.opts[0]).total_seconds()
    if not 0 < seconds < float("inf"):
        raise ConfigError(
            f"--timeout is {text!r}; allowed: a number of seconds above 0, or 90m, 2h",
            field=option.opts[0],
            value=text,
        )
    return seconds


def _bytes(_context: click.Context, option: click.Parameter, text: str | None) -> int | None:
    return None if text is None else parse_size(text, field=option.opts[0])


_OPTIONS = (
    click.option(
        "--executor",
        metavar="NAME",
        help="Where units are compiled: local, or ray, on a cluster (overrides `farm.executor`).",
    ),
    click.option(
        "--address",
        metavar="HOST:PORT",
        help="The Ray cluster; auto is the one this machine is a node of (overrides `farm.address`).",
    ),
    click.option(
        "--workers",
        metavar="N",
        callback=_workers,
        help="Units compiled at once, or auto: what cores and memory allow (overrides `farm.workers`).",
    ),
    click.option(
        "--timeout",
        metavar="DURATION",
        callback=_seconds,
        help="Longest a unit may take: seconds, or 90m, 2h (overrides `farm.timeout`).",
    ),
    click.option(
        "--memory",
        metavar="SIZE",
        callback=_bytes,
        help="Most memory a unit may use: 12GiB (overrides `farm.memory`).",
    ),
    click.option(
        "--retries",
        type=click.IntRange(min=0),
        metavar="N",
        help="How often a unit is tried again whose failure may pass (overrides `farm.retries`).",
    ),
    click.option(
        "--fail-fast/--keep-going",
        default=None,
        help="After the first failure, start nothing more, or go on with the others (the default).",
    ),
)
_OF_ANOTHER = {
    "local": ("ray", ("address", "resources", "node_wait")),
    "ray": ("local", ("memory_fraction",)),
}
"""By executor: another one, and the fields of `farm` that only that one looks at."""
_FIELDS = ("executor", "address", "workers", "timeout", "memory", "retries", "fail_fast")
