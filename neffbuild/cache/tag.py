"""A tag: a name that moves. A signed statement of which index a name stands for now.

Everything below a tag is content-addressed; the tag alone can lie. So it states its own name (a tag's
document cannot be filed under another), a sequence that only rises (an old one cannot be served
again unnoticed) and, if wanted, when it expires.
"""

from __future__ import annotations

import logging
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Self

from neffbuild.cache import tag_hints
from neffbuild.cache.canonical import canonical_json, parse_json, require_digest
from neffbuild.cache.catalog import read_index, write_index
from neffbuild.cache.envelope import Envelope, Signature
from neffbuild.cache.index import Index
from neffbuild.cache.problem import Problem, ProblemKind
from neffbuild.cache.store import Document, Store
from neffbuild.config.errors import ConfigError, IntegrityError, StoreError

SCHEMA = "neffbuild.tag/1"
PAYLOAD_TYPE = "application/vnd.neffbuild.tag+json"
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_ATTEMPTS = 50
_LONGEST_PAUSE = 0.5
_HIGHEST_SEQUENCE = (1 << 53) - 1  # what every JSON parser keeps exactly
_UNKNOWN_TIME = datetime.min.replace(tzinfo=UTC)
_log = logging.getLogger(__name__)

Signer = Callable[[bytes], Sequence[Signature]]
"""`Envelope.signed_bytes` → signatures over them."""
SignatureCheck = Callable[[Envelope], str | None]
"""An envelope → why its signatures are not good enough, or None."""


@dataclass(frozen=True, slots=True)
class TagRef:
    """NAME:TAG."""

    name: str
    tag: str

    def __post_init__(self) -> None:
        for word in (self.name, self.tag):
            if not _WORD.fullmatch(word):
                raise ConfigError(
                    f"{word!r} cannot be part of a tag: up to 128 letters, digits, '.', '_' and '-', "
                    "starting with a letter or digit",
                    field="tag",
                    value=word,
                )

    @classmethod
    def parse(cls, text: str, *, default_name: str | None = None) -> Self:
        """`NAME:TAG`, or `TAG` alone where a default name is given. Raises `ConfigError`."""
        name, colon, tag = text.rpartition(":")
        if not colon and default_name is not None:
            name = default_name
        elif not colon:
            raise ConfigError(f"{text!r} is not NAME:TAG", field="tag", value=text)
        return cls(name, tag)

    @property
    def document_name(self) -> str:
        return f"tags/{self.name}/{self.tag}.json"

    def __str__(self) -> str:
        return f"{self.name}:{self.tag}"


@dataclass(frozen=True, slots=True)
class Trust:
    """Whom to believe. `check` verifies signatures and is asked whenever an envelope has some, and
    always with `require_signature`; without a `check` a required signature is never good.
    `min_sequence` is the lowest sequence a tag may have."""

    require_signature: bool = False
    min_sequence: int = 0
    check: SignatureCheck | None = None

    def fault(self, envelope: Envelope) -> str | None:
        """Why an envelope's signatures are not good enough, or None."""
        if not envelope.signatures and not self.require_signature:
            return None
        if not envelope.signatures:
            return "it is not signed, and a signature is required"
        if self.check is not None:
            return self.check(envelope)
        required = self.require_signature
        return "a signature is required and no key is configured" if required else None


@dataclass(frozen=True, slots=True)
class TagStatement:
    """What the envelope's payload says. `expires` is UTC, in whole seconds."""

    ref: TagRef
    index: str
    sequence: int
    expires: datetime | None = None

    def document(self) -> dict[str, Any]:
        expires = self.expires and self.expires.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return {
            "schema": SCHEMA,
            "name": self.ref.name,
            "tag": self.ref.tag,
            "index": self.index,
            "sequence": self.sequence,
            "expires": expires,
        }

    def payload(self) -> bytes:
        return canonical_json(self.document())

    @classmethod
    def from_envelope(cls, envelope: Envelope) -> Self:
        """Raises `IntegrityError` when the payload is not a tag statement."""
        if envelope.payload_type != PAYLOAD_TYPE:
            raise IntegrityError(f"envelope holds a {envelope.payload_type!r}, not a tag")
        document = parse_json(envelope.payload, "tag")
        try:
            if document["schema"] != SCHEMA:
                raise IntegrityError(f"tag has schema {document['schema']!r}, expected {SCHEMA}")
            sequence = document["sequence"]
            if type(sequence) is not int or not 1 <= sequence <= _HIGHEST_SEQUENCE:
                raise IntegrityError(f"tag has the malformed sequence {sequence!r:.50}")
            return cls(
                ref=TagRef(document["name"], document["tag"]),
                index=require_digest(document["index"]),
                sequence=sequence,
                expires=_instant(document["expires"]),
            )
        except (KeyError, TypeError, ValueError, ConfigError) as error:
            raise IntegrityError(f"tag is malformed: {error!r}") from error


def tag_problem(
    ref: TagRef, data: bytes, trust: Trust, *, last_seen: int, now: datetime
) -> Problem | None:
    """What is wrong with a tag's document as served under `ref`, the gravest first, or None."""
    try:
        envelope = Envelope.from_json(data)
        reason = trust.fault(envelope)
        if reason is not None:
            return Problem(
                ProblemKind.BAD_SIGNATURE, str(ref), reason, _signature_hint(envelope, trust)
            )
        statement = TagStatement.from_envelope(envelope)
    except IntegrityError as error:
        return Problem(ProblemKind.BAD_ENTRY, str(ref), error.message, tag_hints.UNREADABLE)
    if statement.ref != ref:
        detail = f"{ref} is answered with the tag {statement.ref}"
        return Problem(ProblemKind.BAD_ENTRY, str(ref), detail, tag_hints.UNREADABLE)
    if statement.sequence < max(last_seen, trust.min_sequence):
        if last_seen >= trust.min_sequence:
            bound, hint = f"{last_seen} was seen here before", tag_hints.SEEN
        else:
            bound, hint = f"{trust.min_sequence} is required by min_sequence", tag_hints.REQUIRED
        detail = f"{ref} has sequence {statement.sequence}; {bound}"
        return Problem(ProblemKind.ROLLBACK, str(ref), detail, hint)
    if statement.expires is not None and statement.expires <= now:
        detail = f"{ref} expired at {statement.expires}"
        return Problem(ProblemKind.EXPIRED, str(ref), detail, tag_hints.expired(statement.expires))
    return None


def _signature_hint(envelope: Envelope, trust: Trust) -> str:
    if not envelope.signatures:
        return tag_hints.UNSIGNED
    return tag_hints.NO_KEY if trust.check is None else tag_hints.WRONG_KEY


def _vouched(ref: TagRef, data: bytes, trust: Trust) -> TagStatement | None:
    """What a tag's document says where it is signed by somebody who is believed, old or not."""
    try:
        envelope = Envelope.from_json(data)
        if not envelope.signatures or trust.check is None or trust.check(envelope) is not None:
            return None
        statement = TagStatement.from_envelope(envelope)
    except IntegrityError:
        return None
    return statement if statement.ref == ref else None


def resolve_tag(
    store: Store,
    ref: TagRef,
    trust: Trust,
    *,
    last_seen: int = 0,
    vouched: Callable[[TagStatement], object] = lambda _: None,
) -> TagStatement:
    """What a tag says now, if it can be believed. `vouched` is told of what a good signature stands
    for, also where it is refused as too old or expired.

    Raises `StoreError` naming the tags there are when there is no such tag, `IntegrityError` when it
    is unsigned or wrongly signed where that matters, rolled back, expired or malformed.
    """
    document = store.read(ref.document_name)
    if document is None:
        raise StoreError(_no_such_tag(store, ref), field="tag", value=str(ref))
    signed = _vouched(ref, document.data, trust)
    if signed is not None:
        vouched(signed)
    problem = tag_problem(ref, document.data, trust, last_seen=last_seen, now=datetime.now(UTC))
    if problem is not None:
        raise IntegrityError(
            f"tag {ref} of {store.url}: {problem.detail}", value=str(ref), hint=problem.hint
        )
    return _statement(document)


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
    return _Present(document, statement=_statement(document))


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


def _statement(document: Document) -> TagStatement:
    return TagStatement.from_envelope(Envelope.from_json(document.data))


def _no_such_tag(store: Store, ref: TagRef) -> str:
    names = [listed.name for listed in store.list("tags/")]
    tags = sorted(
        name.removeprefix("tags/").removesuffix(".json").replace("/", ":") for name in names
    )
    there = "it has no tags" if not tags else "it has " + ", ".join(tags[:20])
    return f"{store.url} has no tag {ref}; {there}"


def _instant(value: Any) -> datetime | None:
    if value is None:
        return None
    instant = datetime.fromisoformat(value)
    if instant.tzinfo is None:
        raise ValueError(f"{value!r} has no time zone")
    return instant.astimezone(UTC)
