"""A stored program as torch wants what a backend returns: callable, and serialisable by reference.

A serving engine that keeps what Dynamo traced (vLLM does, in its own cache) asks for the program as bytes.
They name the entry; the program itself stays in the store, and is checked there like any other.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch._dynamo.aot_compile_types import SerializableCallable

from neffbuild.cache.canonical import canonical_json, parse_json, require_digest, require_object
from neffbuild.cache.catalog import Hit, read_entry
from neffbuild.cache.directory import DirectoryStore
from neffbuild.cache.entry import Entry
from neffbuild.cache.loaded import materialise
from neffbuild.config.errors import IntegrityError, MissingUnit
from neffbuild.runtime.backend_settings import BackendSettings, backend_settings
from neffbuild.runtime.counters import Counters
from neffbuild.toolchain.inductor.executable import load_executable

SCHEMA = "neffbuild.program-reference/1"

counters = Counters()
"""Of this process: graphs found, graphs not found, graphs compiled."""


class StoredProgram(SerializableCallable):
    """The program of an entry, loaded."""

    def __init__(self, entry: Entry, run: Callable[..., Any]) -> None:
        self.entry = entry
        self._run = run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    @classmethod
    def serialize_compile_artifacts(cls, fn: StoredProgram) -> bytes:
        return canonical_json(
            {"schema": SCHEMA, "key": fn.entry.key, "graph_digest": fn.entry.graph_digest}
        )

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> StoredProgram:
        """The program that `serialize_compile_artifacts` named, by the settings of the environment.

        Raises `MissingUnit` when the store has it no more, `IntegrityError` when it is damaged,
        `ToolchainRefusal` when this process cannot run it.
        """
        reference = require_object(parse_json(data, "a reference to a stored program"))
        if reference.get("schema") != SCHEMA:
            raise IntegrityError(f"not a reference to a stored program: {reference!r:.200}")
        key = require_digest(reference["key"])
        settings = backend_settings({}, os.environ)
        entry = _entry(settings, key)
        if entry is None or entry.graph_digest != reference["graph_digest"]:
            raise MissingUnit(
                f"the program {key} that was traced before is not in {settings.store.url}",
                field="key",
                value=key,
                hint="it is captured anew, and found or compiled as for a first start",
            )
        program = load_program(settings.store, entry)
        counters.hits += 1
        return program

    def finalize_loading(self, _config: object) -> None:
        """vLLM calls this on what it read from its own cache; there is nothing left to do."""


def load_program(store: DirectoryStore, entry: Entry) -> StoredProgram:
    """Raises as `StoredProgram.deserialize_compile_artifacts` does."""
    files = materialise(store, entry)
    return StoredProgram(entry, load_executable(files, entry.recipe).call_graph)


def _entry(settings: BackendSettings, key: str) -> Entry | None:
    for manifest in settings.manifests:
        if key in manifest.entries:
            return manifest.entries[key]
    found = read_entry(settings.store, key)
    return found.entry if isinstance(found, Hit) else None
