"""Listings, and from them which of many objects exist: a request per page, never one per object.

No server is believed about where a listing ends: one cut short would make a collector delete what it
could not see. A page without anything new is the end. Each page starts after the last key of the one
before, which also a server that loses its continuation tokens understands.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from neffbuild.cache.s3.connection import Refusal, S3Connection
from neffbuild.cache.s3.errors import Expected
from neffbuild.config.errors import StoreError

PAGE = 1000
FEW = 8
"""Up to so many objects are asked for one by one: a listing may be much longer."""

_AT_ONCE = 8
_AFTER_NAMES = "\x7f"
"""Sorts after every character that names are made of."""


@dataclass(frozen=True, slots=True)
class Object:
    """One line of a listing; `modified` in epoch seconds, by the server's clock."""

    key: str
    size: int
    modified: float


def objects(s3: S3Connection, prefix: str) -> Iterator[Object]:
    """Every object whose key starts with `prefix`."""
    before: set[str] = set()
    after = ""
    while True:
        page, truncated = _page(s3, prefix, after)
        fresh = [item for item in page if item["Key"] not in before]
        if not fresh:
            _refuse_to_stop_early(s3, prefix, truncated and bool(page))
            return
        for item in fresh:
            yield Object(item["Key"], item["Size"], item["LastModified"].timestamp())
        before = {item["Key"] for item in page}
        after = page[-1]["Key"]


def folders(s3: S3Connection, prefix: str) -> list[str]:
    """What the keys below `prefix` have up to their next slash."""
    found: dict[str, None] = {}
    after = ""
    while True:
        response = s3.done("ListObjectsV2", Prefix=prefix, Delimiter="/", StartAfter=after)
        page = [common["Prefix"] for common in response.get("CommonPrefixes", ())]
        fresh = [folder for folder in page if folder not in found]
        if not fresh:
            _refuse_to_stop_early(s3, prefix, response["IsTruncated"] and bool(page))
            return list(found)
        found.update(dict.fromkeys(fresh))
        after = fresh[-1] + _AFTER_NAMES


def existing(s3: S3Connection, below: str, keys: Collection[str]) -> set[str]:
    """Which of these keys, all below one prefix, there are. Empty objects do not count: nothing that is
    stored is empty.

    Many keys of one shape (equal lengths, as names made from digests have) are looked for in listings
    that skip what nobody asked for: at most a request per page of what is there, and never more than
    one per key.
    """
    if len(keys) <= FEW:
        return {key for key in keys if _exists(s3, key)}
    shapes: dict[tuple[int, int], list[str]] = {}
    for key in set(keys):
        shapes.setdefault((len(key), key.rfind("/")), []).append(key)
    ranges = [part for shape in shapes.values() for part in _ranges(sorted(shape))]
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="s3-list") as pool:
        return set().union(*pool.map(partial(_existing_in_range, s3, below), ranges))


def _exists(s3: S3Connection, key: str) -> bool:
    answer = s3.call("HeadObject", key, expect={Expected.MISSING})
    return not isinstance(answer, Refusal) and answer["ContentLength"] > 0


def _ranges(wanted: Sequence[str]) -> list[Sequence[str]]:
    """Sorted keys cut into pieces that are worth a listing each, side by side."""
    pieces = min(_AT_ONCE, -(-len(wanted) // PAGE))
    size = -(-len(wanted) // pieces)
    return [wanted[start : start + size] for start in range(0, len(wanted), size)]


def _existing_in_range(s3: S3Connection, below: str, wanted: Sequence[str]) -> set[str]:
    asked_for = set(wanted)
    found: set[str] = set()
    position = 0
    last = ""
    while position < len(wanted):
        # What is one character shorter sorts right before: a listing starts after a key.
        page, truncated = _page(s3, below, max(last, wanted[position][:-1]))
        if not page or page[-1]["Key"] <= last:
            _refuse_to_stop_early(s3, below, truncated and bool(page))
            break
        last = page[-1]["Key"]
        found.update(asked_for.intersection(item["Key"] for item in page if item["Size"] > 0))
        position = bisect.bisect_right(wanted, last, lo=position)
    return found


def _page(s3: S3Connection, prefix: str, after: str) -> tuple[list[Any], bool]:
    response = s3.done("ListObjectsV2", Prefix=prefix, StartAfter=after, MaxKeys=PAGE)
    return response.get("Contents", []), response["IsTruncated"]


def _refuse_to_stop_early(s3: S3Connection, prefix: str, repeats_itself: bool) -> None:
    """A server that repeats a page and says there is more does not let us see the rest."""
    if repeats_itself:
        raise StoreError(
            f"cannot list s3://{s3.options.bucket}/{prefix}: the server repeats a page and says there "
            "is more",
            value=s3.options.url,
            hint="the endpoint does not page its listings (StartAfter) as S3 does",
        )
