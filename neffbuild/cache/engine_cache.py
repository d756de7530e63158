"""The compile cache of vLLM Neuron, looked through without believing or following anything in it.

An entry is a folder named by 32 hex digits. The engine takes it for a hit when `graph.hlo`, a `graph_….neff`,
`.compilation_complete` and a `.artifact_metadata_v….json` are there. What capture leaves lies in a folder of
each rank below it.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from neffbuild.config.errors import ConfigError
from neffbuild.grid.engine_entries import EngineEntry

_ENTRY = re.compile(r"[0-9a-f]{32}")
_RANK = re.compile(r"([\w-]{1,100}\.)?rank[0-9]{1,6}")
_METADATA = re.compile(r"\.artifact_metadata_v[0-9]{1,4}\.json")
_MOST_BYTES = 64 << 20
"""Of one text. A graph of many layers has some megabytes."""


def engine_entries(root: Path) -> Iterator[EngineEntry]:
    """The entries in an engine's cache, by name. Raises `ConfigError` for a folder that is none."""
    try:
        names = sorted(one.name for one in root.iterdir() if _ENTRY.fullmatch(one.name))
    except OSError as error:
        raise ConfigError(
            f"cannot read {root}: {error.strerror}",
            field="--engine-cache",
            value=str(root),
            hint="name the engine's cache, $VLLM_CACHE_ROOT/neuron/compile_cache by default",
        ) from error
    for name in names:
        try:
            yield _entry(root / name)
        except OSError as error:
            yield EngineEntry(name, problem=f"it cannot be read: {error.strerror}")


def _entry(folder: Path) -> EngineEntry:
    names = {one.name for one in folder.iterdir()}
    ranks = sorted(name for name in names if _RANK.fullmatch(name))
    places = [folder, *(folder / rank for rank in ranks)]
    metadata = min((name for name in names if _METADATA.fullmatch(name)), default=None)
    return EngineEntry(
        folder.name,
        example_inputs=_first_text(places, "example_inputs.txt"),
        graph=_first_text(places, "fxgraph.txt"),
        finished=metadata is not None
        and {"graph.hlo", ".compilation_complete"} <= names
        and any(name.startswith("graph_") and name.endswith(".neff") for name in names),
        stated_key=_stated_key(folder / metadata) if metadata else None,
    )


def _first_text(places: list[Path], name: str) -> str | None:
    return next((text for place in places if (text := _text(place / name)) is not None), None)


def _stated_key(path: Path) -> str | None:
    try:
        document = json.loads(_text(path) or "null")
    except (ValueError, RecursionError):
        return None
    key = document.get("cache_key") if isinstance(document, dict) else None
    return key[:64] if isinstance(key, str) else None


def _text(path: Path) -> str | None:
    """The text of a regular file; None where there is none. Links are not followed."""
    try:
        # A pipe would keep its reader waiting.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            return None
        return file.read(_MOST_BYTES).decode("utf-8", "replace")
