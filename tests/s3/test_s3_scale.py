"""Thousands of entries cost requests by the page, not by the entry: counted at a proxy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from cache_samples import ANYONE, X86_V3, make_entry, make_manifest
from fault_proxy import FaultProxy
from moto.s3.models import s3_backends
from s3_servers import S3Server

from neffbuild.cache.canonical import digest_bytes
from neffbuild.cache.catalog import commit_entry, entry_name, stored_keys
from neffbuild.cache.directory import DirectoryStore
from neffbuild.cache.s3 import S3Options, S3Store
from neffbuild.cache.tag import TagRef
from neffbuild.cache.tiered import Tier, TieredStore
from neffbuild.cache.transfer import pull, push

COUNT = 2500
PAGES = 3
KEYS = [digest_bytes(b"entry %d" % number) for number in range(COUNT)]
BLOBS = {digest_bytes(b"blob %d" % number): 1000 for number in range(COUNT)}
ABSENT = {digest_bytes(b"absent %d" % number): 1000 for number in range(COUNT)}

NewBucket = Callable[[S3Server], str]


@pytest.fixture(scope="module")
def full_bucket(moto: S3Server) -> str:
    """2,500 entries and 10,000 blobs of a store, and things of others around it."""
    moto.client().create_bucket(Bucket="full")
    # Behind the server's back: 12,500 uploads take a minute.
    backend = s3_backends["123456789012"]["aws"]
    base = "some/prefix/v1"
    others = [digest_bytes(b"other %d" % number) for number in range(7500)]
    for digest in [*BLOBS, *others]:
        backend.put_object("full", f"{base}/blobs/sha256/{digest[:2]}/{digest}", b"zstd")
    for key in KEYS:
        backend.put_object("full", f"{base}/{entry_name(key)}", b"{}")
    for number in range(50):
        backend.put_object("full", f"another/{number}", b"x")
        backend.put_object("full", f"some/prefix/v1/tags/llama/{number}.json", b"{}")
    return "full"


@pytest.fixture
def store(proxy: FaultProxy, full_bucket: str) -> S3Store:
    return S3Store(S3Options.parse(proxy.server.url(full_bucket)))


def test_thousands_of_entries_are_listed_and_looked_for_by_the_page(
    store: S3Store, proxy: FaultProxy
) -> None:
    proxy.behave()
    assert len(list(store.list("entries/"))) == COUNT
    assert proxy.counted() == {"LIST": PAGES + 1}

    names = [entry_name(key) for key in KEYS]
    absent = [entry_name(key) for key in ABSENT]
    proxy.behave()
    assert store.present_documents([*names, *absent]) == set(names)
    assert set(proxy.counted()) == {"LIST"}
    assert proxy.counted()["LIST"] <= 2 * PAGES + 2

    proxy.behave()
    assert dict(store.read_many(absent)) == {}
    assert set(proxy.counted()) == {"LIST"}
    assert proxy.counted()["LIST"] <= 2 * PAGES

    proxy.behave()
    assert len(list(store.list(""))) == COUNT + 50
    assert proxy.counted() == {"LIST": PAGES + 1 + 2 + 2}


def test_thousands_of_blobs_are_looked_for_by_the_page(store: S3Store, proxy: FaultProxy) -> None:
    proxy.behave()
    assert store.present_blobs(BLOBS | ABSENT) == set(BLOBS)
    assert set(proxy.counted()) == {"LIST"}
    assert proxy.counted()["LIST"] <= 10 + 8

    # Far fewer than there are: the listing skips from one to the next, and one by one at the worst.
    few = dict(list(BLOBS.items())[:12])
    proxy.behave()
    assert store.present_blobs(few) == set(few)
    assert proxy.counted()["LIST"] <= 10

    proxy.behave()
    assert store.present_blobs(dict(list(BLOBS.items())[:3])) == set(list(BLOBS)[:3])
    assert proxy.counted() == {"HEAD": 3}


def test_existing_documents_are_read_once_each_and_missing_ones_not_at_all(
    store: S3Store, proxy: FaultProxy
) -> None:
    proxy.behave()
    known = stored_keys(store, [*KEYS[:100], *ABSENT])
    assert set(known) == set(KEYS[:100])
    # The entries, and the failures that are looked for where there is no entry.
    assert proxy.counted()["GET"] == 100
    assert proxy.counted()["LIST"] <= 2 * (PAGES + 3)
    assert set(proxy.counted()) == {"GET", "LIST"}


@pytest.mark.slow
def test_thousands_of_entries_are_pushed_planned_and_pulled_without_asking_for_each(
    proxy: FaultProxy, new_bucket: NewBucket, local: DirectoryStore, tmp_path: Path
) -> None:
    remote = S3Store(S3Options.parse(proxy.server.url(new_bucket(proxy.upstream))))
    tag = TagRef("llama", "prod")
    entries = []
    for number in range(COUNT):
        made = make_entry(tmp_path / "scratch", number, contents={"graph.neff": b"%d" % number})
        entries.append(commit_entry(local, *made))
    manifest = make_manifest(entries)
    proxy.behave()
    push(local, remote, manifest, tag, trust=ANYONE)
    counted = proxy.counted()
    blobs = len(manifest.blobs)
    # Manifest, index, tag, lease; finding out what the server can.
    assert counted["PUT"] == blobs + COUNT + 4 + 3
    assert counted["LIST"] <= 10
    assert counted.get("HEAD", 0) == 0
    assert counted["GET"] <= 5

    # A farm that plans against the store, and one of whose units has lost a blob there.
    lost = entries[7]
    [blob] = lost.blobs
    remote.delete_blobs([blob])
    fresh = DirectoryStore(tmp_path / "fresh")
    tiered = TieredStore(fresh, [Tier(remote, readable=True, writable=False)])
    proxy.behave()
    planned = tiered.stored_keys([*(entry.key for entry in entries), *ABSENT])
    assert planned == {entry.key: None for entry in entries if entry is not lost}
    # The manifest; the entry that is not whole.
    assert proxy.counted()["GET"] == 2
    assert proxy.counted()["LIST"] <= 2 * PAGES + 2 * PAGES + 2
    assert set(proxy.counted()) <= {"GET", "LIST", "HEAD"}
    assert proxy.counted().get("HEAD", 0) <= 1
    remote.put_blob(blob, local.blob_path(blob))

    proxy.behave()
    assert pull(remote, fresh, tag, platform=X86_V3, trust=ANYONE).blobs_copied == blobs
    assert proxy.counted() == {"GET": blobs + 3}

    proxy.behave()
    assert pull(remote, fresh, tag, platform=X86_V3, trust=ANYONE).blobs_copied == 0
    assert proxy.counted() == {"GET": 3}
