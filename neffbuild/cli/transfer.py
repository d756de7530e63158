"""What push and pull share: whom to believe, and how far they are."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from neffbuild.config.build import CacheConfig

if TYPE_CHECKING:
    from neffbuild.cache.tag import Trust
    from neffbuild.cache.transfer import Progress


def trust_of(cache: CacheConfig) -> Trust:
    """The config's trust settings as `neffbuild.cache.tag` takes them."""
    from neffbuild.cache.tag import Trust

    return Trust(require_signature=cache.require_signature, min_sequence=cache.min_sequence)


@contextmanager
def progress_line(what: str) -> Iterator[Progress | None]:
    """A progress bar with bytes, rate and time left; None when stderr is not a terminal."""
    if not sys.stderr.isatty() or os.environ.get("CI"):
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
