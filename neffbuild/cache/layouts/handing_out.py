"""Everything an engine needs of some entries, each part where the engine looks for it."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neffbuild.cache.copying import Progress
from neffbuild.cache.directory import DirectoryStore
from neffbuild.cache.entry import Entry
from neffbuild.cache.layouts.candidates import places_of
from neffbuild.cache.layouts.exporting import export
from neffbuild.cache.layouts.kernels import NKI_ROOT
from neffbuild.cache.layouts.layout import Layout
from neffbuild.cache.layouts.placed import Exported, Outcome
from neffbuild.cache.layouts.single_files import KERNELS, TRACES


@dataclass(frozen=True, slots=True)
class HandedOut:
    """What became of the entries of a layout, of the kernel binaries they name, and of traces, which are
    handed out only where that was asked for. `warnings` are about kernels, which hits do without, and about
    traces."""

    root: Path
    layout: Exported
    kernels: Exported
    traces: Exported | None
    warnings: tuple[str, ...]

    @property
    def hits(self) -> bool:
        """Whether the engine finds everything that was asked for."""
        return self.layout.hits and (self.traces is None or self.traces.hits)

    def document(self) -> dict[str, Any]:
        return {
            "name": self.layout.layout,
            "into": str(self.root),
            "hits": self.hits,
            "counts": self.layout.counts,
            "places": [one.document() for one in self.layout.placed],
            "kernels": self.kernels.counts,
            "traces": self.traces.counts if self.traces is not None else None,
            "bytes_written": self.layout.bytes_written
            + self.kernels.bytes_written
            + (self.traces.bytes_written if self.traces is not None else 0),
            "warnings": list(self.warnings),
        }


def hand_out(
    layout: Layout,
    store: DirectoryStore,
    entries: Mapping[str, Entry],
    root: Path,
    *,
    nki_root: Path = Path(NKI_ROOT),
    traces_root: Path | None = None,
    progress: Progress | None = None,
) -> HandedOut:
    """Write what is missing below `root`; kernel binaries first, where graphs name them. Traces are pickles:
    `traces_root` is for whoever has checked who made them. Raises as `export` does."""
    kernels, warnings = Exported(KERNELS.name), []
    if any(places_of(KERNELS, entries)):
        refusal = _refusal(nki_root)
        if refusal is None:
            kernels = export(KERNELS, store, entries, nki_root, progress=progress)
            warnings = [
                f"kernel {nki_root / one.place}: {one.reason}"
                for one in kernels.placed
                if one.outcome in (Outcome.REFUSED, Outcome.LOCKED)
            ]
            if str(nki_root) != NKI_ROOT:
                warnings.append(
                    f"kernel binaries are in {nki_root}; graphs name them below {NKI_ROOT}, so neuronx-cc "
                    "finds them only where that leads here"
                )
        else:
            warnings = [
                f"no kernel binary was written, since {refusal}; finished NEFFs do without, and "
                "neuronx-cc would not find them (NCC_EVRF059)"
            ]
    exported = export(layout, store, entries, root, progress=progress)
    traces = None
    if traces_root is not None:
        traces = export(TRACES, store, entries, traces_root, progress=progress)
        warnings += [
            f"trace {one.place}: {one.reason}" for one in traces.placed if one.reason is not None
        ]
    return HandedOut(root, exported, kernels, traces, tuple(warnings))


def _refusal(folder: Path) -> str | None:
    """Why nothing may be written to a folder that lies where everybody can write."""
    try:
        status = folder.lstat()
    except OSError:
        return None
    if not stat.S_ISDIR(status.st_mode):
        return f"{folder} is no folder"
    if status.st_uid not in (os.getuid(), 0):
        return f"{folder} belongs to user {status.st_uid}"
    return None
