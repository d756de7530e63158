"""An entry: one cached unit. Written last; its presence is the commit point of a compile."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Self

from neffbuild.cache.canonical import canonical_json, digest_document
from neffbuild.config.errors import IntegrityError

SCHEMA = "neffbuild.entry/1"
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One artifact file: SHA-256 and size in bytes of its raw content, permission bits."""

    digest: str
    size: int
    mode: int = 0o644

    def document(self) -> dict[str, Any]:
        return {"digest": self.digest, "size": self.size, "mode": self.mode}


@dataclass(frozen=True, slots=True)
class Entry:
    """A recipe and the files that compiling it produced.

    `files` maps the real file names (relative, no directories above) to their records; `graph_digest`
    is the digest of the captured graph; `graph_key` what the torch.compile backend looks up;
    `statistics` holds `compile_seconds`, `peak_memory_bytes` and whatever else the worker measured.
    """

    recipe: Mapping[str, Any]
    files: Mapping[str, FileRecord]
    graph_digest: str
    graph_key: str
    statistics: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """SHA-256 of the canonical recipe, so an entry cannot be filed under another's key."""
        return digest_document(self.recipe)

    @property
    def artifact_bytes(self) -> int:
        return sum(record.size for record in self.files.values())

    @property
    def blobs(self) -> dict[str, int]:
        """digest → size of every file, each once."""
        return {record.digest: record.size for record in self.files.values()}

    def document(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "recipe": dict(self.recipe),
            "files": {name: record.document() for name, record in self.files.items()},
            "graph_digest": self.graph_digest,
            "graph_key": self.graph_key,
            "statistics": dict(self.statistics),
        }

    def to_json(self) -> bytes:
        return canonical_json(self.document())

    @classmethod
    def from_document(cls, document: Any, *, expected_key: str | None = None) -> Self:
        """Parse what a store returned. Nothing in it is trusted.

        Raises `IntegrityError` naming what is wrong: another schema, a file name that leaves the
        entry's folder, a malformed digest, a negative size, a recipe that does not hash to
        `expected_key`.
        """
        try:
            if document["schema"] != SCHEMA:
                raise IntegrityError(f"entry has schema {document['schema']!r}, expected {SCHEMA}")
            entry = cls(
                recipe=_mapping(document["recipe"]),
                files={
                    _safe_name(name): _file_record(record)
                    for name, record in _mapping(document["files"]).items()
                },
                graph_digest=_digest(document["graph_digest"]),
                graph_key=_digest(document["graph_key"]),
                statistics=_mapping(document["statistics"]),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise IntegrityError(f"entry is malformed: {error!r}") from error
        if not entry.files:
            raise IntegrityError("entry names no files")
        if expected_key is not None and entry.key != expected_key:
            raise IntegrityError(
                f"entry filed under {expected_key} holds the recipe of {entry.key}",
            )
        return entry


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"expected an object, got {type(value).__name__}")
    return value


def _digest(value: Any) -> str:
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise IntegrityError(f"malformed SHA-256 digest {value!r}")
    return value


def _safe_name(name: str) -> str:
    path = PurePosixPath(name)
    escapes = path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name
    if escapes or str(path) != name or name in ("", "."):
        raise IntegrityError(f"entry names the unsafe file {name!r}")
    return name


def _file_record(document: Any) -> FileRecord:
    size, mode = document["size"], document["mode"]
    if type(size) is not int or size < 0 or type(mode) is not int or not 0 <= mode <= 0o777:
        raise IntegrityError(f"malformed file record {document!r}")
    return FileRecord(digest=_digest(document["digest"]), size=size, mode=mode)
