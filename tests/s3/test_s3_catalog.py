"""Entries, manifests and tags in a bucket, as builders and pullers use them."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from cache_samples import (
    ANYONE,
    X86_V3,
    X86_V4,
    fill,
    make_entry,
    make_manifest,
    start_child,
    wait_for,
)
from s3_servers import S3Server

from neffbuild.cache.catalog import (
    Broken,
    Hit,
    Miss,
    commit_entry,
    entry_name,
    read_entry,
    read_index,
    stored_keys,
)
from neffbuild.cache.directory import DirectoryStore
from neffbuild.cache.entry import Entry
from neffbuild.cache.manifest import Manifest
from neffbuild.cache.problem import ProblemKind
from neffbuild.cache.s3 import S3Options, S3Store
from neffbuild.cache.tag import TagRef, resolve_tag
from neffbuild.cache.transfer import pull, push
from neffbuild.cache.verify import repair, verify_store, verify_tag
from neffbuild.config.errors import IntegrityError

PROD = TagRef("llama", "prod")

NewBucket = Callable[[S3Server], str]


@pytest.fixture
def bucket(seaweed: S3Server, new_bucket: NewBucket) -> str:
    return new_bucket(seaweed)


@pytest.fixture
def remote(seaweed: S3Server, bucket: str) -> S3Store:
    return S3Store(S3Options.parse(seaweed.url(bucket)))


def blob_key(digest: str) -> str:
    return f"some/prefix/v1/blobs/sha256/{digest[:2]}/{digest}"


def test_pushed_manifest_is_pulled_whole_and_once(
    local: DirectoryStore, remote: S3Store, tmp_path: Path
) -> None:
    manifest = make_manifest(fill(local, tmp_path / "scratch", 4))
    pushed = push(local, remote, manifest, PROD, trust=ANYONE)
    assert pushed.blobs_copied == len(manifest.blobs)
    assert verify_store(remote, ANYONE).ok
    assert push(local, remote, manifest, PROD, trust=ANYONE).blobs_copied == 0

    fresh = DirectoryStore(tmp_path / "fresh")
    pulled = pull(remote, fresh, PROD, platform=X86_V3, trust=ANYONE)
    assert pulled.manifest == manifest
    assert pulled.bytes_copied == sum(manifest.blobs.values())
    assert verify_store(fresh, ANYONE).ok
    assert pull(remote, fresh, PROD, platform=X86_V3, trust=ANYONE).blobs_copied == 0


def test_blobs_without_their_entry_are_a_miss_that_the_next_build_completes(
    remote: S3Store, tmp_path: Path
) -> None:
    entry, paths = make_entry(tmp_path, 0)
    for name, record in entry.files.items():
        remote.put_blob(record.digest, paths[name])
    assert read_entry(remote, entry.key) == Miss()
    assert commit_entry(remote, entry, paths) == entry
    assert read_entry(remote, entry.key) == Hit(entry)


def test_blob_removed_by_a_lifecycle_rule_makes_a_miss_that_is_healed(
    remote: S3Store, seaweed: S3Server, bucket: str, tmp_path: Path
) -> None:
    entry, paths = make_entry(tmp_path, 0)
    commit_entry(remote, entry, paths)
    lost = next(iter(entry.blobs))
    seaweed.client().delete_object(Bucket=bucket, Key=blob_key(lost))
    found = read_entry(remote, entry.key)
    assert isinstance(found, Broken)
    assert lost in found.reason
    assert lost in str(stored_keys(remote, [entry.key])[entry.key])
    problems = verify_store(remote, ANYONE).problems
    assert [(one.kind, one.key) for one in problems] == [(ProblemKind.MISSING_BLOB, entry.key)]

    assert commit_entry(remote, entry, paths) == entry
    assert verify_store(remote, ANYONE).ok


@pytest.mark.parametrize("planted", [b"", b"{", b'{"schema":"neffbuild.entry/1"}', b"\xff" * 50])
def test_broken_entry_is_replaced_rather_than_refused_for_ever(
    remote: S3Store, tmp_path: Path, planted: bytes
) -> None:
    entry, paths = make_entry(tmp_path, 0)
    assert remote.create(entry_name(entry.key), planted)
    assert isinstance(read_entry(remote, entry.key), Broken)
    assert commit_entry(remote, entry, paths) == entry
    assert read_entry(remote, entry.key) == Hit(entry)


def test_of_many_healers_one_entry_stands_and_all_agree_on_it(
    remote: S3Store, tmp_path: Path
) -> None:
    entry, paths = make_entry(tmp_path, 0)
    remote.create(entry_name(entry.key), b"{")

    def heal(number: int) -> Entry:
        mine = replace(entry, statistics={"compile_seconds": float(number)})
        return commit_entry(remote, mine, paths)

    with ThreadPoolExecutor(6) as pool:
        stood = list(pool.map(heal, range(6)))
    assert len({one.to_json() for one in stood}) == 1
    assert read_entry(remote, entry.key) == Hit(stood[0])


def test_blob_damaged_in_the_bucket_is_found_taken_out_and_pushed_anew(
    local: DirectoryStore, remote: S3Store, seaweed: S3Server, bucket: str, tmp_path: Path
) -> None:
    manifest = make_manifest(fill(local, tmp_path / "scratch", 2))
    push(local, remote, manifest, PROD, trust=ANYONE)
    damaged = sorted(manifest.blobs)[0]
    key = blob_key(damaged)
    stored = seaweed.client().get_object(Bucket=bucket, Key=key)["Body"].read()
    seaweed.client().put_object(Bucket=bucket, Key=key, Body=stored[:-3] + b"\0\0\0")

    fresh = DirectoryStore(tmp_path / "fresh")
    with pytest.raises(IntegrityError, match=damaged):
        pull(remote, fresh, PROD, platform=X86_V3, trust=ANYONE)
    assert list(fresh.list("entries/")) == []

    verified = verify_tag(remote, PROD, ANYONE)
    assert not verified.ok
    repair(remote, verified)
    push(local, remote, manifest, PROD, trust=ANYONE)
    assert verify_store(remote, ANYONE).ok
    assert pull(remote, fresh, PROD, platform=X86_V3, trust=ANYONE).manifest == manifest


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_two_platforms_pushed_at_once_to_one_tag_are_both_in_its_index(
    seaweed: S3Server, bucket: str, tmp_path: Path, mode: str
) -> None:
    remote = S3Store(S3Options.parse(seaweed.url(bucket, conditional_writes=mode)))
    jobs = []
    for platform in (X86_V3, X86_V4):
        local = DirectoryStore(tmp_path / str(platform["target"]))
        entries = fill(local, tmp_path / f"scratch-{platform['target']}", 3)
        jobs.append((local, make_manifest(entries, platform=platform)))

    def work(job: tuple[DirectoryStore, Manifest]) -> None:
        push(job[0], remote, job[1], PROD, trust=ANYONE)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, jobs))
    index = read_index(remote, resolve_tag(remote, PROD, ANYONE).index)
    assert index is not None
    for _, manifest in jobs:
        assert index.manifest_for(manifest.platform) == manifest.digest
    assert verify_store(remote, ANYONE).ok


def test_two_builders_pushing_overlapping_sets_leave_one_entry_per_key(
    remote: S3Store, tmp_path: Path
) -> None:
    jobs = []
    for number in range(2):
        local = DirectoryStore(tmp_path / f"local{number}")
        # The same units, built twice: other bytes, other statistics.
        entries = []
        for unit in range(5):
            contents = {"model.so": random.randbytes(5000), "binding.json": b"{}"}
            made = make_entry(tmp_path / f"scratch{number}", unit, contents=contents)
            entries.append(commit_entry(local, *made))
        jobs.append((local, make_manifest(entries), TagRef("llama", f"builder{number}")))
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda job: push(job[0], remote, job[1], job[2], trust=ANYONE), jobs))
    assert verify_store(remote, ANYONE).ok
    assert len(list(remote.list("entries/"))) == 5
    for number, (_, manifest, ref) in enumerate(jobs):
        fresh = DirectoryStore(tmp_path / f"fresh{number}")
        assert pull(remote, fresh, ref, trust=ANYONE).manifest == manifest
        assert verify_store(fresh, ANYONE).ok


def test_push_and_pull_killed_at_any_moment_leave_whole_things_and_go_on(
    local: DirectoryStore, remote: S3Store, tmp_path: Path
) -> None:
    entries = []
    for number in range(6):
        contents = {"model.so": random.randbytes(400_000), "binding.json": b"%d" % number}
        made = make_entry(tmp_path / "scratch", number, contents=contents)
        entries.append(commit_entry(local, *made))
    manifest = make_manifest(entries)
    fresh = DirectoryStore(tmp_path / "fresh")
    url = remote.url

    def work_for_ever() -> int:
        store = S3Store(S3Options.parse(url))
        while True:
            push(local, store, manifest, PROD, trust=ANYONE)
            pull(store, fresh, PROD, trust=ANYONE)
            for digest in manifest.blobs:
                store.quarantine("again", {}, {digest: 0})
                (fresh.root / "v1/blobs/sha256" / digest[:2] / digest).unlink(missing_ok=True)
            for entry in entries:
                store.delete(entry_name(entry.key))
                fresh.delete(entry_name(entry.key))

    for kill in range(6):
        child = start_child(work_for_ever)
        time.sleep(0.4 + 0.1 * kill)
        os.kill(child, signal.SIGKILL)
        assert wait_for(child) == -signal.SIGKILL
    push(local, remote, manifest, PROD, trust=ANYONE)
    assert verify_store(remote, ANYONE).ok
    pull(remote, fresh, PROD, trust=ANYONE)
    assert verify_store(fresh, ANYONE).ok
