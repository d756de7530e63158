"""`neffbuild pull`: fetch what a tag names into the local cache."""

from __future__ import annotations

from pathlib import Path

import click

from neffbuild.cli import options, output, trust
from neffbuild.config.errors import ConfigError


@click.command(name="pull")
@click.argument("url")
@click.option("--tag", metavar="NAME:TAG", help="What to pull, by name.")
@click.option("--digest", metavar="D", help="What to pull, by digest of an index or manifest.")
@trust.reading_options()
@trust.min_sequence_option
@options.cache_option
@options.json_option
def command(
    url: str,
    tag: str | None,
    digest: str | None,
    config_file: Path | None,
    keys: tuple[str, ...],
    require_signature: bool,
    min_sequence: int | None,
    cache: Path | None,
    as_json: bool,
) -> int:
    """Fetch everything a tag (or digest) names from the store at URL into the local cache.

    All of it is verified, and none of it is visible locally before all of it is there. With --config
    or --key, so are the signatures: of the tag, and of the manifest's provenance.
    """
    from neffbuild.cache.directory import DirectoryStore
    from neffbuild.cache.open import open_store
    from neffbuild.cache.transfer import pull
    from neffbuild.cli.transfer import progress_line
    from neffbuild.config.build import cache_directory
    from neffbuild.report.text import size

    if (tag is None) == (digest is None):
        raise ConfigError("give either --tag NAME:TAG or --digest D", field="--tag")
    settings = trust.cache_settings(config_file, cache, keys, require_signature, min_sequence)
    with progress_line("pull") as progress:
        pulled = pull(
            open_store(url),
            DirectoryStore(cache_directory(settings)),
            trust.tag_ref(tag, config_file, settings) if tag else str(digest),
            platform=None,
            trust=trust.trust_of(settings),
            progress=progress,
        )
    units = len(pulled.manifest.entries)
    if as_json:
        output.print_json(
            {
                "schema": "neffbuild.pull/1",
                "url": url,
                "manifest": pulled.digest,
                "sequence": pulled.statement.sequence if pulled.statement else None,
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
