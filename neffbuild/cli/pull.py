"""`neffbuild pull`: fetch what a tag names into the local cache."""

from __future__ import annotations

from pathlib import Path

import click

from neffbuild.cli import options, output
from neffbuild.config.errors import ConfigError


@click.command(name="pull")
@click.argument("url")
@click.option("--tag", metavar="NAME:TAG", help="What to pull, by name.")
@click.option("--digest", metavar="D", help="What to pull, by digest of an index or manifest.")
@options.cache_option
@options.json_option
def command(
    url: str, tag: str | None, digest: str | None, cache: Path | None, as_json: bool
) -> int:
    """Fetch everything a tag (or digest) names from the store at URL into the local cache.

    All of it is verified, and none of it is visible locally before all of it is there.
    """
    from neffbuild.cache.open import open_store
    from neffbuild.cache.tag import TagRef
    from neffbuild.cache.transfer import pull
    from neffbuild.cli.transfer import progress_line, trust_of
    from neffbuild.config.build import CacheConfig
    from neffbuild.report.text import size

    if (tag is None) == (digest is None):
        raise ConfigError("give either --tag NAME:TAG or --digest D", field="--tag")
    with progress_line("pull") as progress:
        pulled = pull(
            open_store(url),
            options.own_store(cache),
            TagRef.parse(tag) if tag else str(digest),
            platform=None,
            trust=trust_of(CacheConfig()),
            progress=progress,
        )
    units = len(pulled.manifest.entries)
    if as_json:
        output.print_json(
            {
                "schema": "neffbuild.pull/1",
                "url": url,
                "manifest": pulled.digest,
                "units": units,
                "blobs_copied": pulled.blobs_copied,
                "bytes_copied": pulled.bytes_copied,
            }
        )
    else:
        output.write(
            f"pulled {units} units from {url} "
            f"({pulled.blobs_copied} blobs, {size(pulled.bytes_copied)} copied)"
        )
    return 0
