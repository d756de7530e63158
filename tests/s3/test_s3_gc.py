"""Collecting a bucket: the same rules as for a directory, and what only a bucket has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from cache_samples import ANYONE, X86_V4, fill, make_manifest
from fault_proxy import FaultProxy
from s3_servers import S3Server

from neffbuild.cache.canonical import digest_file
from neffbuild.cache.directory import DirectoryStore
from neffbuild.cache.gc import collect
from neffbuild.cache.gc_rules import Decision, Policy
from neffbuild.cache.lease import leased
from neffbuild.cache.s3 import S3Options, S3Store
from neffbuild.cache.store import Listed
from neffbuild.cache.tag import TagRef
from neffbuild.cache.transfer import pull, push
from neffbuild.cache.verify import verify_store

PROD = TagRef("llama", "prod")
# Nothing in a bucket can be made older than it is: times are the server's.
LATER = Policy(older_than=-10, max_size=0, untagged=True, grace=-10)

NewBucket = Callable[[S3Server], str]


def removed(decision: Decision, kind: str) -> set[str]:
    return {one.name for one in decision.removals if one.kind == kind}


def test_what_tags_reach_stays_and_the_rest_goes(
    server: S3Server, new_bucket: NewBucket, local: DirectoryStore, tmp_path: Path
) -> None:
    bucket = new_bucket(server)
    remote = S3Store(S3Options.parse(server.url(bucket)))
    entries = fill(local, tmp_path / "scratch", 5)
    push(local, remote, make_manifest(entries[:2]), PROD, trust=ANYONE)
    push(local, remote, make_manifest(entries[2:3], platform=X86_V4), PROD, trust=ANYONE)
    untagged = push(local, remote, make_manifest(entries[3:]), None, trust=ANYONE)
    orphan = tmp_path / "orphan"
    orphan.write_bytes(b"nobody names me")
    remote.put_blob(digest_file(orphan), orphan)
    before = server.keys(bucket)

    shown = collect(remote, LATER, delete=False).decision
    assert server.keys(bucket) == before
    assert removed(shown, "entry") == {entry.key for entry in entries[3:]}
    assert removed(shown, "manifest") == {untagged.manifest}
    assert digest_file(orphan) in removed(shown, "blob")

    done = collect(remote, LATER, delete=True).decision
    assert set(done.removals) == set(shown.removals)
    assert len(before - server.keys(bucket)) == len(done.removals) + len(done.leftovers)
    assert verify_store(remote, ANYONE).ok
    fresh = DirectoryStore(tmp_path / "fresh")
    assert len(pull(remote, fresh, PROD, platform=X86_V4, trust=ANYONE).manifest.entries) == 1


def test_a_leased_orphan_stays(
    moto: S3Server, new_bucket: NewBucket, local: DirectoryStore, tmp_path: Path
) -> None:
    remote = S3Store(S3Options.parse(moto.url(new_bucket(moto))))
    [entry] = fill(local, tmp_path / "scratch", 1)
    for digest in entry.blobs:
        remote.put_blob(digest, local.blob_path(digest))
    with leased(remote, documents=(), blobs=entry.blobs):
        assert removed(collect(remote, LATER, delete=True).decision, "blob") == set()
    assert removed(collect(remote, LATER, delete=True).decision, "blob") == set(entry.blobs)


def begin_uploads(server: S3Server, bucket: str, digest: str) -> None:
    client = server.client()
    for key in (f"some/prefix/v1/blobs/sha256/{digest[:2]}/{digest}", "some/other/file"):
        begun = client.create_multipart_upload(Bucket=bucket, Key=key)["UploadId"]
        client.upload_part(Bucket=bucket, Key=key, UploadId=begun, PartNumber=1, Body=b"part")


def uploads(server: S3Server, bucket: str) -> list[str]:
    listed = server.client().list_multipart_uploads(Bucket=bucket)
    return sorted(one["Key"] for one in listed.get("Uploads", []))


def test_uploads_that_nobody_completed_are_aborted(moto: S3Server, new_bucket: NewBucket) -> None:
    """This server dates every upload years back."""
    bucket, digest = new_bucket(moto), "ab" * 32
    remote = S3Store(S3Options.parse(moto.url(bucket)))
    begin_uploads(moto, bucket, digest)
    with leased(remote, documents=(), blobs=[digest]):
        assert collect(remote, Policy(), delete=True).decision.leftovers == ()
    [left] = collect(remote, Policy(), delete=True).decision.leftovers
    assert (left.kind, left.of) == ("upload", digest)
    assert uploads(moto, bucket) == ["some/other/file"]
    remote.delete_leftover(left)  # gone already


def test_uploads_under_way_are_left_alone(seaweed: S3Server, new_bucket: NewBucket) -> None:
    bucket, digest = new_bucket(seaweed), "ab" * 32
    remote = S3Store(S3Options.parse(seaweed.url(bucket)))
    begin_uploads(seaweed, bucket, digest)
    [left] = remote.list_leftovers()
    assert (left.kind, left.of) == ("upload", digest)
    assert collect(remote, Policy(grace=0), delete=True).decision.leftovers == ()
    remote.delete_leftover(left)
    assert uploads(seaweed, bucket) == ["some/other/file"]


def test_thousands_are_removed_by_the_batch(
    proxy: FaultProxy, new_bucket: NewBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = new_bucket(proxy.upstream)
    remote = S3Store(S3Options.parse(proxy.server.url(bucket)))
    client = proxy.upstream.client()
    for number in range(30):
        client.put_object(Bucket=bucket, Key=f"some/prefix/v1/runs/{number}.json", Body=b"{}")
    names = [listed.name for listed in remote.list("runs/")]
    assert len(names) == 30
    proxy.behave()
    remote.delete_many([*names, *(f"runs/none{n}.json" for n in range(2470))])
    assert sum(proxy.counted().values()) == 3
    assert list(remote.list("")) == []


def test_a_listing_of_blobs_shows_nothing_but_blobs(
    moto: S3Server, new_bucket: NewBucket, local: DirectoryStore, tmp_path: Path
) -> None:
    bucket = new_bucket(moto)
    remote = S3Store(S3Options.parse(moto.url(bucket)))
    [entry] = fill(local, tmp_path / "scratch", 1)
    push(local, remote, make_manifest([entry]), PROD, trust=ANYONE)
    for key in ("blobs/sha256/aa/short", f"blobs/sha256/aa/{'b' * 64}", "blobs/readme"):
        moto.client().put_object(Bucket=bucket, Key=f"some/prefix/v1/{key}", Body=b"x")
    listed: list[Listed] = list(remote.list_blobs())
    assert {one.name for one in listed} == set(entry.blobs)
