"""A unit's log: the first and the last of what its processes wrote, however much that was."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import IO

HALF_BYTES = 512 * 1024
"""What is kept of the beginning, and as much again of the end."""
TAIL_BYTES = 8 * 1024
"""What failure records quote of the end."""


class UnitLog:
    """Written to as output arrives; `close` adds the end of what did not fit.

    A log that cannot be written (a full disk) is given up: it must not cost the unit.
    """

    def __init__(self, path: Path) -> None:
        self._file: IO[bytes] | None = None
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("wb", buffering=0)
        self._room = HALF_BYTES
        self._tail = bytearray()
        self._dropped = 0

    def write(self, data: bytes) -> None:
        head = data[: self._room]
        self._room -= len(head)
        self._append(head)
        self._tail += data[len(head) :]
        excess = len(self._tail) - HALF_BYTES
        if excess > 0:
            del self._tail[:excess]
            self._dropped += excess

    def close(self) -> None:
        if self._dropped:
            self._append(f"\n[… {self._dropped} bytes left out …]\n".encode())
        self._append(self._tail)
        if self._file is not None:
            self._file.close()

    def _append(self, data: bytes | bytearray) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.write(data)


def log_tail(path: Path) -> str:
    """The end of a log as text, for failure records; empty when there is no log."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
