"""`neffbuild pull`: fetch what a tag names into the local cache."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from neffbuild.cli import layouts, options, output, trust
from neffbuild.config.errors import ConfigError

if TYPE_CHECKING:
    from neffbuild.cache.index import HostFit

_log = logging.getLogger(__name__)


@click.command(name="pull")
@click.argument("url")
@click.option("--tag", metavar="NAME:TAG", help="What to pull, by name.")
@click.option("--digest", metavar="D", help="What to pull, by digest of an index or manifest.")
@click.option(
    "--platform",
    "wanted",
    multiple=True,
    metavar="NAME=VALUE",
    help="Of several platforms the one where target, route, toolchain or a tool's version is VALUE; "
    "repeatable (default: what suits this host).",
)
@click.option("--allow-partial", is_flag=True, help="Pull even if units of the plan are missing.")
@layouts.layout_options(
    "Then write what was pulled into an engine's own cache, of this layout",
    "Write traces of PyTorch's precompile cache below DIR too: pickles, so only with a believed signature.",
)
@click.option(
    "--into",
    type=layouts.Folder(),
    metavar="DIR",
    help="With --layout: the folder that holds the engine's entries.",
)
@click.option(
    "--jitter",
    metavar="DURATION",
    help="Start after a random part of this time, so that a fleet does not start at once.",
)
@click.option(
    "--ready-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File to write last, once everything is there and verified; removed at the start.",
)
@trust.reading_options()
@trust.min_sequence_option
@options.cache_option
@options.json_option
def command(
    url: str,
    tag: str | None,
    digest: str | None,
    wanted: tuple[str, ...],
    allow_partial: bool,
    layout_name: str | None,
    nki_cache: Path | None,
    traces: Path | None,
    into: Path | None,
    jitter: str | None,
    ready_file: Path | None,
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

    Where a tag has several platforms, the one is taken that suits this host and, with --config, what
    the config asks for. What is here already is not fetched again: a pull that was interrupted goes on.

    With --layout and --into, an engine that looks in DIR then finds hits: only what it lacks is written, each
    entry whole or not at all; one that a live process is at work on is left to it (exit status 1).
    """
    from neffbuild.cache import ready
    from neffbuild.cache.adopted import adopted_in
    from neffbuild.cache.canonical import is_digest
    from neffbuild.cache.directory import DirectoryStore
    from neffbuild.cache.open import open_store
    from neffbuild.cache.transfer import pull
    from neffbuild.cli.transfer import progress_line
    from neffbuild.config.build import cache_directory
    from neffbuild.report.text import counted, size

    if (tag is None) == (digest is None):
        raise ConfigError("give either --tag NAME:TAG or --digest D", field="--tag")
    if digest is not None and not is_digest(digest):
        raise ConfigError(
            f"--digest {digest!r} is not a digest; allowed: 64 lower-case hex digits",
            field="--digest",
            value=digest,
            hint="`neffbuild push` prints the digest of the index it wrote",
        )
    settings = trust.cache_settings(config_file, cache, keys, require_signature, min_sequence)
    layout = layouts.chosen(layout_name, nki_cache, into=into, with_traces=traces)
    layouts.check_handing_out(layout, into, traces, settings)
    fit = _named(wanted) if wanted else _suited(config_file)
    if ready_file is not None:
        ready.withdraw(ready_file)
    if jitter is not None:
        _wait(jitter)
    local = DirectoryStore(cache_directory(settings))
    with progress_line("pull") as progress:
        pulled = pull(
            open_store(url),
            local,
            trust.tag_ref(tag, config_file, settings) if tag else str(digest),
            fit=fit,
            trust=trust.trust_of(settings),
            allow_partial=allow_partial,
            progress=progress,
        )
    units, adopted = len(pulled.manifest.entries), len(adopted_in(pulled.manifest))
    document = {
        "schema": "neffbuild.pull/1",
        "url": url,
        "manifest": pulled.digest,
        "sequence": pulled.statement.sequence if pulled.statement else None,
        "platform": pulled.manifest.platform,
        "units": units,
        "adopted": adopted,
        "missing": len(pulled.manifest.missing),
        "blobs_copied": pulled.blobs_copied,
        "bytes_copied": pulled.bytes_copied,
    }
    handed = None
    if layout is not None and into is not None:
        handed = layouts.hand_out_manifest(layout, local, pulled.manifest, into, nki_cache, traces)
        document["layout"] = handed.document()
    complete = handed is None or handed.hits
    if ready_file is not None and complete:
        ready.announce(ready_file, document)
    if as_json:
        output.print_json(document)
    else:
        output.write(
            f"pulled {counted(units - adopted, 'unit')}"
            + (f" and {adopted} adopted from an engine's cache" if adopted else "")
            + f" from {url} "
            f"({pulled.blobs_copied} blobs, {size(pulled.bytes_copied)} copied)"
        )
        if pulled.manifest.missing:
            output.write(f"{len(pulled.manifest.missing)} more units of the plan are missing there")
        if handed is not None:
            output.write(layouts.handed_out_text(handed))
    return 0 if complete else 1


def _suited(config_file: Path | None) -> HostFit:
    from neffbuild.config.load import load_config
    from neffbuild.toolchain.hosts import host_fit

    return host_fit(load_config(config_file) if config_file else None)


def _named(wanted: tuple[str, ...]) -> HostFit:
    """The platform that is named, whether or not this host can run it."""
    from neffbuild.cache.index import Fit

    pairs = [one.partition("=") for one in wanted]
    for (name, equals, value), one in zip(pairs, wanted, strict=True):
        if not (name and equals and value):
            raise ConfigError(
                f"--platform {one!r} is not NAME=VALUE",
                field="--platform",
                value=one,
                hint="for example --platform target=x86-64-v3",
            )

    def fit(platform: Mapping[str, Any]) -> Fit:
        stated = {**platform.get("versions", {}), **platform}
        for name, _, value in pairs:
            if stated.get(name) != value:
                return Fit(f"its {name} is {stated.get(name)}")
        return Fit(None)

    return fit


def _wait(jitter: str) -> None:
    from neffbuild.config.duration import parse_duration

    seconds = random.uniform(0, parse_duration(jitter, field="--jitter").total_seconds())
    _log.info("waiting before the pull", extra={"fields": {"seconds": round(seconds, 1)}})
    time.sleep(seconds)
