"""An entry: one cached unit. Written last; its presence is the commit point of a compile.

The key covers the recipe alone: what a compile produced cannot be known before. So an entry's document
starts with the digest of the rest of it, and a byte that changed anywhere is noticed. Who wrote it is
another question, and the signed manifest's to answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from neffbuild.cache.canonical import (
    canonical_json,
    digest_bytes,
    digest_document,
    parse_json,
    refuse_constant,
    require_digest,
    require_object,
)
from neffbuild.config.errors import IntegrityError

SCHEMA = "neffbuild.entry/1"
_PART = r"(?!\.{1,2}(?:/|\Z))[^/\\\x00-\x1f\x7f]+"
_FILE_NAME = re.compile(rf"{_PART}(?:/{_PART})*")
_LONGEST_NAME = 255


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
        return sealed(canonical_json(self.document()))

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
                recipe=require_object(document["recipe"]),
                files={
                    _safe_name(name): _file_record(record)
                    for name, record in require_object(document["files"]).items()
                },
                graph_digest=require_digest(document["graph_digest"]),
                graph_key=require_digest(document["graph_key"]),
                statistics=require_object(document["statistics"]),
            )
            key = entry.key
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise IntegrityError(f"entry is malformed: {error!r}") from error
        _check_files(entry.files)
        if expected_key is not None and key != expected_key:
            raise IntegrityError(f"entry filed under {expected_key} holds the recipe of {key}")
        return entry

    @classmethod
    def from_json(cls, data: bytes, *, expected_key: str) -> Self:
        """Parse an entry document as a store returned it. Raises `IntegrityError`."""
        return cls.from_document(parse_json(_unsealed(data), "entry"), expected_key=expected_key)


def sealed(body: bytes) -> bytes:
    """A JSON object with its own SHA-256 as its first field, `digest`."""
    return b'{"digest":"%b",%b' % (digest_bytes(body).encode(), body[1:])


_SEAL = re.compile(rb'\{"digest":"([0-9a-f]{64})",')


def _unsealed(data: bytes) -> bytes:
    """Inverse of `sealed`. Raises `IntegrityError` when the digest is missing or another's."""
    seal = _SEAL.match(data)
    if seal is None:
        raise IntegrityError("entry does not start with its digest")
    body = b"{" + data[seal.end() :]
    if digest_bytes(body) != seal[1].decode():
        raise IntegrityError("entry does not have the digest that it states")
    return body


_CANONICAL_START = '{"files":'
_CANONICAL_GRAPH = re.compile(
    r',"graph_digest":"[0-9a-f]{64}","graph_key":"[0-9a-f]{64}","recipe":(?={)'
)
_CANONICAL_END = f',"schema":"{SCHEMA}","statistics":'
_raw_decode = json.JSONDecoder(parse_constant=refuse_constant).raw_decode


def entry_blobs(data: bytes, *, expected_key: str) -> Mapping[str, int]:
    """digest → size of the blobs that an entry document names. Raises as `entry_files` does."""
    files = entry_files(data, expected_key=expected_key)
    return {record.digest: record.size for record in files.values()}


def entry_files(data: bytes, *, expected_key: str) -> Mapping[str, FileRecord]:
    """The files that an entry document names, accepting what `Entry.from_json` does.

    Raises `IntegrityError`. Several times faster: entries are written as canonical JSON, so the bytes
    between the fields around the recipe must hash to the key, and then they *are* the recipe and need
    no parsing. A document in any other form takes the long way.
    """
    body = _unsealed(data)
    files = _files_of_canonical(body, expected_key)
    if files is None:
        document = parse_json(body, "entry")
        return Entry.from_document(document, expected_key=expected_key).files
    return files


def _files_of_canonical(data: bytes, expected_key: str) -> dict[str, FileRecord] | None:
    """The files of a canonical entry document, or None when it is not certainly one."""
    try:
        text = data.decode()
        # Canonical JSON escapes nothing but control characters; escapes need the careful parser.
        if not text.startswith(_CANONICAL_START) or "\\u" in text:
            return None
        files, after_files = _raw_decode(text, len(_CANONICAL_START))
        graph = _CANONICAL_GRAPH.match(text, after_files)
        if graph is None:
            return None
        after_recipe = text.find(_CANONICAL_END, graph.end())
        recipe = text[graph.end() : after_recipe].encode()
        if after_recipe < 0 or digest_bytes(recipe) != expected_key:
            return None
        statistics, after = _raw_decode(text, after_recipe + len(_CANONICAL_END))
        if text[after:] != "}" or not isinstance(statistics, dict):
            return None
        records = {_safe_name(name): _file_record(record) for name, record in files.items()}
        _check_files(records)
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError):
        return None
    return records


def _check_files(files: Mapping[str, FileRecord]) -> None:
    if not files:
        raise IntegrityError("entry names no files")
    folders = {name[:slash] for name in files for slash in _slashes(name)}
    if clash := folders & set(files):
        raise IntegrityError(f"entry names {min(clash)!r} as a file and as a folder")
    sizes: dict[str, int] = {}
    for record in files.values():
        if sizes.setdefault(record.digest, record.size) != record.size:
            raise IntegrityError(f"entry gives blob {record.digest} two sizes")


def _slashes(name: str) -> list[int]:
    return (
        [index for index, character in enumerate(name) if character == "/"] if "/" in name else []
    )


def _safe_name(name: str) -> str:
    """A relative POSIX path that stays inside, in its one spelling: no empty part, `.` or `..`."""
    if not _FILE_NAME.fullmatch(name) or len(name.encode()) > _LONGEST_NAME:
        raise IntegrityError(f"entry names the unsafe file {name!r}")
    return name


def _file_record(document: Any) -> FileRecord:
    size, mode = document["size"], document["mode"]
    if type(size) is not int or size < 0 or type(mode) is not int or not 0 <= mode <= 0o777:
        raise IntegrityError(f"malformed file record {document!r}")
    return FileRecord(digest=require_digest(document["digest"]), size=size, mode=mode)
