"""Which of thousands of units a remote store has whole, with requests by the page and not by the unit.

What blobs a unit needs stands in its entry, and reading every entry is a request each. A pushed
manifest holds whole entries, thousands in one document: what a few recent ones say is believed where
the entry is still listed and its blobs are. The rest is read entry by entry.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

from neffbuild.cache.catalog import (
    entry_key,
    entry_name,
    missing_blobs,
    read_manifest,
    whole_keys,
)
from neffbuild.cache.store import Store
from neffbuild.config.errors import IntegrityError

FEW = 64
"""Up to so many units are read one by one: less than manifests would cost."""

_MANIFESTS = 8
"""Newest manifests read; older ones hardly describe what is planned today."""

_log = logging.getLogger(__name__)


def whole_units(store: Store, keys: Collection[str]) -> set[str]:
    """Those of these keys under which a whole entry is stored. Raises `StoreError`."""
    left = set(keys)
    sure: set[str] = set()
    if len(left) > FEW:
        left = {entry_key(name) for name in store.present_documents(map(entry_name, left))}
    if len(left) > FEW:
        described = _described(store, left)
        lost = missing_blobs(store, described)
        sure = described.keys() - lost.keys()
    rest = whole_keys(store, left - sure)
    return sure | {key for key, fault in rest.items() if fault is None}


def _described(store: Store, keys: Collection[str]) -> dict[str, Mapping[str, int]]:
    """key → digest → size of its blobs, for the keys that recent manifests hold entries of."""
    found: dict[str, Mapping[str, int]] = {}
    newest = sorted(store.list("manifests/"), key=lambda one: one.modified, reverse=True)
    for listed in newest[:_MANIFESTS]:
        if len(found) == len(keys):
            break
        try:
            manifest = read_manifest(store, entry_key(listed.name))
        except IntegrityError as error:
            _log.debug("ignoring a manifest in %s: %s", store.url, error.message)
            continue
        if manifest is not None:
            for key in manifest.entries.keys() & (set(keys) - found.keys()):
                found[key] = manifest.entries[key].blobs
    return found
