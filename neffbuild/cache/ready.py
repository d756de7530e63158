"""The ready file: a file whose presence says that everything a pull was for is there and whole.

For whatever starts a server once its artifacts are there: a readiness probe, a wait loop, an init
container. It is removed first and written last, so it never speaks of an earlier pull.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from neffbuild.cache import files, filesystem
from neffbuild.config.errors import StoreError


def withdraw(path: Path) -> None:
    """Remove a ready file. Raises `StoreError` when it cannot be removed, and for anything but a file or
    a link to one: root could unlink `/dev/null`."""
    with files.refusals("remove", path):
        special = path.exists() and not path.is_file()
        if not special:
            filesystem.unlink(path)
    if special:
        raise StoreError(
            f"cannot use {path} as a ready file: it is there and no regular file",
            value=str(path),
            hint="name a file of its own, in a folder that whoever waits for it can see",
        )


def announce(path: Path, document: Mapping[str, Any]) -> None:
    """Write a ready file: there at once and whole. Raises `StoreError` when it cannot be written."""
    text = json.dumps(document, indent=2) + "\n"
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}")
    with files.refusals("write", path):
        try:
            files.write_synced(temporary, text.encode())
            filesystem.rename(temporary, path)
        finally:
            filesystem.unlink(temporary)
        filesystem.sync(path.parent)
