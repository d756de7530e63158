"""Copying blobs and filing entries between stores: what push, pull, tiers and imports share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from neffbuild.cache.catalog import Hit, entry_name, read_entries, write_over
from neffbuild.cache.entry import Entry
from neffbuild.cache.store import Store

WORKERS = 8
"""Blobs copied at once. Copying waits for disks and networks, and hashing releases the interpreter."""

Item = TypeVar("Item")

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

    in_parallel(counted, _largest_first(sizes), workers)


def in_parallel(work: Callable[[Item], object], items: Iterable[Item], workers: int) -> None:
    """Call `work` for every item, in threads; the first error, or an interrupt, ends it: what has not
    begun is not begun."""
    with ThreadPoolExecutor(workers, thread_name_prefix="copy") as pool:
        running = [pool.submit(work, item) for item in items]
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
