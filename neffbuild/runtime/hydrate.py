"""`python -m neffbuild.runtime.hydrate`: fetch what `NEFFBUILD_MANIFEST` names, once per host.

A process of its own: it can be ended at any moment (a store has no half-written state), and leaves
neither threads, locks nor S3 clients behind in the engine, which forks. The answer is one line of
JSON on stdout.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from neffbuild.cache import ready
from neffbuild.cache.canonical import digest_document
from neffbuild.cache.catalog import read_manifest
from neffbuild.cache.directory import DirectoryStore
from neffbuild.cache.index import Fit
from neffbuild.cache.lock import host_lock
from neffbuild.cache.manifest import Manifest
from neffbuild.cache.open import open_store
from neffbuild.cache.records import note_hydration, seen_hydration
from neffbuild.cache.tag import TagStatement
from neffbuild.cache.transfer import pull
from neffbuild.cache.trust import trust_of
from neffbuild.config.build import CacheConfig, cache_directory
from neffbuild.config.errors import NeffbuildError
from neffbuild.runtime.engine_files import (
    lay_out_compile_cache,
    lay_out_engine_files,
    vllm_cache_root,
)
from neffbuild.runtime.hydration import Hydration, HydrationSettings
from neffbuild.toolchain.hosts import toolchain_fit

_PR_SET_PDEATHSIG = 1
_SERVED_BY_VLLM = 1000
"""Above every rank that a toolchain gives: an engine is served what was built for it."""


@dataclass(frozen=True, slots=True)
class Hydrated:
    """A manifest that is whole in the local cache as far as it goes. `lacking` is what an engine does not
    find in its own compile cache all the same, with the reason."""

    manifest: Manifest
    hydration: Hydration
    statement: TagStatement | None = None
    lacking: tuple[str, ...] = ()


def hydrate(settings: HydrationSettings, environment: Mapping[str, str]) -> Hydrated:
    """Pull what suits this host into the local cache, unless another process of this host does or did
    since this call began. Units that the manifest lacks are no error here.

    Raises as `neffbuild.cache.transfer.pull` does, and `LockTimeout` when another process took longer
    than `settings.wait` seconds.
    """
    began, clock = time.time(), time.monotonic()
    cache = CacheConfig(keys=settings.keys, min_sequence=settings.min_sequence)
    trust = trust_of(cache)
    reference = settings.reference
    source = reference.source(cache.name)
    remote, local = open_store(reference.url), DirectoryStore(cache_directory(cache))
    if settings.ready_file is not None:
        ready.withdraw(settings.ready_file)
    # Whoever believes other keys, or asks another store, may not take over what was hydrated.
    asked = digest_document([remote.url, str(source), list(cache.keys), cache.min_sequence])
    lock = f"the hydration of {local.url} from {reference} ({asked[:12]})"
    with host_lock(lock, wait=settings.wait):
        manifest = _hydrated_since(local, asked, began)
        shared = manifest is not None
        statement, blobs, size = None, 0, 0
        if manifest is None:
            pulled = pull(remote, local, source, fit=_fit, trust=trust, allow_partial=True)
            manifest, statement = pulled.manifest, pulled.statement
            blobs, size = pulled.blobs_copied, pulled.bytes_copied
            note_hydration(local, asked, pulled.digest)
    lay_out_engine_files(local, manifest, {"vllm": vllm_cache_root(environment)})
    lacking = lay_out_compile_cache(local, manifest, environment)
    hydration = Hydration(
        reference=str(environment.get("NEFFBUILD_MANIFEST", reference)),
        host=socket.gethostname(),
        manifest=manifest.digest,
        seconds=round(time.monotonic() - clock, 3),
        blobs_copied=blobs,
        bytes_copied=size,
        hits=len(manifest.entries),
        misses=len(manifest.missing),
        shared=shared,
    )
    if settings.ready_file is not None and not lacking:
        ready.announce(
            settings.ready_file, ready_document(remote.url, hydration, manifest, statement)
        )
    return Hydrated(manifest, hydration, statement, lacking)


def ready_document(
    url: str, hydration: Hydration, manifest: Manifest, statement: TagStatement | None
) -> dict[str, Any]:
    """What the ready file holds: the document of `neffbuild pull`."""
    return {
        "schema": "neffbuild.pull/1",
        "url": url,
        "manifest": hydration.manifest,
        "sequence": statement.sequence if statement else None,
        "platform": dict(manifest.platform),
        "units": hydration.hits,
        "missing": hydration.misses,
        "blobs_copied": hydration.blobs_copied,
        "bytes_copied": hydration.bytes_copied,
    }


def _hydrated_since(local: DirectoryStore, asked: str, began: float) -> Manifest | None:
    """What another process hydrated while this one waited for it."""
    noted = seen_hydration(local, asked)
    if noted is None or noted.time < began:
        return None
    return read_manifest(local, noted.manifest)


def _fit(platform: Mapping[str, Any]) -> Fit:
    fit = toolchain_fit(platform)
    if fit.refusal is None and "vllm" in (platform.get("versions") or {}):
        return Fit(None, fit.rank + _SERVED_BY_VLLM)
    return fit


def _end_with(engine: int) -> None:
    """Nobody waits for an answer any more when the engine is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != engine:
        os._exit(1)


def main() -> int:
    """Print `{"hydration": …, "missing": […]}` or `{"error": {"kind", "message", "hint", "exit_status"}}`;
    0 either way."""
    _end_with(os.getppid())
    logging.basicConfig(format="neffbuild: %(levelname)s: %(message)s", stream=sys.stderr)
    answer: dict[str, Any]
    try:
        settings = HydrationSettings.from_environment(os.environ)
        assert settings is not None
        done = hydrate(settings, os.environ)
    except NeffbuildError as error:
        answer = {
            "error": {
                "kind": error.kind,
                "message": error.message,
                "hint": error.hint,
                "exit_status": error.exit_status,
            }
        }
    else:
        missing = [*(unit.bucket_name for unit in done.manifest.missing), *done.lacking]
        answer = {"hydration": json.loads(done.hydration.to_json()), "missing": missing}
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
