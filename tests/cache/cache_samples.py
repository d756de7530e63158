"""Entries, manifests and stores for the tests of the cache, small and made of bytes anyone can read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from neffbuild.cache.canonical import digest_document
from neffbuild.cache.catalog import commit_entry, record_files
from neffbuild.cache.directory import DirectoryStore
from neffbuild.cache.entry import Entry
from neffbuild.cache.manifest import Manifest, ManifestUnit
from neffbuild.cache.tag import Trust
from neffbuild.grid.expand import Need
from neffbuild.grid.shapes import DecodeShape, Family

ANYONE = Trust()
X86_V3 = {
    "toolchain": "inductor",
    "route": "aoti",
    "target": "x86-64-v3",
    "versions": {"torch": "2.13.0"},
}
X86_V4 = {**X86_V3, "target": "x86-64-v4"}


def shape(number: int) -> DecodeShape:
    return DecodeShape(Family.TARGET, num_seqs=number + 1, query_len=1, context_len=4096)


def recipe(number: int, *, note: str = "") -> dict[str, object]:
    return {
        "schema": "neffbuild.recipe/1",
        "kind": "unit",
        "shape": shape(number).document(),
        "note": note,
        "toolchain": X86_V3,
    }


def write_files(folder: Path, contents: Mapping[str, bytes]) -> dict[str, Path]:
    """Write an artifact's files below a folder, as a compile leaves them."""
    paths = {}
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        paths[name] = path
    return paths


def make_entry(
    folder: Path, number: int, *, note: str = "", contents: Mapping[str, bytes] | None = None
) -> tuple[Entry, dict[str, Path]]:
    """An entry and the files it is made of, as a worker hands them over."""
    contents = contents or {
        "model.so": b"program %d %s\n" % (number, note.encode()) * 50,
        "meta/binding.json": json.dumps({"inputs": ["ids", number]}).encode(),
    }
    files = write_files(folder / f"unit{number}{note}", contents)
    entry = Entry(
        recipe=recipe(number, note=note),
        files=record_files(files),
        graph_digest=digest_document(["graph", number]),
        graph_key=digest_document(["graph key", number]),
        statistics={"compile_seconds": 1.5},
    )
    return entry, files


def fill(store: DirectoryStore, folder: Path, count: int, *, note: str = "") -> list[Entry]:
    """Commit some entries."""
    entries = []
    for number in range(count):
        entry, files = make_entry(folder, number, note=note)
        entries.append(commit_entry(store, entry, files))
    return entries


def make_manifest(
    entries: list[Entry], *, platform: Mapping[str, object] = X86_V3, lacking: int = 0
) -> Manifest:
    """A manifest of these entries, whose plan has `lacking` more units."""
    units = [
        ManifestUnit(shape(number), entry.key, Need.REQUIRED)
        for number, entry in enumerate(entries)
    ]
    for number in range(len(entries), len(entries) + lacking):
        units.append(ManifestUnit(shape(number), digest_document(number), Need.REQUIRED))
    return Manifest(
        config=digest_document("config"),
        serve={"max_model_len": 4096, "block_size": 128},
        platform=platform,
        units=tuple(units),
        entries={entry.key: entry for entry in entries},
        coverage={"states": 10},
    )


def in_children(count: int, work: Callable[[int], int]) -> list[int]:
    """Run `work(number)` in that many forked processes at once; their exit statuses (negative: the
    signal that ended them)."""
    pids = [start_child(lambda number=number: work(number)) for number in range(count)]
    return [wait_for(pid) for pid in pids]


def start_child(work: Callable[[], int]) -> int:
    """Run `work` in a forked process, whose exit status it returns; gives the process id."""
    pid = os.fork()
    if pid:
        return pid
    status = 99
    try:
        status = work()
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(status)


def wait_for(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def as_nobody(work: Callable[[], int]) -> int:
    """Run `work` in a child to which file permissions apply, as they do not to root."""

    def unprivileged() -> int:
        if os.getuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        return work()

    return wait_for(start_child(unprivileged))
