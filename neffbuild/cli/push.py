"""`neffbuild push`: copy a compiled config to a store and name it with a tag."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from neffbuild.cli import options, output, tiers, trust
from neffbuild.config.errors import ConfigError


@click.command(name="push")
@options.config_arguments
@options.cache_option
@tiers.remote_option
@click.option(
    "--to",
    "url",
    metavar="URL",
    help="Where to (default: the remote; of several the first that is `rw`).",
)
@click.option("--tag", metavar="NAME:TAG", help="Tag to set; NAME defaults to `cache.name`.")
@click.option("--allow-partial", is_flag=True, help="Push even if units are missing.")
@trust.signing_options
@options.json_option
def command(
    words: tuple[str, ...],
    cache: Path | None,
    remote: str | None,
    url: str | None,
    tag: str | None,
    allow_partial: bool,
    key: str | None,
    public_key: Path | None,
    expires: str | None,
    as_json: bool,
) -> int:
    """Copy what is compiled of CONFIG to a store: blobs, entries, manifest, index, then the tag.

    What is not in the local cache and a remote has is fetched first: what shards have compiled into one
    remote can be pushed from any machine.

    With --key the tag is signed, and so is the provenance of the manifest. Prints the digest of the
    index, which `neffbuild pull URL --digest` takes as well as the tag.
    """
    from neffbuild.cache.adopted import adopted_in
    from neffbuild.cache.open import open_store
    from neffbuild.cache.plan import Status, store_plan_manifest
    from neffbuild.cache.tag import TagRef
    from neffbuild.cache.transfer import push
    from neffbuild.cli.transfer import progress_line
    from neffbuild.report.text import counted, size
    from neffbuild.toolchain.planning import plan_config
    from neffbuild.toolchain.registry import load_toolchain

    config = options.only_config(words, cache)
    rw = (one.url for one in config.cache.remotes if one.mode == "rw")
    url = url or remote or next(rw, None)
    if url is None:
        raise ConfigError(
            "no store to push to",
            field="--to",
            hint="give --to URL, --remote URL, or a `cache.remotes` entry",
        )
    signing = trust.signing_key(key, public_key, config.cache)
    ref = TagRef.parse(tag, default_name=config.cache.name) if tag else None
    tiered = tiers.tiered_store(config, remote)
    store = tiered.local
    plan = plan_config(config, load_toolchain(config.toolchain.name), store)
    lacking = [unit.key for unit in plan.with_status(Status.MISSING) if unit.key]
    if lacking and not all(tier.readable for tier in tiered.tiers):
        output.remark(
            "remotes are not read, as signatures are required and units found by their keys have none; "
            "where only trusted machines can write, push with `cache.require_signature: false`"
        )
    with progress_line("fetch") as progress:
        tiered.back_fill(lacking, progress=progress)
    manifest = store_plan_manifest(plan, store)
    fetched = len(manifest.entries.keys() & set(lacking))
    with progress_line("push") as progress:
        pushed = push(
            store,
            open_store(url),
            manifest,
            ref,
            trust=trust.trust_of(config.cache, signing),
            sign=signing.sign if signing else None,
            expires=trust.expiry(expires),
            allow_partial=allow_partial,
            progress=progress,
        )
    statement = pushed.statement.document() if pushed.statement else {}
    adopted = len(adopted_in(manifest))
    if as_json:
        output.print_json(
            {
                "schema": "neffbuild.push/1",
                "url": url,
                "name": ref.name if ref else config.cache.name,
                "tag": ref.tag if ref else None,
                "index": pushed.index,
                "manifest": pushed.manifest,
                "sequence": statement.get("sequence"),
                "expires": statement.get("expires"),
                "signed_by": signing.keyid if signing else None,
                "units": len(manifest.entries),
                "adopted": adopted,
                "units_fetched": fetched,
                "blobs_copied": pushed.blobs_copied,
                "bytes_copied": pushed.bytes_copied,
            }
        )
    else:
        stored = len(manifest.entries) - adopted
        units = stored + len(manifest.missing)
        if fetched:
            output.write(f"fetched {counted(fetched, 'unit')} from where they were compiled")
        what = f"{stored} of {units} units" if manifest.missing else counted(units, "unit")
        if adopted:
            what += f" and {adopted} adopted from an engine's cache"
        output.write(
            f"pushed {what} to {url}"
            + (f" as {ref}" if ref else "")
            + f" ({pushed.blobs_copied} blobs, {size(pushed.bytes_copied)} copied)"
        )
        output.write(f"index {pushed.index}")
        if signing:
            output.write(f"signed by {signing.keyid}")
        if statement.get("expires"):
            output.write(f"expires {statement['expires']}")
        name = ["--tag", str(ref)] if ref else ["--digest", pushed.index]
        output.write(f"fetch with: {shlex.join(['neffbuild', 'pull', url, *name])}")
    return 0
