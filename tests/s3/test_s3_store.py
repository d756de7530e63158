from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fault_proxy import FaultProxy, fault_proxy, ignore, refuse
from s3_servers import S3Server

from neffbuild.cache.canonical import digest_bytes
from neffbuild.cache.problem import ProblemKind
from neffbuild.cache.s3 import S3Options, S3Store
from neffbuild.config.errors import IntegrityError, StoreError

CONTENT = b"a compiled program" * 1000
DIGEST = digest_bytes(CONTENT)

NewBucket = Callable[[S3Server], str]


def open_s3(server: S3Server, bucket: str, **options: object) -> S3Store:
    return S3Store(S3Options.parse(server.url(bucket, **options)))


@pytest.fixture
def store(server: S3Server, new_bucket: NewBucket) -> S3Store:
    return open_s3(server, new_bucket(server))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def claims_expire_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """rclone, when many write at once, now and then leaves the temporary file of an upload beside it: a
    claim of nobody's, which everybody waits for until it expires."""
    monkeypatch.setattr("neffbuild.cache.s3.writes.CLAIM_EXPIRES", 12.0)
    monkeypatch.setattr("neffbuild.cache.s3.writes._CLAIM_USABLE", 5.0)


class TestDocuments:
    def test_created_document_reads_back_and_is_created_once(self, store: S3Store) -> None:
        assert store.read("runs/a.json") is None
        assert store.create("runs/a.json", b"1")
        assert not store.create("runs/a.json", b"2")
        document = store.read("runs/a.json")
        assert document is not None
        assert document.data == b"1"

    def test_replace_compares_with_what_was_read(self, store: S3Store) -> None:
        store.create("runs/a.json", b"1")
        first = store.read("runs/a.json")
        assert first is not None
        assert store.replace("runs/a.json", b"2", first.version)
        assert not store.replace("runs/a.json", b"3", first.version)
        second = store.read("runs/a.json")
        assert second is not None
        assert second.data == b"2"
        store.delete("runs/a.json")
        store.delete("runs/a.json")
        assert not store.replace("runs/a.json", b"3", second.version)
        assert store.read("runs/a.json") is None

    def test_listing_names_documents_only(self, store: S3Store, source: Path) -> None:
        store.create("tags/a/x.json", b"{}")
        store.create("tags/a-b/y.json", b"{}")
        store.create("tags/a.c/z.json", b"12345")
        store.create("runs/r.json", b"{}")
        store.put_blob(DIGEST, source)
        assert {one.name for one in store.list("")} == {
            "tags/a/x.json",
            "tags/a-b/y.json",
            "tags/a.c/z.json",
            "runs/r.json",
        }
        assert {one.name for one in store.list("tags/a")} == {
            "tags/a/x.json",
            "tags/a-b/y.json",
            "tags/a.c/z.json",
        }
        (found,) = store.list("tags/a.")
        assert (found.name, found.size) == ("tags/a.c/z.json", 5)
        assert found.modified > 1_600_000_000
        assert [one.name for one in store.list("r")] == ["runs/r.json"]
        assert list(store.list("nothing/")) == []

    @pytest.mark.parametrize("count", [3, 40])
    def test_read_many_gives_those_that_exist(self, store: S3Store, count: int) -> None:
        names = [f"failures/{digest_bytes(b'%d' % number)}.json" for number in range(count)]
        there = names[::2]
        for name in there:
            store.create(name, name.encode())
        found = dict(store.read_many(iter([*names, *names])))
        assert {name: document.data for name, document in found.items()} == {
            name: name.encode() for name in there
        }
        assert found[there[0]].version == store.read(there[0]).version  # type: ignore[union-attr]
        assert store.present_documents(names) == set(there)
        assert dict(store.read_many([])) == {}

    def test_names_that_are_no_names_are_refused(self, store: S3Store) -> None:
        for name in ("../x", "/x", "a//b", "a/", "", "a\n", "a b", ".hidden"):
            with pytest.raises(StoreError):
                store.read(name)
            with pytest.raises(StoreError):
                store.create(name, b"")
            with pytest.raises(StoreError):
                dict(store.read_many([name]))
        with pytest.raises(StoreError):
            list(store.list("../"))

    @pytest.mark.usefixtures("claims_expire_soon")
    def test_one_of_many_creators_wins(self, server: S3Server, new_bucket: NewBucket) -> None:
        bucket = new_bucket(server)
        stores = [open_s3(server, bucket) for _ in range(2)]
        stores[0].create("runs/warm.json", b"{}")

        for race in range(4):
            name, start = f"runs/race-{race}.json", threading.Barrier(6)

            def create(number: int, name: str = name, start: threading.Barrier = start) -> bool:
                start.wait()
                return stores[number % 2].create(name, b"writer %d" % number)

            with ThreadPoolExecutor(6) as pool:
                won = list(pool.map(create, range(6)))
            assert won.count(True) == 1
            document = stores[0].read(name)
            assert document is not None
            assert document.data == b"writer %d" % won.index(True)

    @pytest.mark.usefixtures("claims_expire_soon")
    def test_no_concurrent_replacement_is_lost(
        self, server: S3Server, new_bucket: NewBucket
    ) -> None:
        bucket = new_bucket(server)
        stores = [open_s3(server, bucket) for _ in range(2)]
        stores[0].create("runs/count.json", b"0")

        def count_up(number: int) -> None:
            for _ in range(4):
                while True:
                    current = stores[number % 2].read("runs/count.json")
                    assert current is not None
                    more = b"%d" % (int(current.data) + 1)
                    if stores[number % 2].replace("runs/count.json", more, current.version):
                        break

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(count_up, range(4)))
        assert stores[0].read("runs/count.json").data == b"16"  # type: ignore[union-attr]


class TestBlobs:
    @pytest.mark.parametrize("size", [0, 1, 18_000, 9 << 20])
    def test_blob_comes_back_as_it_was(self, store: S3Store, tmp_path: Path, size: int) -> None:
        source, copy = tmp_path / "source", tmp_path / "copy"
        content = os.urandom(size)
        source.write_bytes(content)
        digest = digest_bytes(content)
        assert store.present_blobs({digest: size}) == set()
        assert store.check_blob(digest, size) is ProblemKind.MISSING_BLOB
        store.put_blob(digest, source)
        assert store.present_blobs({digest: size, DIGEST: len(CONTENT)}) == {digest}
        assert store.check_blob(digest, size) is None
        store.fetch_blob(digest, size, copy)
        assert copy.read_bytes() == content

    def test_bytes_of_another_digest_are_refused_and_not_stored(
        self, store: S3Store, tmp_path: Path
    ) -> None:
        for size in (100, 9 << 20):
            source = tmp_path / "source"
            source.write_bytes(os.urandom(size))
            with pytest.raises(IntegrityError, match=DIGEST):
                store.put_blob(DIGEST, source)
            assert store.present_blobs({DIGEST: size}) == set()

    def test_missing_blob_is_an_integrity_error_that_leaves_no_file(
        self, store: S3Store, tmp_path: Path
    ) -> None:
        with pytest.raises(IntegrityError, match="missing_blob"):
            store.fetch_blob(DIGEST, 7, tmp_path / "copy")
        assert not (tmp_path / "copy").exists()

    def test_unreadable_source_and_unwritable_destination_are_named(
        self, store: S3Store, tmp_path: Path, source: Path
    ) -> None:
        with pytest.raises(StoreError, match="no-such-file"):
            store.put_blob(DIGEST, tmp_path / "no-such-file")
        store.put_blob(DIGEST, source)
        with pytest.raises(StoreError, match="no-such-folder"):
            store.fetch_blob(DIGEST, len(CONTENT), tmp_path / "no-such-folder/copy")

    def test_malformed_digest_is_refused(self, store: S3Store, source: Path) -> None:
        with pytest.raises(IntegrityError):
            store.put_blob("../../x", source)
        with pytest.raises(IntegrityError):
            store.check_blob("A" * 64, 1)

    def test_quarantine_removes_what_is_damaged_and_nothing_else(
        self, store: S3Store, source: Path, tmp_path: Path
    ) -> None:
        other = tmp_path / "other"
        other.write_bytes(b"other")
        store.put_blob(DIGEST, source)
        store.put_blob(digest_bytes(b"other"), other)
        for name in ("runs/old.json", "runs/changed.json"):
            store.create(name, b"1")
        version = store.read("runs/old.json").version  # type: ignore[union-attr]
        store.replace("runs/changed.json", b"2", version)
        store.quarantine(
            "key",
            {"runs/old.json": version, "runs/changed.json": version, "runs/none.json": version},
            {DIGEST: len(CONTENT), digest_bytes(b"other"): 99, digest_bytes(b"gone"): 4},
        )
        assert [one.name for one in store.list("")] == ["runs/changed.json"]
        sizes = {DIGEST: len(CONTENT), digest_bytes(b"other"): 5}
        assert store.present_blobs(sizes) == {DIGEST}


def test_changed_document_is_not_removed_where_deletion_does_not_compare(
    proxy: FaultProxy, new_bucket: NewBucket
) -> None:
    proxy.misbehave(ignore("if-match"), lambda request: request.method == "DELETE")
    store = open_s3(proxy.server, new_bucket(proxy.upstream))
    store.create("runs/a.json", b"1")
    old = store.read("runs/a.json").version  # type: ignore[union-attr]
    store.replace("runs/a.json", b"2", old)
    store.quarantine("key", {"runs/a.json": old}, {})
    current = store.read("runs/a.json")
    assert current is not None
    proxy.behave()
    proxy.misbehave(
        refuse(501, "NotImplemented"),
        lambda request: request.method == "DELETE" and "if-match" in request.headers,
    )
    store.quarantine("key", {"runs/a.json": current.version}, {})
    assert store.read("runs/a.json") is None


def test_a_stored_blob_is_not_sent_again(
    moto: S3Server, new_bucket: NewBucket, source: Path
) -> None:
    store = open_s3(moto, new_bucket(moto))
    store.put_blob(DIGEST, source)
    sent = store.statistics.document()["bytes_sent"]
    store.put_blob(DIGEST, source)
    assert store.statistics.document()["bytes_sent"] == sent


def test_blobs_are_compressed(moto: S3Server, new_bucket: NewBucket, source: Path) -> None:
    bucket = new_bucket(moto)
    open_s3(moto, bucket).put_blob(DIGEST, source)
    key = f"some/prefix/v1/blobs/sha256/{DIGEST[:2]}/{DIGEST}"
    stored = moto.client().get_object(Bucket=bucket, Key=key)
    assert stored["ContentLength"] < len(CONTENT) / 10
    assert stored["Body"].read(4) == b"\x28\xb5\x2f\xfd"


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_everything_stays_under_the_prefix_and_nothing_is_left(
    moto: S3Server, new_bucket: NewBucket, source: Path, tmp_path: Path, mode: str
) -> None:
    bucket = new_bucket(moto)
    with fault_proxy(moto) as proxy:
        store = open_s3(proxy.server, bucket, conditional_writes=mode)
        store.create("runs/a.json", b"1")
        store.replace("runs/a.json", b"2", store.read("runs/a.json").version)  # type: ignore[union-attr]
        store.put_blob(DIGEST, source)
        big = tmp_path / "big"
        big.write_bytes(os.urandom(9 << 20))
        store.put_blob(digest_bytes(big.read_bytes()), big)
        list(store.list(""))
        store.present_blobs({digest_bytes(b"%d" % number): 1 for number in range(30)})
        keys = {request.key for request in proxy.requests if not request.is_listing}
        assert keys
        assert all(key.startswith("some/prefix/v1/") for key in keys)
        prefixes = [r.query["prefix"][0] for r in proxy.requests if r.is_listing]
        assert prefixes
        assert all(prefix.startswith("some/prefix/v1/") for prefix in prefixes)
    left = {key.removeprefix("some/prefix/v1/").partition("/")[0] for key in moto.keys(bucket)}
    assert left == {"runs", "blobs"}


def test_no_two_stores_probe_the_same_key_and_readers_probe_none(
    proxy: FaultProxy, new_bucket: NewBucket
) -> None:
    bucket = new_bucket(proxy.server)
    proxy.behave()
    stores = [open_s3(proxy.server, bucket) for _ in range(3)]
    for store in stores:
        store.read("runs/a.json")
        list(store.list("tags/"))
    assert {request.method for request in proxy.requests} == {"GET"}
    for number, store in enumerate(stores):
        store.create(f"runs/{number}.json", b"1")
        store.create(f"runs/{number}-again.json", b"1")
    probes = [r.key for r in proxy.requests if r.method == "DELETE"]
    assert len(probes) == len(set(probes)) == 3
    assert proxy.counted()["PUT"] == 3 * (3 + 2)


def test_multipart_upload_carries_a_checksum_per_part_and_no_part_is_large(
    proxy: FaultProxy, new_bucket: NewBucket, tmp_path: Path
) -> None:
    store = open_s3(proxy.server, new_bucket(proxy.server))
    proxy.behave()
    big = tmp_path / "big"
    big.write_bytes(os.urandom(20 << 20))
    store.put_blob(digest_bytes(big.read_bytes()), big)
    parts = [request for request in proxy.requests if "partNumber" in request.query]
    assert len(parts) == 3
    assert all(len(request.body) <= 8 << 20 for request in parts)
    assert all("x-amz-checksum-crc32" in request.headers for request in parts)


def test_failed_upload_leaves_no_multipart_upload_behind(
    moto: S3Server, new_bucket: NewBucket, tmp_path: Path
) -> None:
    bucket = new_bucket(moto)
    big = tmp_path / "big"
    big.write_bytes(os.urandom(17 << 20))
    with pytest.raises(IntegrityError):
        open_s3(moto, bucket).put_blob(DIGEST, big)
    assert "Uploads" not in moto.client().list_multipart_uploads(Bucket=bucket)


def test_kms_key_and_bucket_owner_are_in_every_request_that_takes_them(
    proxy: FaultProxy, new_bucket: NewBucket, source: Path, tmp_path: Path
) -> None:
    bucket = new_bucket(proxy.server)
    proxy.behave()
    key = "arn:aws:kms:us-east-1:123456789012:key/1234abcd"
    store = open_s3(proxy.server, bucket, sse_kms_key_id=key, expected_bucket_owner="123456789012")
    store.create("runs/a.json", b"1")
    store.replace("runs/a.json", b"2", store.read("runs/a.json").version)  # type: ignore[union-attr]
    store.put_blob(DIGEST, source)
    big = tmp_path / "big"
    big.write_bytes(os.urandom(9 << 20))
    store.put_blob(digest_bytes(big.read_bytes()), big)
    store.fetch_blob(DIGEST, len(CONTENT), tmp_path / "copy")
    list(store.list(""))
    store.quarantine("label", {"runs/a.json": store.read("runs/a.json").version}, {DIGEST: 1})  # type: ignore[union-attr]
    store.delete("runs/a.json")
    assert {"GET", "LIST", "PUT", "POST", "HEAD", "DELETE"} == set(proxy.counted())
    for request in proxy.requests:
        assert request.headers["x-amz-expected-bucket-owner"] == "123456789012"
        creates = (request.method == "PUT" and "partNumber" not in request.query) or (
            request.method == "POST" and "uploads" in request.query
        )
        sent = request.headers.get("x-amz-server-side-encryption-aws-kms-key-id")
        assert sent == (key if creates else None)
        assert (request.headers.get("x-amz-server-side-encryption") == "aws:kms") == creates
