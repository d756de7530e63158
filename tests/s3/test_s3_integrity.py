"""What lies in a bucket is not trusted: every kind of damage is noticed, and bounded in what it costs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from s3_servers import S3Server

from neffbuild.cache.canonical import digest_bytes
from neffbuild.cache.problem import ProblemKind
from neffbuild.cache.s3 import S3Options, S3Store
from neffbuild.config.errors import IntegrityError, StoreError

CONTENT = os.urandom(3000) * 3
DIGEST = digest_bytes(CONTENT)
KEY = f"some/prefix/v1/blobs/sha256/{DIGEST[:2]}/{DIGEST}"
WHOLE = zstandard.compress(CONTENT)


def frame(content: bytes, window_log: int = 20) -> bytes:
    """A frame that does not say how long its content is and wants a window of its own."""
    parameters = zstandard.ZstdCompressionParameters(
        window_log=window_log, write_content_size=False
    )
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    return compressor.compress(content) + compressor.flush()


class Bucket:
    """A store, and the bucket behind its back."""

    def __init__(self, server: S3Server, name: str) -> None:
        self.store = S3Store(S3Options.parse(server.url(name)))
        self._server = server
        self._name = name

    def plant(self, data: bytes, key: str = KEY) -> None:
        self._server.client().put_object(Bucket=self._name, Key=key, Body=data)


@pytest.fixture(scope="module")
def seaweed_bucket(seaweed: S3Server) -> Bucket:
    seaweed.client().create_bucket(Bucket="integrity")
    return Bucket(seaweed, "integrity")


@pytest.mark.parametrize(
    ("planted", "kind"),
    [
        (b"", ProblemKind.BAD_SIZE),
        (WHOLE[:2], ProblemKind.BAD_SIZE),
        (WHOLE[: len(WHOLE) // 2], ProblemKind.BAD_SIZE),
        (CONTENT, ProblemKind.BAD_DIGEST),
        (b"<?xml version='1.0'?><Error><Code>Hm</Code></Error>", ProblemKind.BAD_DIGEST),
        (zstandard.compress(CONTENT[:-1]), ProblemKind.BAD_SIZE),
        (zstandard.compress(CONTENT + b"x"), ProblemKind.BAD_SIZE),
        (zstandard.compress(CONTENT[::-1]), ProblemKind.BAD_DIGEST),
        (WHOLE + zstandard.compress(b"more"), ProblemKind.BAD_SIZE),
        (WHOLE + b"garbage", ProblemKind.BAD_DIGEST),
        (frame(CONTENT, window_log=27), ProblemKind.BAD_DIGEST),
    ],
)
def test_damaged_blob_is_told_by_its_kind_and_never_delivered(
    seaweed_bucket: Bucket, tmp_path: Path, planted: bytes, kind: ProblemKind
) -> None:
    seaweed_bucket.plant(planted)
    store = seaweed_bucket.store
    assert store.check_blob(DIGEST, len(CONTENT)) is kind
    with pytest.raises(IntegrityError, match=DIGEST):
        store.fetch_blob(DIGEST, len(CONTENT), tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_what_follows_a_frame_counts_wherever_the_frame_ends(seaweed_bucket: Bucket) -> None:
    content = bytes(1 << 20)
    digest = digest_bytes(content)
    key = KEY.replace(DIGEST[:2], digest[:2], 1).replace(DIGEST, digest)
    seaweed_bucket.plant(zstandard.compress(content) + zstandard.compress(b"more"), key)
    assert seaweed_bucket.store.check_blob(digest, len(content)) is ProblemKind.BAD_SIZE


def test_another_compressors_frame_of_the_same_bytes_is_whole(seaweed_bucket: Bucket) -> None:
    for data in (frame(CONTENT), zstandard.compress(CONTENT, level=19)):
        seaweed_bucket.plant(data)
        assert seaweed_bucket.store.check_blob(DIGEST, len(CONTENT)) is None


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(position=st.integers(0, len(WHOLE) - 1), bit=st.integers(0, 7))
def test_no_flipped_bit_gets_through(seaweed_bucket: Bucket, position: int, bit: int) -> None:
    flipped = bytearray(WHOLE)
    flipped[position] ^= 1 << bit
    seaweed_bucket.plant(bytes(flipped))
    try:
        unpacked = zstandard.decompress(bytes(flipped), max_output_size=1 << 20)
    except zstandard.ZstdError:
        unpacked = b""
    fault = seaweed_bucket.store.check_blob(DIGEST, len(CONTENT))
    # A bit that changes nothing of the content is the one thing that may pass.
    assert (fault is None) == (unpacked == CONTENT)


def test_damaged_blob_taken_out_of_service_is_uploaded_anew(
    seaweed_bucket: Bucket, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.write_bytes(CONTENT)
    seaweed_bucket.plant(WHOLE[:-10])
    store = seaweed_bucket.store
    store.quarantine("key", {}, {DIGEST: len(CONTENT)})
    assert store.present_blobs({DIGEST: len(CONTENT)}) == set()
    store.put_blob(DIGEST, source)
    assert store.check_blob(DIGEST, len(CONTENT)) is None


def test_object_put_there_by_other_means_is_replaced(
    seaweed_bucket: Bucket, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.write_bytes(CONTENT)
    seaweed_bucket.plant(b"uploaded by hand")
    seaweed_bucket.store.put_blob(DIGEST, source)
    assert seaweed_bucket.store.check_blob(DIGEST, len(CONTENT)) is None


def test_empty_object_does_not_count_as_present(seaweed_bucket: Bucket) -> None:
    seaweed_bucket.plant(b"")
    assert seaweed_bucket.store.present_blobs({DIGEST: len(CONTENT)}) == set()
    others = {digest_bytes(b"%d" % number): 1 for number in range(20)}
    assert seaweed_bucket.store.present_blobs({DIGEST: len(CONTENT), **others}) == set()


def test_names_that_no_document_may_have_are_not_listed(seaweed_bucket: Bucket) -> None:
    for key in ("runs/..x/a.json", "runs/a b.json", "runs/-a.json", "runs/good.json"):
        seaweed_bucket.plant(b"{}", f"some/prefix/v1/{key}")
    assert [one.name for one in seaweed_bucket.store.list("runs/")] == ["runs/good.json"]


def test_bomb_costs_no_more_than_the_declared_size(seaweed_bucket: Bucket, tmp_path: Path) -> None:
    bomb = frame(b"\0" * (1 << 30))
    assert len(bomb) < 200_000
    seaweed_bucket.plant(bomb)
    # In a process of its own: peak memory is of a whole process.
    code = f"""
import resource
from pathlib import Path
from neffbuild.cache.s3 import S3Options, S3Store
store = S3Store(S3Options.parse({seaweed_bucket.store.url!r}))
store.read("runs/none.json")
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 21, 1 << 21))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    store.fetch_blob({DIGEST!r}, {len(CONTENT)}, Path({str(tmp_path / "copy")!r}))
except Exception as error:
    print(type(error).__name__, error)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    said, grown_mib = done.stdout.splitlines()
    assert "IntegrityError" in said
    assert "bad_size" in said
    assert int(grown_mib) < 64


def test_file_that_changes_while_it_is_stored_is_refused(
    seaweed_bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    source.write_bytes(os.urandom(1 << 20))
    digest = digest_bytes(source.read_bytes())
    real: Callable[..., bool] = S3Store.__init__.__globals__["is_stored"]

    def append_before_upload(*arguments: object) -> bool:
        source.write_bytes(source.read_bytes() + b"more")
        return real(*arguments)

    monkeypatch.setattr("neffbuild.cache.s3.store.is_stored", append_before_upload)
    with pytest.raises(IntegrityError, match=r"does not have|is not the blob"):
        seaweed_bucket.store.put_blob(digest, source)
    assert seaweed_bucket.store.present_blobs({digest: 1 << 20}) == set()


def test_checksum_that_does_not_fit_is_refused_by_the_server(
    seaweed_bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = {"ChecksumCRC32": "AAAAAA=="}
    monkeypatch.setattr("neffbuild.cache.s3.writes.checksum", lambda s3, data: wrong)
    monkeypatch.setattr("neffbuild.cache.s3.connection.BRIEF_PATIENCE", 0.5)
    with pytest.raises(StoreError, match="BadDigest"):
        seaweed_bucket.store.create("runs/damaged.json", b"1")
    assert seaweed_bucket.store.read("runs/damaged.json") is None
