"""Running another program inside a worker: what it prints goes on to the worker's output, and its end is
kept to tell a failure's cause from."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_READ_BYTES = 1 << 16
_LAST_WORDS_SECONDS = 2.0
_KEPT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended: the exit status, as `subprocess` has it, and the end of what was printed."""

    status: int
    output: str


def run_program(
    command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
) -> Ended:
    """Run a command in `folder` and wait for its end; without `environment` it has this process's. Raises
    `OSError` where it cannot be started."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        bufsize=0,
    )
    assert process.stdout is not None
    said = bytearray()
    copying = threading.Thread(target=_copy, args=(process.stdout, said), daemon=True)
    copying.start()
    status = process.wait()
    # What the program leaves running may hold its output open; that is not waited for.
    copying.join(_LAST_WORDS_SECONDS)
    return Ended(status, bytes(said).decode(errors="replace"))


def _copy(source: IO[bytes], end: bytearray) -> None:
    while piece := source.read(_READ_BYTES):
        sys.stdout.buffer.write(piece)
        sys.stdout.flush()
        end += piece
        del end[:-_KEPT_BYTES]
