"""Taking over what an engine has compiled: from its own cache into the local store.

Places are judged one by one. What is complete becomes an entry of its own, whose key says what it is and not
where it was found; everything else is reported with its reason and left where it is. The tree is read only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from neffbuild.cache.canonical import digest_document
from neffbuild.cache.catalog import Hit, entry_name, read_entry
from neffbuild.cache.copying import WORKERS, Progress, in_parallel, write_entries
from neffbuild.cache.directory import DirectoryStore
from neffbuild.cache.entry import Entry, FileRecord
from neffbuild.cache.layouts.counted import Counted
from neffbuild.cache.layouts.layout import Found, Layout, State, entry_file
from neffbuild.cache.layouts.single_files import KERNELS
from neffbuild.cache.layouts.tree import Names, Tree, TreeFile, Unsafe
from neffbuild.cache.lease import leased
from neffbuild.cache.problem import FileCheck
from neffbuild.config.errors import IntegrityError, StoreError


@dataclass(frozen=True, slots=True)
class Adopted:
    """What was found, place by place, and what is in the store of it now: key → entry. `imported` are the
    keys that were not there before, `strays` what belongs to no place."""

    found: tuple[Found, ...]
    entries: Mapping[str, Entry]
    imported: frozenset[str]
    strays: tuple[str, ...]
    blobs_copied: int
    bytes_copied: int

    @property
    def counts(self) -> dict[str, int]:
        """How many places are in each state."""
        states = Counter(one.state for one in self.found)
        return {state.value: states[state] for state in State}


def adopt(
    layout: Layout,
    tree: Tree,
    store: DirectoryStore,
    *,
    checks: Mapping[str, FileCheck] = MappingProxyType({}),
    progress: Progress | None = None,
) -> Adopted:
    """Bring every complete place of a tree into `store`, each file read once more and checked as it is
    copied. A whole entry that is there already stays. A repeated call goes on where one broke off.

    `checks` (ending of a file's name → check) look at what was copied before it counts. Raises
    `ConfigError` where there is no tree, `StoreError` where either side cannot be used.
    """
    return _Adopting(layout, tree, store, checks, progress).run()


class _Adopting:
    """One adoption under way."""

    def __init__(
        self,
        layout: Layout,
        tree: Tree,
        store: DirectoryStore,
        checks: Mapping[str, FileCheck],
        progress: Progress | None,
    ) -> None:
        self._layout = layout
        self._tree = tree
        self._store = store
        self._checks = checks
        self._progress = progress
        self._counted = Counted(None, 0)
        self._blobs: set[str] = set()
        self._taken: dict[str, list[tuple[Entry, bool]]] = {}
        self._faults: dict[str, str] = {}

    def run(self) -> Adopted:
        self._tree.require()
        found = list(examined(self._layout, self._tree))
        whole = [one for one in found if one.recipe is not None]
        sizes = (file.size for one in whole for file in one.files.values())
        self._counted = Counted(self._progress, sum(sizes))
        in_parallel(self._try, whole, WORKERS)
        taken = [one for of_place in self._taken.values() for one in of_place]
        return Adopted(
            tuple(self._judged_again(one) for one in found),
            {entry.key: entry for entry, _ in taken},
            frozenset(entry.key for entry, is_new in taken if is_new),
            tuple(_strays(self._layout, self._tree)),
            len(self._blobs),
            self._counted.done,
        )

    def _try(self, one: Found) -> None:
        try:
            entry, is_new = self._take(self._layout.name, self._tree, one)
            self._taken[one.place] = [(entry, is_new), *self._kernels_beside(entry, one)]
        except (Unsafe, IntegrityError, OSError) as error:
            self._faults[one.place] = str(error)

    def _judged_again(self, one: Found) -> Found:
        fault = self._faults.get(one.place)
        if fault is None:
            return one
        return replace(one, state=State.INCOMPLETE, reason=fault, recipe=None)

    def _kernels_beside(self, entry: Entry, one: Found) -> Iterator[tuple[Entry, bool]]:
        """Kernels that were not there when the entry was taken over. Entries are for ever, so each of them
        is one of its own."""
        for outside in one.outside:
            if entry_file(outside.layout, outside.file.name) not in entry.files:
                kernel = KERNELS.contents(outside.tree, outside.file.name)
                if kernel.recipe is not None:
                    yield self._take(KERNELS.name, outside.tree, kernel)

    def _take(self, layout: str, tree: Tree, one: Found) -> tuple[Entry, bool]:
        assert one.recipe is not None
        assert one.graph is not None
        key = digest_document(one.recipe)
        there = read_entry(self._store, key)
        if isinstance(there, Hit):
            return there.entry, False
        sources = _sources(layout, tree, one)
        records = {name: where.record(file) for name, (where, file) in sources.items()}
        entry = Entry(
            recipe=one.recipe,
            files=records,
            graph_digest=records[entry_file(layout, one.graph)].digest,
            graph_key=key,
            statistics={"adopted_from": self._layout.name},
        )
        # Parsed as a reader will: a name that no entry may hold is refused before anything is copied.
        Entry.from_document(entry.document(), expected_key=key)
        with leased(self._store, documents=[entry_name(key)], blobs=entry.blobs):
            for name, (where, file) in sources.items():
                self._copy(records[name], where, file)
            for name, record in records.items():
                self._check(name, record)
            write_entries(self._store, {key: entry})
        return entry, True

    def _check(self, name: str, record: FileRecord) -> None:
        for ending, check in self._checks.items():
            if name.endswith(ending) and (fault := check(self._store.blob_path(record.digest))):
                raise Unsafe(f"{name.rpartition('/')[2]}: {fault}")

    def _copy(self, record: FileRecord, tree: Tree, file: TreeFile) -> None:
        if self._store.check_blob(record.digest, record.size) is None:
            return
        self._store.receive_blob(record.digest, record.size, record.mode, tree.source(file))
        self._blobs.add(record.digest)
        self._counted.add(record.size)


def _sources(layout: str, tree: Tree, one: Found) -> dict[str, tuple[Tree, TreeFile]]:
    """Name in an entry → the file, and the tree it is in."""
    own = {entry_file(layout, name): (tree, file) for name, file in one.files.items()}
    beside = {
        entry_file(outside.layout, outside.file.name): (outside.tree, outside.file)
        for outside in one.outside
    }
    return own | beside


def examined(layout: Layout, tree: Tree) -> Iterator[Found]:
    """Every place of a tree, judged; one that cannot be read is told as such, and so is a folder of places
    that cannot be listed. Raises `StoreError` where the root cannot be listed."""
    listing = _Listing(tree)
    for place in _places(layout, listing):
        yield judged(layout, tree, place)
    yield from listing.refused


def judged(layout: Layout, tree: Tree, place: str) -> Found:
    """What is at a place, whatever is wrong with it."""
    try:
        return layout.examine(tree, place)
    except Unsafe as error:
        return Found(place, State.REFUSED, str(error))
    except OSError as error:
        which = f" ({error.filename})" if isinstance(error.filename, str) else ""
        reason = f"cannot be read: {error.strerror or error}{which}"
        return Found(place, State.INCOMPLETE, reason)


class _Listing:
    """A tree whose root can be listed, if not every folder below it: `refused` are those that cannot be."""

    def __init__(self, tree: Tree) -> None:
        self.root = tree.root
        self.refused: list[Found] = []
        self._tree = tree

    def names(self, folder: str = "") -> Names:
        try:
            return self._tree.names(folder)
        except (Unsafe, OSError) as error:
            if not folder:
                raise
            cause = error.strerror if isinstance(error, OSError) else None
            reason = f"cannot be listed: {cause or error}"
            self.refused.append(Found(folder, State.REFUSED, reason))
            return Names((), (), ())


def _places(layout: Layout, listing: _Listing) -> list[str]:
    try:
        return list(dict.fromkeys(layout.places(listing)))
    except (Unsafe, OSError) as error:
        raise StoreError(f"cannot list {listing.root}: {error}", value=str(listing.root)) from error


def _strays(layout: Layout, tree: Tree) -> list[str]:
    try:
        return list(layout.strays(_Listing(tree)))
    except (Unsafe, OSError) as error:
        return [f"cannot be listed to its end: {error}"]
