"""The local store in front of remote ones: what a remote has need not be compiled here.

A tier counts as having a unit only if its entry *and* all its blobs are there. What is fetched ends in
the local store, so it is fetched once. No remote stands in the way of work: one that fails is left
alone for the rest of the process, with a warning and a count.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

from neffbuild.cache.catalog import (
    commit_leased,
    entry_name,
    quarantine_entry,
    read_hits,
    stored_keys,
)
from neffbuild.cache.copying import (
    WORKERS,
    Progress,
    blobs_of,
    copy_blobs,
    file_modes,
    in_parallel,
    write_entries,
)
from neffbuild.cache.directory import DirectoryStore
from neffbuild.cache.entry import Entry
from neffbuild.cache.files import says_unwritable
from neffbuild.cache.lease import leased
from neffbuild.cache.store import Store
from neffbuild.cache.survey import whole_units
from neffbuild.config.errors import ConfigError, IntegrityError, NeffbuildError, StoreError

_PUBLISHERS = 4
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class TierCounts:
    """What became of one tier so far: units it had that the local store had not, units published to
    it, failures and the last of them."""

    hits: int = 0
    published: int = 0
    faults: int = 0
    last_fault: str | None = None


@dataclass(frozen=True, slots=True)
class Tier:
    """A remote store and what it is used for. `readable`: its entries are taken as hits. Entries found
    by their keys carry no signature, so a tier is not readable where signatures are required."""

    store: Store
    readable: bool
    writable: bool
    counts: TierCounts = field(default_factory=TierCounts)


class TieredStore:
    """`local` in front of remote tiers, which are asked in order. Usable from several threads."""

    def __init__(self, local: DirectoryStore, tiers: Sequence[Tier]) -> None:
        self.local = local
        self.tiers = tuple(tiers)
        self._counting = threading.Lock()
        self._off: set[str] = set()

    def stored_keys(self, keys: Iterable[str]) -> dict[str, str | None]:
        """As `neffbuild.cache.catalog.stored_keys`, of all tiers taken together."""
        wanted = list(dict.fromkeys(keys))
        known = stored_keys(self.local, wanted)
        for tier in self._in_service():
            left = [key for key in wanted if known.get(key, "") is not None]
            if not left or not tier.readable:
                continue
            with self._forgiving(tier):
                whole = whole_units(tier.store, left)
                known.update(dict.fromkeys(whole))
                tier.counts.hits += len(whole)
        return known

    def back_fill(
        self, keys: Collection[str], *, workers: int = WORKERS, progress: Progress | None = None
    ) -> dict[str, str]:
        """Fetch into the local store what it lacks of these units and a remote has.

        Returns key → reason for those that a tier claimed to have and none could hand over: they are
        to be built. What is damaged in a writable tier is taken out of service there, for the next
        `publish` to replace. Where the local store cannot be written, nothing is fetched.
        """
        stored = read_hits(self.local, keys)
        missing = [key for key in keys if key not in stored]
        lost: dict[str, str] = {}
        for tier in self._in_service():
            if not missing or not tier.readable:
                continue
            with self._forgiving(tier):
                entries = read_hits(tier.store, missing)
                damaged = self._fetch(tier.store, entries, workers, progress)
                for key in damaged:
                    _log.warning("%s: unit %s is damaged: %s", tier.store.url, key, damaged[key])
                    if tier.writable:
                        quarantine_entry(tier.store, key, entries[key].blobs)
                lost.update(damaged)
                missing = [key for key in missing if key not in entries or key in damaged]
        return {key: reason for key, reason in lost.items() if key in missing}

    def publish(self, keys: Collection[str]) -> None:
        """Copy these units from the local store to every writable tier that lacks them. Where somebody
        published a unit first, theirs stands."""
        entries = read_hits(self.local, keys)
        for tier in self._in_service():
            if not entries or not tier.writable:
                continue
            with self._forgiving(tier):
                there = whole_units(tier.store, entries)
                absent = {key: entry for key, entry in entries.items() if key not in there}
                if absent:
                    self._publish(tier, absent)

    @contextmanager
    def publishing(self) -> Iterator[Callable[[str], object]]:
        """What to call with the key of each unit as it is built: units are published beside further
        work, and all of them have been by the end."""
        with ThreadPoolExecutor(_PUBLISHERS, thread_name_prefix="publish") as pool:
            yield lambda key: pool.submit(self.publish, [key])

    @contextmanager
    def fetching(self) -> Iterator[Callable[[str], object]]:
        """As `publishing`, for units that other machines build into a remote: they are fetched."""
        with ThreadPoolExecutor(_PUBLISHERS, thread_name_prefix="fetch") as pool:
            yield lambda key: pool.submit(self.back_fill, [key], workers=1)

    def count_published(self, store: Store) -> None:
        """Another machine has published a unit to the tier of `store`, on behalf of this process."""
        with self._counting:
            for tier in self.tiers:
                tier.counts.published += tier.store.url == store.url

    def shared(self) -> Store:
        """The first remote that is both read and written: where other machines leave what they build for
        this one. Raises `ConfigError` when there is none."""
        for tier in self.tiers:
            if tier.readable and tier.writable:
                return tier.store
        unsigned = any(tier.writable for tier in self.tiers)
        raise ConfigError(
            "units are built on other machines, and there is no remote store to leave them in: "
            + (
                "entries found by their keys are not signed, and `cache.require_signature` is set"
                if unsigned
                else "none is configured with mode rw"
            ),
            field="cache.require_signature" if unsigned else "cache.remotes",
            hint="build with `require_signature: false`, and sign what comes of it with `push`"
            if unsigned
            else "name one that every machine reaches: --remote s3://BUCKET/PREFIX",
        )

    def _fetch(
        self,
        remote: Store,
        entries: Mapping[str, Entry],
        workers: int,
        progress: Progress | None,
    ) -> dict[str, str]:
        """key → reason, of the entries that could not be fetched whole; the others are local then."""
        if not entries:
            return {}
        try:
            with leased(self.local, documents=map(entry_name, entries), blobs=blobs_of(entries)):
                return self._fetch_leased(remote, entries, workers, progress)
        except StoreError as error:
            if not says_unwritable(error):
                raise
            _log.warning(
                "what remotes have cannot be kept here", extra={"fields": {"cause": error.message}}
            )
            return {}

    def _fetch_leased(
        self,
        remote: Store,
        entries: Mapping[str, Entry],
        workers: int,
        progress: Progress | None,
    ) -> dict[str, str]:
        sizes = blobs_of(entries)
        absent = {blob: sizes[blob] for blob in sizes.keys() - self.local.present_blobs(sizes)}
        modes = file_modes(entries)
        damaged: dict[str, str] = {}

        def copy(blob: str) -> None:
            try:
                self.local.receive_blob(blob, absent[blob], modes[blob], remote)
            except IntegrityError as error:
                damaged[blob] = error.message

        copy_blobs(absent, copy, workers, progress)
        lost = {
            key: damaged[blob]
            for key, entry in entries.items()
            for blob in entry.blobs
            if blob in damaged
        }
        write_entries(self.local, {k: entry for k, entry in entries.items() if k not in lost})
        return lost

    def _publish(self, tier: Tier, entries: Mapping[str, Entry]) -> None:
        def publish(entry: Entry) -> None:
            files = {name: self.local.blob_path(one.digest) for name, one in entry.files.items()}
            try:
                commit_leased(tier.store, entry, files)
            except IntegrityError as error:
                # Of what is here: no fault of the tier's, and for `verify` to find.
                _log.warning("not published: %s", error.message)
                return
            with self._counting:
                tier.counts.published += 1

        with leased(tier.store, documents=map(entry_name, entries), blobs=blobs_of(entries)):
            in_parallel(publish, entries.values(), _PUBLISHERS)

    def _in_service(self) -> Iterator[Tier]:
        return (tier for tier in self.tiers if tier.store.url not in self._off)

    @contextmanager
    def _forgiving(self, tier: Tier) -> Iterator[None]:
        """Let what fails in a tier cost a warning and the tier, not the work."""
        try:
            yield
        except NeffbuildError as error:
            with self._counting:
                tier.counts.faults += 1
                tier.counts.last_fault = error.message
                self._off.add(tier.store.url)
            _log.warning(
                "a remote failed and is left alone from here on",
                extra={"fields": {"remote": tier.store.url, "cause": error.message}},
            )
