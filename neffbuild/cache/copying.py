"""Copying blobs and filing entries between stores: what push, pull, tiers and imports share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from neffbuild.cache.catalog import Hit, entry_name, read_entries, write_over
from neffbuild.cache.entry import Entry
from neffbuild.cache.store import Store

WORKERS = 8
"""Blobs copied at once. Copying waits for disks and networks, and hashing releases the interpreter."""

Progress = Callable[[int, int], None]
"""(bytes copied so far, bytes to copy in all); called from any thread, one call at a time."""


def copy_blobs(
    sizes: Mapping[str, int],
    copy: Callable[[str], None],
    workers: int,
    progress: Progress | None,
) -> None:
    """Call `copy` for every blob (digest → size in bytes), in parallel, the largest first; the first
    error ends it."""
    total = sum(sizes.values())
    done = 0
    counting = threading.Lock()

    def counted(digest: str) -> None:
        nonlocal done
        copy(digest)
        with counting:
            done += sizes[digest]
            if progress is not None:
                progress(done, total)

    with ThreadPoolExecutor(workers, thread_name_prefix="blob") as pool:
        running = [pool.submit(counted, digest) for digest in _largest_first(sizes)]
        try:
            for future in running:
                future.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def write_entries(store: Store, entries: Mapping[str, Entry]) -> None:
    """File entries whose blobs are there already. A whole one that somebody else filed stays."""
    for key, found in read_entries(store, entries).items():
        if not isinstance(found, Hit):
            # Not written means that somebody else has just done it: theirs is as good.
            write_over(store, entry_name(key), entries[key].to_json(), found)


def blobs_of(entries: Mapping[str, Entry]) -> dict[str, int]:
    """digest → size in bytes of every blob that the entries need."""
    return {blob: size for entry in entries.values() for blob, size in entry.blobs.items()}


def file_modes(entries: Mapping[str, Entry]) -> dict[str, int]:
    """digest → permission bits, of every file of the entries."""
    return {
        record.digest: record.mode for entry in entries.values() for record in entry.files.values()
    }


def _largest_first(sizes: Mapping[str, int]) -> list[str]:
    return sorted(sizes, key=lambda digest: (-sizes[digest], digest))
