"""What can be wrong with stored things, in the words of `neffbuild.verify/1`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

FileCheck = Callable[[Path], str | None]
"""A file → why it is not whole, or None; whoever knows its kind has one."""


class ProblemKind(StrEnum):
    """`problems[].kind`."""

    MISSING_UNIT = "missing_unit"
    MISSING_BLOB = "missing_blob"
    BAD_DIGEST = "bad_digest"
    BAD_SIZE = "bad_size"
    BAD_ENTRY = "bad_entry"
    BAD_SIGNATURE = "bad_signature"
    EXPIRED = "expired"
    ROLLBACK = "rollback"


@dataclass(frozen=True, slots=True)
class Problem:
    """One finding. `key` is the unit's key where a unit is concerned, else the digest of a manifest
    or index, or a tag as NAME:TAG. `hint` is what to do where the kind does not say it all; it is no
    part of the document."""

    kind: ProblemKind
    key: str
    detail: str
    hint: str | None = None

    def document(self) -> dict[str, str]:
        return {"kind": self.kind.value, "key": self.key, "detail": self.detail}
