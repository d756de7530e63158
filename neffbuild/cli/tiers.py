"""The config's remote tiers, as `plan` and `compile` use and report them."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from neffbuild.cli import options

if TYPE_CHECKING:
    from neffbuild.cache.tiered import TieredStore
    from neffbuild.config.build import BuildConfig

_Command = TypeVar("_Command", bound=Callable[..., Any])


def remote_option(command: _Command) -> _Command:
    return click.option(
        "--remote",
        metavar="URL",
        help="Remote store to read and write (overrides the config's `cache.remotes`).",
    )(command)


def remote_words(remote: str | None) -> str:
    """The option that names the remote to another command, with a space after it; empty for none."""
    return f"--remote {shlex.quote(remote)} " if remote else ""


def tiered_store(config: BuildConfig, remote: str | None) -> TieredStore:
    """The local cache in front of the config's remotes, or of `remote` alone."""
    from neffbuild.cache.open import open_store
    from neffbuild.cache.tiered import Tier, TieredStore
    from neffbuild.config.build import RemoteConfig

    remotes = config.cache.remotes if remote is None else (RemoteConfig(url=remote),)
    return TieredStore(
        options.local_store(config),
        [
            Tier(
                open_store(one.url),
                readable=not config.cache.signature_required,
                writable=one.mode == "rw",
            )
            for one in remotes
        ],
    )


def remotes_document(tiered: TieredStore) -> list[dict[str, Any]]:
    """`remotes` of a JSON document: what became of each."""
    return [
        {
            "url": tier.store.url,
            "mode": "rw" if tier.writable else "ro",
            "readable": tier.readable,
            "hits": tier.counts.hits,
            "published": tier.counts.published,
            "faults": tier.counts.faults,
            "last_fault": tier.counts.last_fault,
        }
        for tier in tiered.tiers
    ]


def remotes_lines(tiered: TieredStore) -> list[str]:
    """The same for a person, a line per remote."""
    lines = []
    for one in remotes_document(tiered):
        parts = [f"{one['hits']} hits"]
        if not one["readable"]:
            parts = ["not read: units found by their keys are not signed (pull a signed tag)"]
        if one["mode"] == "rw":
            parts.append(f"{one['published']} published")
        if one["faults"]:
            parts.append(f"FAILED: {one['last_fault']}")
        lines.append(f"remote: {one['url']} ({one['mode']}): {', '.join(parts)}")
    return lines
