"""What a local store remembers beside artifacts: runs, failures, which manifest belongs to a config,
and the highest sequence seen of each tag. None of it is ever served as a hit or pushed."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from neffbuild.cache.canonical import canonical_json, digest_document, is_digest, parse_json
from neffbuild.cache.names import LAYOUT
from neffbuild.cache.store import Document, Store
from neffbuild.config.errors import IntegrityError, StoreError

_ATTEMPTS = 20
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Failure:
    """The last failed compile of a unit. `cause` is the outcome's name, `message` one line for
    people, `attempts` how often it has failed in a row, `failed_at` epoch seconds."""

    key: str
    cause: str
    message: str
    log_tail: str
    attempts: int
    failed_at: float

    @property
    def summary(self) -> str:
        """One line for a plan."""
        return f"last compile failed ({self.cause}): {self.message}"


def record_failure(store: Store, key: str, *, cause: str, message: str, log_tail: str) -> Failure:
    """Record that a compile of the unit failed, counting attempts."""
    earlier = read_failures(store, [key]).get(key)
    failure = Failure(
        key=key,
        cause=cause,
        message=message,
        log_tail=log_tail,
        attempts=earlier.attempts + 1 if earlier else 1,
        failed_at=time.time(),
    )
    document = {"schema": "neffbuild.failure/1", **asdict(failure)}
    _update(store, _failure_name(key), lambda _: document)
    return failure


def read_failures(store: Store, keys: Iterable[str]) -> dict[str, Failure]:
    """The recorded failures among `keys`."""
    failures: dict[str, Failure] = {}
    for name, document in store.read_many(map(_failure_name, keys)):
        try:
            failure = _failure(parse_json(document.data, name))
        except (IntegrityError, KeyError, TypeError, ValueError) as error:
            _log.warning("ignoring the unreadable record %s in %s: %r", name, store.url, error)
            continue
        failures[failure.key] = failure
    return failures


def clear_failure(store: Store, key: str) -> None:
    """Forget a unit's failures: it has been built."""
    store.delete(_failure_name(key))


def append_run(store: Store, document: Mapping[str, Any]) -> str:
    """Store the record of a run for good; returns its id. Ids sort by time."""
    when = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    run = f"{when}-{os.urandom(4).hex()}"
    if not store.create(f"runs/{run}.json", canonical_json(document)):
        raise StoreError(f"run record {run} exists already in {store.url}")
    return run


def read_runs(store: Store) -> Iterator[tuple[str, dict[str, Any]]]:
    """(id, document) of every run record, newest first. Unreadable ones are skipped with a warning."""
    for name in sorted((listed.name for listed in store.list("runs/")), reverse=True):
        document = store.read(name)
        if document is None:
            continue
        try:
            parsed = parse_json(document.data, name)
        except IntegrityError as error:
            _log.warning("ignoring a run record in %s: %s", store.url, error)
            continue
        if isinstance(parsed, dict):
            yield name.removeprefix("runs/").removesuffix(".json"), parsed


def last_wall_seconds(store: Store, keys: Collection[str]) -> float:
    """Wall seconds of the newest run that compiled any of the keys; 0 when none is recorded."""
    wanted = set(keys)
    for _, run in read_runs(store):
        if any(unit.get("key") in wanted for unit in run.get("units", ())):
            return float(run.get("wall_seconds", 0.0))
    return 0.0


def write_pointer(store: Store, config: str, manifest: str) -> None:
    """Remember which manifest (digest) belongs to a serve config (digest). Nothing is written where
    that is known already: a cache that cannot be written but has everything is good to work with."""
    pointer = {"schema": "neffbuild.pointer/1", "manifest": manifest}
    data = canonical_json(pointer)
    _update(
        store,
        pointer_name(config),
        lambda current: None if current is not None and current.data == data else pointer,
    )


def read_pointer(store: Store, config: str) -> str | None:
    """The digest of the manifest that belongs to a serve config, or None."""
    document = store.read(pointer_name(config))
    if document is None:
        return None
    pointer = parse_json(document.data, pointer_name(config))
    digest = pointer.get("manifest") if isinstance(pointer, dict) else None
    if not is_digest(digest):
        raise IntegrityError(
            f"{pointer_name(config)} in {store.url} names no manifest",
            hint="pull or compile the config again",
        )
    return digest


def read_pointers(store: Store) -> Iterator[str]:
    """The digests of the manifests that serve configs' pointers lead to, each once, by config.
    Unreadable pointers are skipped with a warning."""
    digests: dict[str, None] = {}
    for name in sorted(listed.name for listed in store.list("configs/")):
        try:
            digest = read_pointer(store, name.removeprefix("configs/").removesuffix(".json"))
        except IntegrityError as error:
            _log.warning("ignoring a pointer in %s: %s", store.url, error)
            continue
        if digest is not None:
            digests[digest] = None
    yield from digests


def record_pull(store: Store, manifest: str) -> None:
    """Remember that a manifest (digest) was pulled now. Where nothing can be written, nothing is."""
    document = {"schema": "neffbuild.pulled/1", "manifest": manifest, "time": int(time.time())}
    try:
        _update(store, _pull_name(manifest), lambda _: document)
    except StoreError as error:
        _log.debug("the pull of %s was not recorded: %s", manifest, error.message)


@dataclass(frozen=True, slots=True)
class SeenHydration:
    """The manifest (digest) that a hydration left in the store, and when, in epoch seconds."""

    manifest: str
    time: float


def note_hydration(store: Store, asked: str, manifest: str) -> None:
    """Remember that what was asked for (a digest of it) is here now, as this manifest. Where nothing
    can be written, nothing is."""
    document = {"schema": "neffbuild.hydrated/1", "manifest": manifest, "time": time.time()}
    try:
        _update(store, _hydration_name(asked), lambda _: document)
    except StoreError as error:
        _log.debug("the hydration of %s was not recorded: %s", manifest, error.message)


def seen_hydration(store: Store, asked: str) -> SeenHydration | None:
    """The last hydration of what is asked for, or None where none is on record."""
    document = store.read(_hydration_name(asked))
    if document is None:
        return None
    try:
        seen = parse_json(document.data, _hydration_name(asked))
        return SeenHydration(str(seen["manifest"]), float(seen["time"]))
    except (IntegrityError, KeyError, TypeError, ValueError) as error:
        _log.warning("ignoring the unreadable record of a hydration in %s: %r", store.url, error)
        return None


def seen_sequence(store: Store, identity: str, name: str, tag: str) -> int:
    """The highest sequence that was seen of a tag of the store that is `identity`; 0 when none was.
    Raises `IntegrityError` naming the record when it cannot be read."""
    record = _seen_name(identity, name, tag)
    return _sequence(store, record, store.read(record))


def note_sequence(store: Store, identity: str, name: str, tag: str, sequence: int) -> None:
    """Remember a sequence; a higher one already noted stays. Raises as `seen_sequence`."""
    noted = {"schema": "neffbuild.seen/1", "name": name, "tag": tag, "sequence": sequence}
    record = _seen_name(identity, name, tag)
    _update(
        store,
        record,
        lambda current: noted if sequence > _sequence(store, record, current) else None,
    )


def _sequence(store: Store, record: str, document: Document | None) -> int:
    if document is None:
        return 0
    try:
        seen = parse_json(document.data, "it")
        sequence = seen.get("sequence") if isinstance(seen, dict) else None
        if type(sequence) is not int:
            raise IntegrityError("it names no sequence")
    except IntegrityError as error:
        path = f"{store.url}/{LAYOUT}/{record}"
        raise IntegrityError(
            f"the record of a tag's last seen sequence, {path}, is unreadable: {error.message}",
            value=path,
            hint="remove this file to accept whatever sequence the store serves now: an older tag would "
            "not be noticed; `cache.min_sequence` (`--min-sequence`) bounds that",
        ) from error
    return sequence


def _failure(document: Any) -> Failure:
    return Failure(
        key=str(document["key"]),
        cause=str(document["cause"]),
        message=str(document["message"]),
        log_tail=str(document["log_tail"]),
        attempts=int(document["attempts"]),
        failed_at=float(document["failed_at"]),
    )


def _update(
    store: Store, name: str, change: Callable[[Document | None], Mapping[str, Any] | None]
) -> None:
    """Write what `change` makes of the document that is there; nothing where it makes None."""
    for _ in range(_ATTEMPTS):
        current = store.read(name)
        document = change(current)
        if document is None:
            return
        data = canonical_json(document)
        if current is None:
            if store.create(name, data):
                return
        elif store.replace(name, data, current.version):
            return
    raise StoreError(f"{name} in {store.url} kept changing while it was written", value=name)


def _failure_name(key: str) -> str:
    return f"failures/{key}.json"


def pointer_name(config: str) -> str:
    """The name of the document that says which manifest belongs to a serve config (digest)."""
    return f"configs/{config}.json"


def _pull_name(manifest: str) -> str:
    return f"pulls/{manifest}.json"


def _hydration_name(asked: str) -> str:
    return f"hydrations/{asked}.json"


def _seen_name(identity: str, name: str, tag: str) -> str:
    # Hashed: a store's identity may be an absolute path, and no document here holds one.
    return f"seen/{digest_document([identity, name, tag])}.json"
