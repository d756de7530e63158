"""`neffbuild import`: bring another cache, or a tar of one, into the local cache."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from neffbuild.cli import layouts, options, output, trust
from neffbuild.config.errors import ConfigError, IntegrityError

if TYPE_CHECKING:
    from neffbuild.cache.importing import Imported
    from neffbuild.cache.layouts.layout import Layout
    from neffbuild.config.build import CacheConfig

_SHOWN = 40


@click.command(name="import")
@click.argument("source", metavar="DIR | TAR")
@layouts.layout_options(
    "Take over an engine's own cache, of this layout, in place of a neffbuild directory",
    "Take over the traces of PyTorch's precompile cache below DIR too: pickles, made by whoever filled it.",
)
@trust.reading_options()
@options.cache_option
@options.json_option
def command(
    source: str,
    layout_name: str | None,
    nki_cache: Path | None,
    traces: Path | None,
    config_file: Path | None,
    keys: tuple[str, ...],
    require_signature: bool,
    cache: Path | None,
    as_json: bool,
) -> int:
    """Copy what another neffbuild directory holds into the local cache.

    DIR is a cache, or a directory that was pushed to; TAR is a tar of one, plain or compressed with gzip or
    zstd. Units, manifests and run records come over, so that `plan`, `verify` and `replay` find them; tags do
    not. Everything is checked on the way, what is damaged is named and left out (exit status 4), and only
    what is missing is copied: an import that was interrupted goes on.

    Where signatures are required, only manifests with signed provenance and their units come over.

    With --layout, DIR is the cache of an engine: what is complete in it becomes units of the local cache that
    `push` of the --config carries; what is incomplete, failed or locked is named and left.
    """
    from neffbuild.cache.directory import DirectoryStore
    from neffbuild.cache.import_source import open_source
    from neffbuild.cache.importing import import_artifacts
    from neffbuild.cli.transfer import progress_line
    from neffbuild.config.build import cache_directory

    settings = trust.cache_settings(config_file, cache, keys, require_signature)
    layout = layouts.chosen(layout_name, nki_cache, with_traces=traces)
    if layout is not None:
        return _take_over(layout, source, traces, config_file, settings, as_json)
    believed = trust.trust_of(settings)
    local = DirectoryStore(cache_directory(settings))
    with open_source(_path(source), local) as opened, progress_line("import") as progress:
        imported = import_artifacts(opened, local, trust=believed, progress=progress)
    if as_json:
        output.print_json(_document(source, imported))
    else:
        output.write(_text(source, imported))
    return IntegrityError.exit_status if imported.problems else 0


def _take_over(
    layout: Layout,
    source: str,
    traces: Path | None,
    config_file: Path | None,
    settings: CacheConfig,
    as_json: bool,
) -> int:
    from neffbuild.cli.adoption import adoption_document, adoption_text, take_over

    taken = take_over(layout, _path(source), traces, config_file, settings)
    if as_json:
        output.print_json(adoption_document(source, taken))
    else:
        output.write(adoption_text(source, taken))
    return IntegrityError.exit_status if taken.refused else 0


def _path(source: str) -> Path:
    """The path that is named, as a path or as `file:///path`."""
    from neffbuild.cache.directory import DirectoryStore
    from neffbuild.cache.open import open_store

    if not source:  # an unset variable, which must not mean the working directory
        raise ConfigError(
            "'' is no path",
            field="source",
            value=source,
            hint="name the directory or tar to import",
        )
    if "://" not in source:
        return Path(source)
    store = open_store(source)
    if not isinstance(store, DirectoryStore):
        raise ConfigError(
            f"{source} is not a directory or file",
            field="source",
            value=source,
            hint=f"`neffbuild pull {source} --tag NAME:TAG` fetches from there",
        )
    return store.root


def _document(source: str, imported: Imported) -> dict[str, Any]:
    return {
        "schema": "neffbuild.import/1",
        "source": source,
        "ok": not imported.problems,
        "entries": imported.entries.document(),
        "manifests": imported.manifests.document(),
        "configs": imported.configs.document(),
        "runs": imported.runs.document(),
        "unsigned_entries": imported.unsigned,
        "blobs_copied": imported.blobs_copied,
        "bytes_copied": imported.bytes_copied,
        "problems": [problem.document() for problem in imported.problems],
    }


def _text(source: str, imported: Imported) -> str:
    from neffbuild.report.text import counted, size

    lines = [f"{one.kind.value} {one.key}: {one.detail}" for one in imported.problems]
    if len(lines) > _SHOWN:
        lines[_SHOWN:] = [f"… and {len(lines) - _SHOWN} more (--json lists them)"]
    entries = imported.entries
    present = entries.whole - entries.imported
    lines.append(
        f"imported {counted(entries.imported, 'unit')} from {source} "
        f"({counted(imported.blobs_copied, 'blob')}, {size(imported.bytes_copied)} copied)"
        + (f"; {present} were here already" if present else "")
    )
    lines.append(
        f"and {counted(imported.manifests.imported, 'manifest')} "
        f"(pointed to by {counted(imported.configs.imported, 'config')}), "
        f"{counted(imported.runs.imported, 'run record')}"
    )
    if imported.unsigned:
        lines.append(
            f"left out: {counted(imported.unsigned, 'unit')} that no signed manifest names "
            "(signatures are required)"
        )
    if imported.problems:
        lines.append("next: import from another copy, or pull or compile what is missing")
    return "\n".join(lines)
