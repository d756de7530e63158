"""What the store has of units beside the one that is compiled, where its toolchain can use it."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

from neffbuild.cache.catalog import read_hits
from neffbuild.cache.entry import Entry
from neffbuild.cache.store import Store
from neffbuild.config.errors import NeffbuildError
from neffbuild.toolchain.base import BESIDE, Toolchain, Unit


def lay_out_beside(toolchain: Toolchain, unit: Unit, store: Store, shared: Path) -> None:
    """Lay the files of stored units that `Toolchain.beside` names out below `shared`, for all units of the
    farm: each unit's whole or not at all. One that cannot be read is left out, it only saves work."""
    asked = getattr(toolchain, "beside", None)
    keys = asked(unit) if asked is not None else ()
    place = shared / BESIDE
    missing = [key for key in keys if not (place / key).exists()]
    if not missing:
        return
    place.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(NeffbuildError):
        for key, entry in read_hits(store, missing).items():
            _lay_out(store, entry, place / key)


def _lay_out(store: Store, entry: Entry, target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=".", dir=target.parent) as folder:
        whole = Path(folder, "whole")
        for name, record in entry.files.items():
            path = whole / name
            path.parent.mkdir(parents=True, exist_ok=True)
            store.fetch_blob(record.digest, record.size, path)
        with contextlib.suppress(OSError):  # another unit's worker was as quick
            whole.rename(target)
