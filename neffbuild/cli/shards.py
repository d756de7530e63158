"""`--shard`: the part of a config's units that one machine of several is for."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from neffbuild.farm.shards import Shard

_Command = TypeVar("_Command", bound=Callable[..., Any])


def shard_option(command: _Command) -> _Command:
    return click.option(
        "--shard",
        metavar="I/N",
        callback=_shard,
        help="Only the I-th of N parts of about equal compile time; `auto` reads I and N from AWS Batch, "
        "Slurm, a Kubernetes Indexed Job (auto/N), GitLab, CircleCI or Buildkite.",
    )(command)


def shard_words(shard: Shard | None) -> str:
    """The option that names the shard to another command, with a space after it; empty for none."""
    return f"--shard {shard} " if shard else ""


def _shard(_context: click.Context, _option: click.Parameter, text: str | None) -> Shard | None:
    from neffbuild.farm.shards import parse_shard

    return None if text is None else parse_shard(text, os.environ)
