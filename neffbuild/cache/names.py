"""The names of documents: relative POSIX paths that cannot leave the store, the same in every store."""

from __future__ import annotations

import re

from neffbuild.config.errors import StoreError

LAYOUT = "v1"
"""The layout version, above everything in a store."""

NOT_DOCUMENTS = frozenset({"blobs", "loaded", "quarantine", "tmp"})
"""Top-level folders that hold something else, left out when everything is listed."""

_NAMED_FREELY = "tags/"
"""Where folders have names of users' choice, `.json` at their end among them."""

_PART = "[A-Za-z0-9_][A-Za-z0-9._-]*"
_NAME = re.compile(rf"{_PART}(?:/{_PART})*")
_PREFIX = re.compile(rf"(?:{_PART}/)*(?:{_PART})?")


def is_name(text: str) -> bool:
    """Whether a document may have this name."""
    return _NAME.fullmatch(text) is not None


def is_place_of_document(folder: str, leaf: str) -> bool:
    """Whether what has this name in a folder (`""`, or a path that ends in `/`) can only be meant for a
    document, whatever it turns out to be."""
    return leaf.endswith(".json") and folder != _NAMED_FREELY and is_name(leaf)


def valid_name(name: str) -> str:
    """`name`, if a document may have it. Raises `StoreError` otherwise."""
    if not is_name(name):
        raise StoreError(f"{name!r} is not a document name", value=name)
    return name


def valid_prefix(prefix: str) -> str:
    """`prefix`, if a document's name may start with it. Raises `StoreError` otherwise."""
    if not _PREFIX.fullmatch(prefix):
        raise StoreError(f"{prefix!r} is not the start of a document name", value=prefix)
    return prefix
