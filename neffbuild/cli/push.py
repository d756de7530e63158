"""`neffbuild push`: copy a compiled config to a store and name it with a tag."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from neffbuild.cli import options, output
from neffbuild.config.errors import ConfigError


@click.command(name="push")
@options.config_arguments
@options.cache_option
@click.option("--to", "url", metavar="URL", help="Where to (default: the first `rw` remote).")
@click.option("--tag", metavar="NAME:TAG", help="Tag to set; NAME defaults to `cache.name`.")
@click.option("--allow-partial", is_flag=True, help="Push even if units are missing.")
@options.json_option
def command(
    words: tuple[str, ...],
    cache: Path | None,
    url: str | None,
    tag: str | None,
    allow_partial: bool,
    as_json: bool,
) -> int:
    """Copy what is compiled of CONFIG to a store: blobs, entries, manifest, index, then the tag.

    Prints the digest of the index, which `neffbuild pull URL --digest` takes as well as the tag.
    """
    from neffbuild.cache.open import open_store
    from neffbuild.cache.plan import store_plan_manifest
    from neffbuild.cache.tag import TagRef
    from neffbuild.cache.transfer import push
    from neffbuild.cli.transfer import progress_line, trust_of
    from neffbuild.report.text import size
    from neffbuild.toolchain.planning import plan_config
    from neffbuild.toolchain.registry import load_toolchain

    config = options.only_config(words, cache)
    url = url or next((one.url for one in config.cache.remotes if one.mode == "rw"), None)
    if url is None:
        raise ConfigError(
            "no store to push to", field="--to", hint="give --to URL, or a `cache.remotes` entry"
        )
    ref = TagRef.parse(tag, default_name=config.cache.name) if tag else None
    store = options.local_store(config)
    plan = plan_config(config, load_toolchain(config.toolchain.name), store)
    manifest = store_plan_manifest(plan, store)
    with progress_line("push") as progress:
        pushed = push(
            store,
            open_store(url),
            manifest,
            ref,
            trust=trust_of(config.cache),
            allow_partial=allow_partial,
            progress=progress,
        )
    if as_json:
        output.print_json(
            {
                "schema": "neffbuild.push/1",
                "url": url,
                "name": ref.name if ref else config.cache.name,
                "tag": ref.tag if ref else None,
                "index": pushed.index,
                "manifest": pushed.manifest,
                "units": len(manifest.entries),
                "blobs_copied": pushed.blobs_copied,
                "bytes_copied": pushed.bytes_copied,
            }
        )
    else:
        stored, units = len(manifest.entries), len(manifest.entries) + len(manifest.missing)
        what = f"{stored} of {units} units" if manifest.missing else f"{units} units"
        output.write(
            f"pushed {what} to {url}"
            + (f" as {ref}" if ref else "")
            + f" ({pushed.blobs_copied} blobs, {size(pushed.bytes_copied)} copied)"
        )
        output.write(f"index {pushed.index}")
        name = ["--tag", str(ref)] if ref else ["--digest", pushed.index]
        output.write(f"fetch with: {shlex.join(['neffbuild', 'pull', url, *name])}")
    return 0
