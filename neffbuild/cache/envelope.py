"""DSSE envelopes: a payload and the signatures over it (github.com/secure-systems-lab/dsse).

The payload is bytes, not a document: what was signed is what is parsed, with nothing canonicalised
in between.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from neffbuild.cache.canonical import canonical_json, parse_json
from neffbuild.config.errors import IntegrityError


@dataclass(frozen=True, slots=True)
class Signature:
    """A signature by the key that `keyid` hints at."""

    keyid: str
    sig: bytes


@dataclass(frozen=True, slots=True)
class Envelope:
    """`payload_type` says what the payload is and is signed with it; `signatures` may be empty."""

    payload_type: str
    payload: bytes
    signatures: tuple[Signature, ...] = ()

    @property
    def signed_bytes(self) -> bytes:
        """What a signature covers: DSSE's pre-authentication encoding of type and payload."""
        kind = self.payload_type.encode()
        return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(self.payload), self.payload)

    def with_signatures(self, signatures: Sequence[Signature]) -> Envelope:
        return Envelope(self.payload_type, self.payload, tuple(signatures))

    def to_json(self) -> bytes:
        return canonical_json(
            {
                "payloadType": self.payload_type,
                "payload": base64.b64encode(self.payload).decode(),
                "signatures": [
                    {"keyid": one.keyid, "sig": base64.b64encode(one.sig).decode()}
                    for one in self.signatures
                ],
            }
        )

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Parse what a store returned; says nothing about whether the signatures are good.

        Raises `IntegrityError` when it is not an envelope.
        """
        document = parse_json(data, "envelope")
        try:
            signatures = document["signatures"]
            if not isinstance(signatures, list):
                raise TypeError("signatures are not a list")
            return cls(
                payload_type=_text(document["payloadType"]),
                payload=_decoded(document["payload"]),
                signatures=tuple(
                    Signature(_text(one.get("keyid", "")), _decoded(one["sig"]))
                    for one in signatures
                ),
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise IntegrityError(f"envelope is malformed: {error!r}") from error


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, got {type(value).__name__}")
    return value


def _decoded(value: Any) -> bytes:
    text = _text(value)
    data = base64.b64decode(text, validate=True)
    if base64.b64encode(data).decode() != text:
        # The last digit may hold bits that mean nothing: still not what was written.
        raise ValueError("base64 is not in its one spelling")
    return data
