"""One compile per key and host, however many processes want it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from neffbuild.cache.catalog import Hit, commit_entry, read_entry
from neffbuild.cache.entry import Entry
from neffbuild.cache.lock import host_lock
from neffbuild.cache.store import Store

Build = Callable[[], tuple[Entry, Mapping[str, Path]]]
"""Compiles: returns the entry and where its files lie."""


def build_once(store: Store, key: str, build: Build, *, wait: float) -> tuple[Entry, bool]:
    """The entry of a key, built by this process only if no other of this host has done so.

    Returns the entry and whether this process built it. Whoever waits takes over when the builder
    dies. Raises `LockTimeout` naming the builder when it neither finishes nor dies within `wait`
    seconds, and whatever `build` raises.
    """
    found = read_entry(store, key)
    if isinstance(found, Hit):
        return found.entry, False
    with host_lock(f"unit {key} of {store.url}", wait=wait):
        found = read_entry(store, key)
        if isinstance(found, Hit):
            return found.entry, False
        entry, files = build()
        return commit_entry(store, entry, files), True
