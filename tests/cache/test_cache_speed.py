"""Asking for thousands of keys at once stays cheap. CPU time is asserted: other processes of a shared
machine do not count in it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from neffbuild.cache.catalog import entry_name, read_entries, stored_keys
from neffbuild.cache.directory import DirectoryStore
from neffbuild.cache.entry import Entry, FileRecord

COUNT = 10_000
PROGRAMS = 1_000
ARCHITECTURE = {f"field_{number}": [number, number * 7, "text"] for number in range(50)}
SERVE = {f"option_{number}": {"a": number, "b": "text"} for number in range(60)}


def unit(number: int) -> Entry:
    content = b"program %d" % (number % PROGRAMS)
    return Entry(
        recipe={"shape": number, "model": ARCHITECTURE, "serve": SERVE},
        files={
            "model.so": FileRecord(hashlib.sha256(content).hexdigest(), len(content)),
            "binding.json": FileRecord(hashlib.sha256(b"{}").hexdigest(), 2),
        },
        graph_digest="0" * 64,
        graph_key=f"{number:064x}",
        statistics={"compile_seconds": 12.5, "peak_memory_bytes": 1 << 30},
    )


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> tuple[DirectoryStore, list[str]]:
    """A store as `commit_entry` leaves it, written without syncing every file."""
    store = DirectoryStore(tmp_path_factory.mktemp("full"))
    keys = []

    def write(path: Path, data: bytes) -> None:
        if not path.parent.exists():
            path.parent.mkdir(parents=True)
        path.write_bytes(data)

    write(store.blob_path(hashlib.sha256(b"{}").hexdigest()), b"{}")
    for number in range(COUNT):
        entry = unit(number)
        keys.append(entry.key)
        if number < PROGRAMS:
            write(store.blob_path(entry.files["model.so"].digest), b"program %d" % number)
        write(store.root / "v1" / entry_name(entry.key), entry.to_json())
    return store, keys


@contextmanager
def cpu_seconds_below(limit: float, what: str) -> Iterator[None]:
    started = time.process_time()
    yield
    spent = time.process_time() - started
    assert spent < limit, f"{what}: {spent:.3f} s of CPU"


def test_status_of_10000_stored_keys(full: tuple[DirectoryStore, list[str]]) -> None:
    store, keys = full
    with cpu_seconds_below(1.5, "10,000 keys stored"):
        known = stored_keys(store, keys)
    assert len(known) == COUNT
    assert set(known.values()) == {None}


def test_status_of_10000_keys_of_which_few_are_stored(
    full: tuple[DirectoryStore, list[str]],
) -> None:
    store, keys = full
    absent = [hashlib.sha256(b"%d" % number).hexdigest() for number in range(COUNT - 100)]
    with cpu_seconds_below(0.3, "100 of 10,000 keys stored"):
        known = stored_keys(store, keys[:100] + absent)
    assert len(known) == 100


def test_reading_2500_entries(full: tuple[DirectoryStore, list[str]]) -> None:
    store, keys = full
    with cpu_seconds_below(2, "2,500 entries read"):
        found = read_entries(store, keys[:2500])
    assert len(found) == 2500


def test_damaged_ones_are_found_among_them(full: tuple[DirectoryStore, list[str]]) -> None:
    store, keys = full
    blob = store.blob_path(unit(77).files["model.so"].digest)
    content = blob.read_bytes()
    blob.write_bytes(content[:-1])
    known = stored_keys(store, keys)
    blob.write_bytes(content)
    assert {key for key, reason in known.items() if reason} == set(keys[77::PROGRAMS])
