"""What push and pull share: showing how far they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from neffbuild.cli import output

if TYPE_CHECKING:
    from neffbuild.cache.copying import Progress


@contextmanager
def progress_line(what: str) -> Iterator[Progress | None]:
    """A progress bar with bytes, rate and time left; None when stderr is not a terminal."""
    if not output.is_watched():
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
