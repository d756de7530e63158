"""Running neuronx-cc on a captured graph: in a folder of its own, watched, and not believed.

The compiler leaves its scratch tree where it runs, and its wrappers were seen to report success for a
compile that was killed; so it runs in the unit's scratch folder, and the NEFF itself is read.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from neffbuild.toolchain.base import Artifact
from neffbuild.toolchain.neuronx.command import LOG
from neffbuild.toolchain.neuronx.errors import failure_of, no_neff
from neffbuild.toolchain.neuronx.neff import Neff, NeffError, read_neff_file
from neffbuild.toolchain.neuronx.program import run_program
from neffbuild.toolchain.neuronx.routes import Route

_FOLDER = "neuronx-cc"
_KEPT_BYTES = 256 << 10
"""Of the end of what the compiler prints, and of what it logs: errors come last."""


def compile_module(
    module: bytes, route: Route, command: Sequence[str], compiler: str, scratch: Path
) -> Artifact:
    """Compile `module` with the program `compiler` below `scratch`; `command` are its words, the first
    its name. What it prints goes to this process's output.

    Raises `CompilerFailure` for anything but a whole NEFF.
    """
    folder = scratch / _FOLDER
    folder.mkdir()
    (folder / route.graph).write_bytes(module)
    started = time.monotonic()
    ended = run_program([compiler, *command[1:]], folder)
    status, said = ended.status, ended.output
    seconds = time.monotonic() - started
    if status != 0:
        logged = _end_of(folder / LOG)
        _show(logged, f"the end of {LOG}")
        raise failure_of(status, said + "\n" + logged.decode(errors="replace"))
    neff = _whole(folder / route.neff)
    return Artifact(
        files={route.neff: folder / route.neff},
        statistics={
            "compiler_seconds": seconds,
            "command": list(command),
            "graph_bytes": len(module),
            "neff": neff_facts(neff),
        },
    )


def neff_facts(neff: Neff) -> dict[str, Any]:
    """What entries record of a NEFF."""
    return {
        **neff.header.document(),
        "members": len(neff.members),
        "payload_bytes": neff.payload_bytes,
    }


def _whole(path: Path) -> Neff:
    if not path.is_file():
        raise no_neff(f"it left no {path.name}")
    try:
        return read_neff_file(path)
    except NeffError as error:
        raise no_neff(f"{path.name} is no whole NEFF: {error.message}") from error


def _end_of(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _KEPT_BYTES))
            return file.read(_KEPT_BYTES)
    except OSError:
        return b""


def _show(text: bytes, what: str) -> None:
    if text:
        sys.stdout.write(f"--- {what}\n")
        sys.stdout.flush()
        sys.stdout.buffer.write(text.rstrip() + b"\n")
        sys.stdout.flush()
