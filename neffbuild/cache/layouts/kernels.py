"""Kernel binaries that a graph names by absolute path.

A custom call of an NKI kernel holds JSON in base64 (`backend_config`), and in that the path of the kernel's
binary (`klir_binary.binary`), outside the engine's cache. neuronx-cc looks for it there when it compiles the
graph (NCC_EVRF059 when it is gone); a finished NEFF does without.

The graph is somebody else's word: only names below the one folder that kernels are kept in are believed.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

NKI_LAYOUT = "nki-intermediate-cache"
"""The folder of entries for kernel binaries."""

NKI_ROOT = "/var/tmp/nki-intermediate-cache"
"""Where graphs say that kernel binaries are."""

_RUN = re.compile(rb"[A-Za-z0-9+/]{24,}")
_STARTS = (b"ey", b"ew")  # base64 of an opening brace
_LEAD = 8
"""Bytes in front of the JSON that may look like base64 too: tag and length of the field that holds it."""
_MOST_RUN = 1 << 26


def kernel_paths(graph: bytes) -> set[str]:
    """The absolute paths of all kernel binaries that a graph (HLO, or StableHLO as text) names."""
    found: set[str] = set()
    for run in _RUN.finditer(graph):
        if run.end() - run.start() <= _MOST_RUN:
            for document in _documents(run[0]):
                found.update(_binaries(document))
    return {path for path in found if path.startswith("/")}


def path_strings(document: Any) -> set[str]:
    """Every string in a JSON document that is a path below `NKI_ROOT`."""
    return {text for text in _strings(document) if below_nki_root(text) is not None}


def below_nki_root(path: str) -> str | None:
    """The part of a kernel's path below `NKI_ROOT`; None where it is elsewhere, or leads out again."""
    if "\0" in path or ".." in path.split("/"):
        return None
    try:
        below = str(PurePosixPath(path).relative_to(NKI_ROOT))
    except ValueError:
        return None
    return None if below == "." else below


def _documents(run: bytes) -> Iterator[Any]:
    for lead in range(min(_LEAD, len(run))):
        if run[lead : lead + 2] not in _STARTS:
            continue
        text = run[lead:]
        try:
            decoded = base64.b64decode(text[: len(text) // 4 * 4] + _rest(text))
            yield json.JSONDecoder().raw_decode(decoded.decode(errors="replace"))[0]
        except (ValueError, binascii.Error, RecursionError):
            continue


def _rest(text: bytes) -> bytes:
    """The last characters of base64 as a whole group."""
    left = text[len(text) // 4 * 4 :]
    return left.ljust(4, b"=") if len(left) > 1 else b""


def _binaries(document: Any) -> Iterator[str]:
    for name, value in _members(document):
        if name == "klir_binary" and isinstance(value, dict):
            path = value.get("binary")
            if isinstance(path, str):
                yield path


def _members(document: Any) -> Iterator[tuple[str, Any]]:
    pending = [document]
    while pending:
        one = pending.pop()
        if isinstance(one, dict):
            yield from one.items()
            pending.extend(one.values())
        elif isinstance(one, list):
            pending.extend(one)


def _strings(document: Any) -> Iterator[str]:
    pending = [document]
    while pending:
        one = pending.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, dict):
            pending.extend(one.values())
        elif isinstance(one, list):
            pending.extend(one)
