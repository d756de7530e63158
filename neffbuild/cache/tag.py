"""A tag: a signed statement of which index a name stands for now.

Everything below a tag is content-addressed; the tag alone can lie. So it states its own name (a tag's
document cannot be filed under another), a sequence that only rises (an old one cannot be served
again unnoticed) and, if wanted, when it expires.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Self

from neffbuild.cache import tag_hints
from neffbuild.cache.canonical import canonical_json, parse_json, require_digest
from neffbuild.cache.envelope import Envelope
from neffbuild.cache.problem import Problem, ProblemKind
from neffbuild.cache.store import Document, Store
from neffbuild.config.errors import ConfigError, IntegrityError, StoreError

SCHEMA = "neffbuild.tag/1"
PAYLOAD_TYPE = "application/vnd.neffbuild.tag+json"
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_HIGHEST_SEQUENCE = (1 << 53) - 1  # what every JSON parser keeps exactly

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
    return statement_of(document)


def statement_of(document: Document) -> TagStatement:
    """What a tag's document says, believed or not. Raises `IntegrityError` where it is no tag."""
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
