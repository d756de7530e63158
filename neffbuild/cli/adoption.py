"""What `neffbuild import --layout` does: take over an engine's own cache, for a config."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neffbuild.config.errors import IntegrityError

if TYPE_CHECKING:
    from neffbuild.cache.layouts.adopting import Adopted
    from neffbuild.cache.layouts.layout import Found, Layout
    from neffbuild.cache.manifest import Manifest
    from neffbuild.config.build import CacheConfig

_SHOWN = 40


@dataclass(frozen=True, slots=True)
class TakenOver:
    """What was taken over of a layout, and of traces where that was asked for; `manifest` is the one of
    the config it was for."""

    layout: str
    adopted: Adopted
    traces: Adopted | None
    manifest: Manifest | None

    @property
    def parts(self) -> Iterator[Adopted]:
        yield self.adopted
        if self.traces is not None:
            yield self.traces

    @property
    def refused(self) -> list[Found]:
        """What no engine can have left there."""
        return [one for part in self.parts for one in part.found if one.state.value == "refused"]


def take_over(
    layout: Layout,
    root: Path,
    traces: Path | None,
    config_file: Path | None,
    settings: CacheConfig,
) -> TakenOver:
    """Adopt what is complete below `root`. With a config, its manifest names it from then on.

    Raises `IntegrityError` where signatures are required: an engine's cache has none.
    """
    from neffbuild.cache.directory import DirectoryStore
    from neffbuild.cache.layouts.adopting import adopt
    from neffbuild.cache.layouts.single_files import TRACES
    from neffbuild.cache.layouts.tree import Tree
    from neffbuild.cache.plan import store_plan_manifest
    from neffbuild.cli.transfer import progress_line
    from neffbuild.config.build import cache_directory
    from neffbuild.config.load import load_config
    from neffbuild.toolchain.planning import plan_config
    from neffbuild.toolchain.registry import file_checks, load_toolchain

    if settings.signature_required:
        raise IntegrityError(
            f"nothing in {root} is signed, and signatures are required: an engine's cache has none",
            value=str(root),
            hint="take it over where `cache.require_signature` is false, look at what it is, and push it "
            "with --key",
        )
    store = DirectoryStore(cache_directory(settings))
    plan = None
    if config_file is not None:
        config = load_config(config_file)
        plan = plan_config(config, load_toolchain(config.toolchain.name), store)
    with progress_line("import") as progress:
        adopted = adopt(layout, Tree(root), store, checks=file_checks(), progress=progress)
        traced = None if traces is None else adopt(TRACES, Tree(traces), store, progress=progress)
    manifest = None
    if plan is not None:
        keys = [*adopted.entries, *(traced.entries if traced else ())]
        manifest = store_plan_manifest(plan, store, keys)
    return TakenOver(layout.name, adopted, traced, manifest)


def adoption_document(source: str, taken: TakenOver) -> dict[str, Any]:
    """`neffbuild.import/1`, with what is of a layout alone under `layout`."""
    parts = list(taken.parts)
    named = 0 if taken.manifest is None else 1
    return {
        "schema": "neffbuild.import/1",
        "source": source,
        "ok": not taken.refused,
        "entries": {
            "whole": sum(len(part.entries) for part in parts),
            "imported": sum(len(part.imported) for part in parts),
        },
        "manifests": {"whole": named, "imported": named},
        "configs": {"whole": named, "imported": named},
        "runs": {"whole": 0, "imported": 0},
        "unsigned_entries": 0,
        "blobs_copied": sum(part.blobs_copied for part in parts),
        "bytes_copied": sum(part.bytes_copied for part in parts),
        "problems": [
            {"kind": "bad_entry", "key": one.place, "detail": one.reason or "refused"}
            for one in taken.refused
        ],
        "layout": {
            "name": taken.layout,
            "counts": taken.adopted.counts,
            "places": [one.document() for one in taken.adopted.found],
            "strays": list(taken.adopted.strays),
            "traces": None if taken.traces is None else taken.traces.counts,
            "manifest": None if taken.manifest is None else taken.manifest.digest,
        },
    }


def adoption_text(source: str, taken: TakenOver) -> str:
    """The same for a person: what is not taken over with its reason, then sums."""
    from neffbuild.report.text import size

    adopted = taken.adopted
    lines = [
        f"{one.state.value} {one.place}: {one.reason}"
        for one in adopted.found
        if one.reason is not None
    ]
    lines += [f"note: {one.place}: {note}" for one in adopted.found for note in one.notes]
    lines += [f"note: {stray}" for stray in adopted.strays]
    if len(lines) > _SHOWN:
        lines[_SHOWN:] = [f"… and {len(lines) - _SHOWN} more (--json lists them)"]
    counts = ", ".join(f"{count} {state}" for state, count in adopted.counts.items() if count)
    lines.append(f"{source} as {taken.layout}: {counts or 'nothing'}")
    new = sum(len(part.imported) for part in taken.parts)
    there = sum(len(part.entries) for part in taken.parts) - new
    copied = sum(part.bytes_copied for part in taken.parts)
    lines.append(
        f"took over {new} {'entry' if new == 1 else 'entries'} ({size(copied)} copied)"
        + (f"; {there} were here already" if there else "")
    )
    if taken.manifest is None:
        lines.append("no config names them: with --config CONFIG, `push CONFIG` carries them")
    else:
        lines.append(
            "next: neffbuild push CONFIG --to URL --tag T (--allow-partial where units lack)"
        )
    return "\n".join(lines)
