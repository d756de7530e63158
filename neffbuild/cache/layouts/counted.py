"""How many bytes were copied, by several threads together."""

from __future__ import annotations

import threading

from neffbuild.cache.copying import Progress


class Counted:
    """Bytes copied of `total`, told to `progress` one call at a time."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self.done = 0
        self._progress = progress
        self._total = total
        self._lock = threading.Lock()

    def add(self, size: int) -> None:
        with self._lock:
            self.done += size
            if self._progress is not None:
                self._progress(self.done, self._total)
