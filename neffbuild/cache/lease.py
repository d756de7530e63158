"""Leases: what keeps a collector from removing what a writer is about to name.

A writer that finds a blob already there does not store it again; a collector may at that moment be
about to remove it because nothing names it yet. So each says what it does *before* it looks: the writer
files a lease on everything it is going to name and then looks for a collector, which it waits for; the
collector files a lease of its own and then looks for writers, whose things it leaves alone. Whichever
looks second sees the other.

Ages are differences of times of the store's own clock. A lease whose holder is gone runs out, at once
where the holder was a process of this host.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neffbuild.cache import filesystem
from neffbuild.cache.canonical import canonical_json, parse_json
from neffbuild.cache.files import says_unwritable
from neffbuild.cache.store import Listed, Store
from neffbuild.config.errors import IntegrityError, StoreError

SCHEMA = "neffbuild.lease/1"
FOLDER = "leases/"
COLLECTOR_WAIT = 1800.0
"""How long a writer waits for a collector, in seconds."""

_USE = "use"
_COLLECT = "collect"
_SECONDS = {_USE: 900.0, _COLLECT: 180.0}
_LOOK_SECONDS = 0.5
_log = logging.getLogger(__name__)


class Lease:
    """A lease of this process, renewed in the background until it is released."""

    def __init__(self, store: Store, kind: str, content: dict[str, Any]) -> None:
        self.name = f"{FOLDER}{kind}-{os.urandom(8).hex()}.json"
        self._store = store
        self._seconds = _SECONDS[kind]
        self._data = canonical_json({"schema": SCHEMA, "holder": _holder(), **content})
        self._renewed = time.monotonic()
        self._ended = threading.Event()
        self._renewing = threading.Thread(target=self._renew, name="lease", daemon=True)

    def require(self) -> None:
        """Raise `StoreError` when others may by now take the lease for that of a dead process."""
        if time.monotonic() - self._renewed > self._seconds / 2:
            raise StoreError(
                f"the lease {self.name} in {self._store.url} could not be renewed in time",
                hint="the store did not answer for minutes, or this process was stopped; run it again",
            )

    def __enter__(self) -> Lease:
        try:
            if not self._store.create(self.name, self._data):
                raise StoreError(f"{self.name} exists already in {self._store.url}")
        except StoreError:
            # It may be there all the same: what failed can be the last step.
            self._remove()
            raise
        # Without a thread (the host is out of them) it lasts as long as it was written for.
        with contextlib.suppress(RuntimeError):
            self._renewing.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._renewing.ident is not None:
            self._renewing.join()
        self._remove()

    def _remove(self) -> None:
        # Whoever may write and not delete leaves it to run out.
        with contextlib.suppress(StoreError):
            self._store.delete(self.name)

    def _renew(self) -> None:
        while not self._ended.wait(self._seconds / 6):
            began = time.monotonic()
            try:
                current = self._store.read(self.name)
                if current is None or not self._store.replace(
                    self.name, self._data, current.version
                ):
                    return
            except StoreError as error:
                _log.debug("%s could not be renewed: %s", self.name, error.message)
            else:
                self._renewed = began


@dataclass(frozen=True, slots=True)
class Claims:
    """What a collector sees when it begins: the time by the store's clock (epoch seconds), the names of
    documents and the digests of blobs that writers are about to name, whether there are any writers,
    and leases that ran out."""

    now: float
    documents: frozenset[str]
    blobs: frozenset[str]
    writers: bool
    ended: tuple[Listed, ...]


@contextlib.contextmanager
def leased(
    store: Store,
    *,
    documents: Iterable[str],
    blobs: Iterable[str],
    wait: float = COLLECTOR_WAIT,
) -> Iterator[Lease]:
    """Keep collectors from removing these documents (by name) and blobs (by digest), there or not.

    Waits up to `wait` seconds for a collector that is at work. What is there after the start of the
    block stays. Raises `StoreError` when the store cannot be written or the collector does not end.
    """
    content = {"documents": sorted(documents), "blobs": sorted(blobs)}
    with Lease(store, _USE, content) as lease:
        deadline = time.monotonic() + wait
        while collector := _collector(store, lease):
            if time.monotonic() > deadline:
                raise StoreError(
                    f"{store.url} is being collected by {collector}; gave up after {wait:g} s",
                    hint="try again when `neffbuild gc` has ended",
                )
            _log.info("waiting for a collector", extra={"fields": {"holder": collector}})
            time.sleep(_LOOK_SECONDS * random.uniform(0.5, 1.5))
        yield lease


@contextlib.contextmanager
def leased_if_writable(
    store: Store, *, documents: Iterable[str], blobs: Iterable[str]
) -> Iterator[None]:
    """`leased`, and nothing where the store cannot be written: what is there is good to work with, and
    what is missing will say so by itself."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(leased(store, documents=documents, blobs=blobs))
        except StoreError as error:
            if not says_unwritable(error):
                raise
        yield


@contextlib.contextmanager
def collecting(store: Store) -> Iterator[tuple[Lease, Claims]]:
    """Be the only collector of a store. Raises `StoreError` when another one is at work."""
    with Lease(store, _COLLECT, {}) as lease:
        if collector := _collector(store, lease):
            raise StoreError(
                f"{store.url} is being collected by {collector}",
                hint="one collector at a time; try again when it has ended",
            )
        yield lease, read_claims(store, lease)


def read_claims(store: Store, own: Lease | None = None) -> Claims:
    """The leases in a store as they are now."""
    listed, now = _others(store, own) if own else (list(store.list(FOLDER)), time.time())
    documents: set[str] = set()
    blobs: set[str] = set()
    ended = []
    writers = False
    for one in listed:
        content = _living(store, one, now)
        if content is None:
            ended.append(one)
        elif _kind(one) == _USE:
            writers = True
            documents.update(content.get("documents", ()))
            blobs.update(content.get("blobs", ()))
    return Claims(now, frozenset(documents), frozenset(blobs), writers, tuple(ended))


def _collector(store: Store, own: Lease) -> str | None:
    """Who else is collecting the store."""
    others, now = _others(store, own)
    for one in others:
        content = _living(store, one, now) if _kind(one) == _COLLECT else None
        if content is not None:
            holder = content["holder"]
            return f"process {holder.get('pid')} on {holder.get('host')}"
    return None


def _others(store: Store, own: Lease) -> tuple[list[Listed], float]:
    """All leases but ours, and the time by the store's clock, as far as ours shows it.

    A listing without ours is older than ours (a network file system may list late), and whoever filed a
    lease before us could be missing as well.
    """
    for _ in filesystem.looks():
        since = time.monotonic()
        listed = {one.name: one for one in store.list(FOLDER)}
        ours = listed.pop(own.name, None)
        if ours is not None:
            return list(listed.values()), ours.modified + (since - own._renewed)
    raise StoreError(f"the lease {own.name} was removed from {store.url}", hint="run it again")


def _living(store: Store, listed: Listed, now: float) -> dict[str, Any] | None:
    """What a lease says, or None when it has run out."""
    if now - listed.modified > _SECONDS.get(_kind(listed), 0.0):
        return None
    document = store.read(listed.name)
    if document is None:
        return None
    try:
        content = parse_json(document.data, listed.name)
        holder = content["holder"]
        gone = holder["processes"] == _processes() and not _runs(
            holder["pid"], holder.get("started")
        )
    except (IntegrityError, KeyError, TypeError, AttributeError, OverflowError):
        return None
    return None if gone else content


def _kind(listed: Listed) -> str:
    return listed.name.removeprefix(FOLDER).partition("-")[0]


def _holder() -> dict[str, Any]:
    began = None
    with contextlib.suppress(OSError):
        _, began = _state(os.getpid())
    return {
        "pid": os.getpid(),
        "started": began,
        "host": socket.gethostname(),
        "processes": _processes(),
    }


def _runs(pid: int, started: str | None) -> bool:
    """Whether the process that began then still runs: its number may be another's by now."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    try:
        state, began = _state(pid)
    except OSError:
        return True  # there, and not ours to look at
    return state not in ("Z", "X") and started in (None, began)


def _state(pid: int) -> tuple[str, str]:
    """A process's state by its letter, and when it began, in ticks since boot."""
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    fields = text.rpartition(")")[2].split()
    return fields[0], fields[19]


def _processes() -> str:
    """What the numbers and start times of processes mean nothing outside of: this boot and container."""
    try:
        if Path("/proc/self").readlink() == Path(str(os.getpid())):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            spaces = [Path(f"/proc/self/ns/{kind}") for kind in ("pid", "time")]
            return ":".join([boot, *(str(one.readlink()) for one in spaces if one.is_symlink())])
    except OSError:
        pass
    # Nothing here, or /proc is of other processes than ours: their numbers say nothing.
    return f"unknown:{os.urandom(16).hex()}"
