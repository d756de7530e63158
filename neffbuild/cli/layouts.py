"""What commands share that read or write an engine's own cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from neffbuild.config.errors import ConfigError, UnitsIncomplete

if TYPE_CHECKING:
    from neffbuild.cache.directory import DirectoryStore
    from neffbuild.cache.layouts.handing_out import HandedOut
    from neffbuild.cache.layouts.layout import Layout
    from neffbuild.cache.manifest import Manifest
    from neffbuild.config.build import CacheConfig

_Command = TypeVar("_Command", bound=Callable[..., Any])
_SHOWN = 40


class Folder(click.Path):
    """A folder of this machine, there or not. An unset variable (`--into "$ROOT"`) must not mean the working
    directory, nor a URL a folder in it."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, file_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "" or (isinstance(value, str) and "://" in value):
            self.fail(f"{value!r} is no path of a folder", param, ctx)
        return super().convert(value, param, ctx)


def layout_options(what: str, traces: str) -> Callable[[_Command], _Command]:
    """`--layout`, with `what` it does, and what goes with it. `traces` says what `--with-traces` takes."""

    def decorate(command: _Command) -> _Command:
        for option in (
            click.option("--with-traces", "traces", type=Folder(), metavar="DIR", help=traces),
            click.option(
                "--nki-cache",
                type=Folder(),
                metavar="DIR",
                help="Where kernel binaries lie that graphs name by absolute path "
                "(default: /var/tmp/nki-intermediate-cache).",
            ),
            click.option(
                "--layout",
                "layout_name",
                metavar="NAME",
                help=f"{what}: vllm-neuron, torch-neuronx or libneuronxla.",
            ),
        ):
            command = option(command)
        return command

    return decorate


def chosen(layout_name: str | None, nki_cache: Path | None, **others: object) -> Layout | None:
    """The layout that is named; None where none is. Raises `ConfigError` for options (`others`, by their
    names) that mean nothing without one."""
    from neffbuild.cache.layouts.kernels import NKI_ROOT
    from neffbuild.cache.layouts.known import NAMES, layout_named

    if layout_name is not None:
        return layout_named(layout_name, nki_cache or Path(NKI_ROOT))
    for name, value in {"nki_cache": nki_cache, **others}.items():
        if value is not None:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{option} goes with --layout only",
                field=option,
                value=str(value),
                hint=f"add --layout {'|'.join(NAMES)}",
            )
    return None


def check_handing_out(
    layout: Layout | None, into: Path | None, traces: Path | None, settings: CacheConfig
) -> None:
    """Raise `ConfigError` where options of `pull` do not go together, before anything is fetched."""
    if layout is not None and into is None:
        raise ConfigError(
            f"--layout {layout.name} needs --into DIR",
            field="--into",
            hint="DIR is the folder that holds the engine's entries, as "
            "$VLLM_CACHE_ROOT/neuron/compile_cache",
        )
    if traces is not None and not settings.signature_required:
        raise ConfigError(
            "traces are pickles, and reading one runs whatever its author put there: they are handed out "
            "only with a believed signature",
            field="--with-traces",
            value=str(traces),
            hint="give --key FILE, the public key of who pushed them, or leave --with-traces out",
        )


def hand_out_manifest(
    layout: Layout,
    local: DirectoryStore,
    manifest: Manifest,
    into: Path,
    nki_cache: Path | None,
    traces: Path | None,
) -> HandedOut:
    """Write what a manifest has for a layout into an engine's cache. Raises `UnitsIncomplete` where that is
    nothing, and as `hand_out` does."""
    from neffbuild.cache.layouts.candidates import places_of
    from neffbuild.cache.layouts.handing_out import hand_out
    from neffbuild.cache.layouts.kernels import NKI_ROOT
    from neffbuild.cli.transfer import progress_line

    if not places_of(layout, manifest.entries):
        raise UnitsIncomplete(
            f"what was pulled has nothing for the layout {layout.name}: none of its "
            f"{len(manifest.entries)} entries holds files of it",
            value=layout.name,
            hint="take a cache over with `neffbuild import DIR --layout`, or compile for that engine, and "
            "push again",
        )
    with progress_line("write") as progress:
        return hand_out(
            layout,
            local,
            manifest.entries,
            into,
            nki_root=nki_cache or Path(NKI_ROOT),
            traces_root=traces,
            progress=progress,
        )


def handed_out_text(handed: HandedOut) -> str:
    """What was written into an engine's cache, for a person."""
    from neffbuild.report.text import counted, size

    counts = handed.layout.counts
    bad = [one for one in handed.layout.placed if one.reason is not None]
    lines = [f"{one.outcome.value} {one.place}: {one.reason}" for one in bad[:_SHOWN]]
    if len(bad) > _SHOWN:
        lines.append(f"… and {len(bad) - _SHOWN} more (--json lists them)")
    notes = [f"note: {one.place}: {note}" for one in handed.layout.placed for note in one.notes]
    lines += notes[:_SHOWN] + [f"warning: {text}" for text in handed.warnings]
    if len(notes) > _SHOWN:
        lines.append(f"… and {len(notes) - _SHOWN} more notes (--json lists them)")
    lines.append(
        f"{handed.layout.layout}: {counted(counts['written'], 'place')} written to {handed.root} "
        f"({size(handed.layout.bytes_written)}), {counts['present']} were there"
        + (f", {counts['locked']} locked" if counts["locked"] else "")
        + (f", {counts['refused']} refused" if counts["refused"] else "")
    )
    if handed.traces is not None:
        traces = handed.traces.counts
        lines.append(f"traces: {traces['written']} written, {traces['present']} were there")
    if not handed.hits:
        lines.append("next: look at what is locked or refused above, then pull again")
    return "\n".join(lines)
