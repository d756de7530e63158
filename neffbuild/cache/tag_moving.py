"""Moving a tag: a push keeps the other platforms of its index, a promotion replaces it."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from neffbuild.cache.catalog import read_index, write_index
from neffbuild.cache.envelope import Envelope, Signature
from neffbuild.cache.index import Index
from neffbuild.cache.problem import Problem, ProblemKind
from neffbuild.cache.store import Document, Store
from neffbuild.cache.tag import PAYLOAD_TYPE, TagRef, TagStatement, Trust, statement_of, tag_problem
from neffbuild.config.errors import ConfigError, IntegrityError, StoreError

_ATTEMPTS = 50
_LONGEST_PAUSE = 0.5
_UNKNOWN_TIME = datetime.min.replace(tzinfo=UTC)
_log = logging.getLogger(__name__)

Signer = Callable[[bytes], Sequence[Signature]]
"""`Envelope.signed_bytes` → signatures over them."""


def check_movable(
    store: Store, ref: TagRef, trust: Trust, *, last_seen: int = 0, sign: Signer | None = None
) -> None:
    """Raise now what `point_tag` would raise of the tag as it is: before there is much to copy."""
    _refuse_unsigned(store, ref, trust, sign)
    _mergeable(store, ref, _present(store, ref, trust, last_seen, sign))


def point_tag(
    store: Store,
    ref: TagRef,
    platform: Mapping[str, Any],
    manifest: str,
    trust: Trust,
    *,
    last_seen: int = 0,
    sign: Signer | None = None,
    expires: datetime | None = None,
) -> TagStatement:
    """Make a tag's index name this manifest for this platform, keeping the other platforms.

    The write is conditional on what was merged with, and repeated when somebody else wrote in
    between, so pushes for two platforms at once both end in the index. Where there is no tag, or its
    index is damaged or gone, there is nothing to keep and the index is started afresh.

    Raises `IntegrityError` when the present tag cannot be read, which would lose its other platforms and
    its sequence, or is not to be believed: merging would put our name to somebody else's manifests. For
    the same reason, whoever signs merges with signed tags only. Raises `ConfigError` when a signature is
    needed and there is no key to sign with.
    """

    def merged(present: _Present) -> Index:
        return _mergeable(store, ref, present).with_manifest(platform, manifest)

    statement, _ = _move(store, ref, merged, trust, last_seen, sign, expires)
    return statement


def replace_tag(
    store: Store,
    ref: TagRef,
    index: Index,
    trust: Trust,
    *,
    last_seen: int = 0,
    sign: Signer | None = None,
    expires: datetime | None = None,
) -> tuple[TagStatement, TagStatement | None]:
    """Make a tag name this index and nothing of what it named before. Returns what it says now, and
    what it said before where that can be believed.

    The sequence rises above the one before and above `last_seen`. What cannot be believed is written
    over: nothing of it is kept. Raises `ConfigError` as `point_tag` does.
    """

    def replaced(present: _Present) -> Index:
        if present.problem is not None:
            _log.warning("replacing tag %s of %s: %s", ref, store.url, present.problem.detail)
        return index

    return _move(store, ref, replaced, trust, last_seen, sign, expires)


@dataclass(frozen=True, slots=True)
class _Present:
    """A tag as it is before it is moved: its document, what is wrong with it, and what it says where
    nothing is."""

    document: Document | None = None
    problem: Problem | None = None
    statement: TagStatement | None = None


def _move(
    store: Store,
    ref: TagRef,
    choose: Callable[[_Present], Index],
    trust: Trust,
    last_seen: int,
    sign: Signer | None,
    expires: datetime | None,
) -> tuple[TagStatement, TagStatement | None]:
    _refuse_unsigned(store, ref, trust, sign)
    for attempt in range(_ATTEMPTS):
        present = _present(store, ref, trust, last_seen, sign)
        index = choose(present)
        known = present.statement.sequence if present.statement else 0
        statement = TagStatement(
            ref,
            write_index(store, index),
            max(known + 1, last_seen + 1, trust.min_sequence),
            expires,
        )
        envelope = Envelope(PAYLOAD_TYPE, statement.payload())
        if sign is not None:
            envelope = envelope.with_signatures(sign(envelope.signed_bytes))
        if present.document is None:
            written = store.create(ref.document_name, envelope.to_json())
        else:
            version = present.document.version
            written = store.replace(ref.document_name, envelope.to_json(), version)
        if written:
            return statement, present.statement
        time.sleep(random.uniform(0, min(_LONGEST_PAUSE, 0.01 * 2**attempt)))
    raise StoreError(
        f"tag {ref} of {store.url} kept changing while it was moved",
        hint="too many pushes to one tag at once; try again",
    )


def _refuse_unsigned(store: Store, ref: TagRef, trust: Trust, sign: Signer | None) -> None:
    if sign is None and trust.require_signature:
        raise ConfigError(
            f"tag {ref} of {store.url} has to be signed, and there is no key to sign it with",
            field="--key",
            hint="give --key FILE or URI; `neffbuild keygen` makes a key",
        )


def _present(
    store: Store, ref: TagRef, trust: Trust, last_seen: int, sign: Signer | None
) -> _Present:
    document = store.read(ref.document_name)
    if document is None:
        return _Present()
    if sign is not None:
        trust = replace(trust, require_signature=True)
    # Expiry does not matter here: writing is how an expired tag is renewed.
    problem = tag_problem(ref, document.data, trust, last_seen=last_seen, now=_UNKNOWN_TIME)
    if problem is not None:
        return _Present(document, problem)
    if sign is None and Envelope.from_json(document.data).signatures:
        raise ConfigError(
            f"tag {ref} of {store.url} is signed, and there is no key to sign it with again",
            field="--key",
            hint="give --key FILE or URI, or use another tag",
        )
    return _Present(document, statement=statement_of(document))


def _mergeable(store: Store, ref: TagRef, present: _Present) -> Index:
    """The index to merge with; an empty one where there is nothing to keep."""
    problem = present.problem
    if problem is not None and problem.kind is ProblemKind.BAD_ENTRY:
        raise IntegrityError(
            f"{ref.document_name} of {store.url} is damaged, and is not written over by a push: "
            f"{problem.detail}",
            value=ref.document_name,
            hint=problem.hint,
        )
    if problem is not None:
        raise IntegrityError(
            f"tag {ref} of {store.url} is not to be merged with: {problem.detail}",
            value=str(ref),
            hint="find out who wrote it; a new tag name, or removing the tag, starts afresh",
        )
    if present.statement is None:
        return Index()
    try:
        return read_index(store, present.statement.index) or Index()
    except IntegrityError as error:
        _log.warning("index of tag %s of %s is lost: %s", ref, store.url, error.message)
        return Index()
