"""Handing out: from the local store into an engine's own cache, so that the engine sees hits.

A place is written in a folder of ours beside the others, judged there by the engine's own rule, and gets its
name by a rename: a process killed at any moment leaves the place as it was. What is whole already stays, what
is incomplete is replaced as a whole, and what a live process is at work on is left alone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from neffbuild.cache import files, filesystem
from neffbuild.cache.copying import WORKERS, Progress, in_parallel
from neffbuild.cache.directory import DirectoryStore
from neffbuild.cache.entry import Entry
from neffbuild.cache.layouts.adopting import judged
from neffbuild.cache.layouts.candidates import Candidate, places_of
from neffbuild.cache.layouts.counted import Counted
from neffbuild.cache.layouts.layout import Layout, PlaceLocked, State
from neffbuild.cache.layouts.placed import Exported, Outcome, Placed
from neffbuild.cache.layouts.tree import NO_FOLDER, Tree, Unsafe

_STAGING = re.compile(r"\.neffbuild-(.+)-([0-9]{1,9})-[0-9a-f]{8}")
_TAKEN = frozenset({errno.ENOTEMPTY, errno.EEXIST})


def export(
    layout: Layout,
    store: DirectoryStore,
    entries: Mapping[str, Entry],
    root: Path,
    *,
    progress: Progress | None = None,
) -> Exported:
    """Lay out below `root` what entries (by key) hold for a layout.

    Every file's digest is checked as it is copied. Of two entries for one place the first by key is taken,
    where the layout's keys say that they are one program; otherwise neither is. Raises `IntegrityError`
    for a damaged blob, `StoreError` where `root` cannot be written.
    """
    candidates = places_of(layout, entries)
    if not candidates:
        return Exported(layout.name)
    total = sum(one.size for of_place in candidates.values() for one in of_place[:1])
    exporting = _Exporting(layout, store, root, Counted(progress, total))
    placed: dict[str, Placed] = {}

    def place(name: str) -> None:
        placed[name] = exporting.place(name, candidates[name])

    with files.refusals("write below", root):
        files.make_folder(root)
        _sweep(root)
        in_parallel(place, sorted(candidates), WORKERS)
    return Exported(
        layout.name, tuple(placed[name] for name in sorted(placed)), exporting.counted.done
    )


class _Exporting:
    """One export under way."""

    def __init__(self, layout: Layout, store: DirectoryStore, root: Path, counted: Counted) -> None:
        self._layout = layout
        self._store = store
        self._root = root
        self.counted = counted

    def place(self, place: str, candidates: Sequence[Candidate]) -> Placed:
        """Make a place a hit, if it is none. Raises `OSError`, `IntegrityError`."""
        candidate = candidates[0]
        distinct = len({one.digest for one in candidates})
        if distinct > 1 and not self._layout.keys_cover_compiler:
            reason = f"{distinct} different files are stored for it, and its name does not tell them apart"
            return Placed(place, Outcome.REFUSED, reason)
        there = self._settled(place, candidate)
        if there is not None:
            return there
        with self._staging() as staging:
            try:
                self._write(staging, place, candidate)
            except Unsafe as error:
                return Placed(place, Outcome.REFUSED, str(error))
            staged = judged(self._layout, Tree(staging), place)
            if staged.state is not State.COMPLETE:
                reason = f"what is stored of it would be no hit: {staged.reason}"
                return Placed(place, Outcome.REFUSED, reason)
            return self._give_name(staging, place, candidate, staged.notes)

    def _settled(self, place: str, candidate: Candidate) -> Placed | None:
        """`_there`, once nobody is replacing the place, which takes a moment; an engine's compile takes
        longer."""
        there = None
        for _ in filesystem.looks():
            there = self._there(place, candidate)
            if there is None or there.outcome is not Outcome.LOCKED:
                return there
        return there

    def _there(self, place: str, candidate: Candidate) -> Placed | None:
        """What a place is where nothing can or need be written; None where something is to be."""
        tree = Tree(self._root)
        for above in _above(place):
            if tree.is_no_folder(above):
                return Placed(place, Outcome.REFUSED, f"{self._root / above} {NO_FOLDER}")
        found = judged(self._layout, tree, place)
        match found.state:
            case State.LOCKED:
                return Placed(place, Outcome.LOCKED, found.reason)
            case State.REFUSED:
                return Placed(place, Outcome.REFUSED, f"what is there {found.reason}")
            case State.COMPLETE if self._layout.keys_cover_compiler:
                return Placed(place, Outcome.PRESENT)
            case State.COMPLETE:
                return self._same(tree, place, candidate)
            case _:
                return None

    def _same(self, tree: Tree, place: str, candidate: Candidate) -> Placed | None:
        """For a file whose name does not say what is in it: is it ours?"""
        file = tree.file(place)
        if file is None:
            return None
        try:
            if tree.record(file).digest == candidate.records[place].digest:
                return Placed(place, Outcome.PRESENT)
        except Unsafe as error:
            return Placed(place, Outcome.LOCKED, str(error))
        return Placed(
            place,
            Outcome.REFUSED,
            "another file of this name is there, and the name does not cover what compiled it: "
            "give each compiler version a folder of its own",
        )

    def _write(self, staging: Path, place: str, candidate: Candidate) -> None:
        records = candidate.records
        last = sorted(records, key=lambda name: (self._layout.is_last(name), name))
        sizes = {name: record.size for name, record in records.items()}
        for name in last:
            record = records[name]
            target = staging / name
            files.make_folder(target.parent)
            self._store.fetch_blob(record.digest, record.size, target)
            filesystem.sync(target)
            self.counted.add(record.size)
        for name, content in self._layout.completed(place, sizes).items():
            if filesystem.is_taken(staging / name):
                raise Unsafe(f"what is stored of it would be no hit: {name} is a folder in it")
            files.write_synced(staging / name, content)
        for folder in {(staging / name).parent for name in records}:
            filesystem.sync(folder)

    def _give_name(
        self, staging: Path, place: str, candidate: Candidate, notes: tuple[str, ...]
    ) -> Placed:
        target = self._root / place
        files.make_folder(target.parent)
        written = Placed(place, Outcome.WRITTEN, notes=notes)
        try:
            if not filesystem.is_taken(target):
                filesystem.rename(staging / place, target)
            else:
                self._replace(staging, place, target)
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
            busy = Placed(place, Outcome.LOCKED, "somebody began to write it in the meantime")
        except PlaceLocked as error:
            busy = Placed(place, Outcome.LOCKED, str(error))
        except Unsafe as error:
            return Placed(place, Outcome.REFUSED, str(error))
        else:
            filesystem.sync(target.parent)
            return written
        return self._settled(place, candidate) or busy

    def _replace(self, staging: Path, place: str, target: Path) -> None:
        with self._layout.guarded(self._root, place):
            if self._is_whole(place):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
            aside = staging / ".replaced"
            if target.is_dir():
                filesystem.rename(target, aside)
            try:
                filesystem.rename(staging / place, target)
            except OSError:
                with contextlib.suppress(OSError):
                    filesystem.rename(aside, target)
                raise

    def _is_whole(self, place: str) -> bool:
        """Of a place that is locked by ourselves."""
        try:
            return self._layout.contents(Tree(self._root), place).state is State.COMPLETE
        except (Unsafe, OSError):
            return False

    @contextlib.contextmanager
    def _staging(self) -> Iterator[Path]:
        host = re.sub(r"[^A-Za-z0-9.]", "_", socket.gethostname())
        path = self._root / f".neffbuild-{host}-{os.getpid()}-{os.urandom(4).hex()}"
        filesystem.make_folder(path)
        try:
            yield path
        finally:
            with contextlib.suppress(OSError):
                filesystem.remove_tree(path)


def _above(place: str) -> Iterable[str]:
    parts = place.split("/")
    return ("/".join(parts[:count]) for count in range(1, len(parts)))


def _sweep(root: Path) -> None:
    """Remove what killed exports of this host have left."""
    host = re.sub(r"[^A-Za-z0-9.]", "_", socket.gethostname())
    for item in filesystem.items(root):
        match = _STAGING.fullmatch(item.name)
        if match and match[1] == host and not psutil.pid_exists(int(match[2])):
            with contextlib.suppress(OSError):
                filesystem.remove_tree(root / item.name)
