"""Files of an engine's own cache that came with its programs, put where the engine looks for them.

An entry may hold files below `engine/<engine>/`: what else the engine would work out at its start, such
as vLLM's `modelinfos/`. Engines validate them themselves; a file that is there already is left alone.
What vLLM Neuron keeps in its compile cache is written as `neffbuild.cache.layouts` does it: whole entries.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from neffbuild.cache.directory import DirectoryStore
from neffbuild.cache.entry import FileRecord
from neffbuild.cache.layouts.candidates import places_of
from neffbuild.cache.layouts.engine_root import compile_cache
from neffbuild.cache.layouts.handing_out import hand_out
from neffbuild.cache.layouts.placed import Outcome
from neffbuild.cache.layouts.vllm_neuron import VllmNeuron
from neffbuild.cache.manifest import Manifest
from neffbuild.config.errors import NeffbuildError
from neffbuild.toolchain.base import ENGINE_FILES

_log = logging.getLogger(__name__)


def lay_out_engine_files(
    store: DirectoryStore, manifest: Manifest, roots: Mapping[str, Path]
) -> int:
    """Copy the engines' files of a manifest below `roots` (engine → the root of its cache) where they
    are not there yet. Returns how many were copied.

    An engine does without: what cannot be written is a warning.
    """
    copied = 0
    for target, record in dict(_wanted(manifest, roots)).items():
        if target.exists():
            continue
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            store.fetch_blob(record.digest, record.size, temporary)
            temporary.replace(target)
        except (OSError, NeffbuildError) as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            _log.warning("%s is left to the engine: %s", target, error)
            continue
        copied += 1
    return copied


def lay_out_compile_cache(
    store: DirectoryStore, manifest: Manifest, environment: Mapping[str, str]
) -> tuple[str, ...]:
    """Write what a manifest has for vLLM Neuron's compile cache to where that engine looks; what is no hit
    there afterwards, with the reason.

    Unlike the files above, the engine does not do without. Raises as
    `neffbuild.cache.layouts.exporting.export` does.
    """
    layout = VllmNeuron()
    if not places_of(layout, manifest.entries):
        return ()
    handed = hand_out(layout, store, manifest.entries, compile_cache(environment))
    for warning in handed.warnings:
        _log.warning("%s", warning)
    return tuple(
        f"{one.place} ({one.outcome.value}: {one.reason})"
        for one in handed.layout.placed
        if one.outcome in (Outcome.LOCKED, Outcome.REFUSED)
    )


def vllm_cache_root(environment: Mapping[str, str]) -> Path:
    """Where vLLM keeps its caches, by its own rule."""
    caches = environment.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(environment.get("VLLM_CACHE_ROOT") or f"{caches}/vllm").expanduser()


def _wanted(manifest: Manifest, roots: Mapping[str, Path]) -> Iterator[tuple[Path, FileRecord]]:
    for entry in manifest.entries.values():
        for name, record in entry.files.items():
            folder, _, rest = name.partition("/")
            engine, _, below = rest.partition("/")
            if folder == ENGINE_FILES and below and engine in roots:
                yield roots[engine] / below, record
