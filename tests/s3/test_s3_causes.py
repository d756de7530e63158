"""Every refusal names its cause and what to do, and nothing is reported as "nothing found"."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlencode

import pytest
from fault_proxy import Act, FaultProxy, Request, refuse, skewed_clock
from s3_servers import READ_ONLY_KEY, S3Server

from neffbuild.cache.canonical import digest_bytes
from neffbuild.cache.s3 import S3Options, S3Store
from neffbuild.config.errors import NeffbuildError, StoreError

CONTENT = b"a compiled program" * 100
DIGEST = digest_bytes(CONTENT)

NewBucket = Callable[[S3Server], str]


def open_s3(server: S3Server, bucket: str, **options: object) -> S3Store:
    return S3Store(S3Options.parse(server.url(bucket, **options)))


def is_write(request: Request) -> bool:
    return request.method in ("PUT", "POST", "DELETE")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(CONTENT)
    return path


def refused(work: Callable[[], object]) -> NeffbuildError:
    with pytest.raises(StoreError) as caught:
        work()
    assert caught.value.exit_status == 3
    assert caught.value.hint
    return caught.value


MALFORMED = "The authorization header is malformed; the region 'us-east-1' is wrong"


@pytest.mark.parametrize(
    ("act", "says", "hints"),
    [
        (refuse(400, "ExpiredToken", "The provided token has expired."), "expired", "renew"),
        (
            refuse(400, "AuthorizationHeaderMalformed", MALFORMED),
            "no region is configured",
            "AWS_R",
        ),
        (
            refuse(301, "PermanentRedirect", "elsewhere", **{"x-amz-bucket-region": "eu-west-1"}),
            "the bucket is in eu-west-1",
            "?region=eu-west-1",
        ),
        (refuse(404, "NoSuchBucket"), "there is no bucket", "creates no buckets"),
        (refuse(403, "InvalidAccessKeyId"), "does not know these credentials", "check"),
        (refuse(403, "SignatureDoesNotMatch"), "secret key", "check the credentials"),
        (refuse(403, "AccessDenied"), "may not do that", "grant s3:GetObject"),
        (refuse(400, "KMS.DisabledException"), "KMS key cannot be used", "kms:Decrypt"),
        (skewed_clock(3600), "s behind the server's", "NTP"),
        (skewed_clock(-3600), "s ahead of the server's", "NTP"),
    ],
)
def test_cause_is_named_with_the_next_step(
    proxy: FaultProxy, new_bucket: NewBucket, act: Act, says: str, hints: str
) -> None:
    store = open_s3(proxy.server, new_bucket(proxy.upstream))
    proxy.misbehave(act)
    error = refused(lambda: store.read("runs/a.json"))
    assert says in error.message
    assert "s3://bucket-" in error.message
    assert "/some/prefix/v1/runs/a.json" in error.message
    assert hints in (error.hint or "")
    assert sum(store.statistics.document()["errors"].values()) == 1  # type: ignore[union-attr]


def test_every_way_of_reading_raises_rather_than_finding_nothing(
    proxy: FaultProxy, new_bucket: NewBucket, tmp_path: Path
) -> None:
    store = open_s3(proxy.server, new_bucket(proxy.upstream))
    proxy.misbehave(refuse(403, "AccessDenied"))
    many = {digest_bytes(b"%d" % number): 1 for number in range(20)}
    names = [f"failures/{digest}.json" for digest in many]
    for read in (
        lambda: store.read("runs/a.json"),
        lambda: list(store.list("tags/")),
        lambda: list(store.list("")),
        lambda: dict(store.read_many(names)),
        lambda: dict(store.read_many(names[:2])),
        lambda: store.present_documents(names),
        lambda: store.present_blobs(many),
        lambda: store.present_blobs({DIGEST: 1}),
        lambda: store.check_blob(DIGEST, 1),
        lambda: store.fetch_blob(DIGEST, 1, tmp_path / "copy"),
    ):
        refused(read)
    errors = store.statistics.document()["errors"]
    assert isinstance(errors, dict)
    assert set(errors) == {"AccessDenied", "403"}  # a HEAD has no body to name the error in
    assert sum(errors.values()) >= 10


def test_writes_alone_refused_leave_reads_served(
    proxy: FaultProxy, new_bucket: NewBucket, source: Path, tmp_path: Path
) -> None:
    store = open_s3(proxy.server, new_bucket(proxy.upstream))
    store.create("runs/a.json", b"1")
    store.put_blob(DIGEST, source)
    proxy.misbehave(refuse(403, "AccessDenied", "Access Denied"), is_write)
    other = tmp_path / "other"
    other.write_bytes(b"other")
    for write in (
        lambda: store.create("runs/b.json", b"1"),
        lambda: store.put_blob(digest_bytes(b"other"), other),
    ):
        error = refused(write)
        assert "may not write there; reading is another permission" in error.message
        assert "403 AccessDenied on PutObject" in error.message
        assert "grant s3:PutObject on arn:aws:s3:::" in (error.hint or "")
        assert "mode: ro" in (error.hint or "")
    assert store.read("runs/a.json").data == b"1"  # type: ignore[union-attr]
    store.fetch_blob(DIGEST, len(CONTENT), tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == CONTENT


def test_a_store_that_may_only_write_its_own_prefix_works(
    proxy: FaultProxy, new_bucket: NewBucket, source: Path
) -> None:
    store = open_s3(proxy.server, new_bucket(proxy.upstream), conditional_writes="auto")

    def outside(request: Request) -> bool:
        if request.is_listing:
            return not request.query["prefix"][0].startswith("some/prefix/")
        return not request.key.startswith("some/prefix/")

    proxy.misbehave(refuse(403, "AccessDenied"), outside)
    assert store.create("runs/a.json", b"1")
    store.put_blob(DIGEST, source)
    assert [one.name for one in store.list("")] == ["runs/a.json"]


def test_a_store_that_may_write_and_not_look_or_delete_works(
    proxy: FaultProxy, new_bucket: NewBucket, source: Path
) -> None:
    bucket = new_bucket(proxy.upstream)
    store = open_s3(proxy.server, bucket)
    proxy.misbehave(refuse(403, "AccessDenied"), lambda request: request.method != "PUT")
    assert store.create("runs/a.json", b"1")
    assert not store.create("runs/a.json", b"2")
    store.put_blob(DIGEST, source)
    proxy.behave()
    assert store.check_blob(DIGEST, len(CONTENT)) is None


def test_no_such_bucket_is_not_an_empty_store(moto: S3Server) -> None:
    store = open_s3(moto, "no-such-bucket")
    for work in (
        lambda: store.read("runs/a.json"),
        lambda: store.create("runs/a.json", b"1"),
        lambda: list(store.list("tags/")),
    ):
        assert "there is no bucket 'no-such-bucket'" in refused(work).message


def test_missing_credentials_are_named(
    moto: S3Server, new_bucket: NewBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = new_bucket(moto)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    error = refused(lambda: open_s3(moto, bucket).read("runs/a.json"))
    assert "there are no AWS credentials" in error.message
    assert "anonymous=true" in (error.hint or "")


def test_wrong_secret_is_told_from_a_wrong_key(
    seaweed: S3Server, new_bucket: NewBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = new_bucket(seaweed)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another-secret")
    error = refused(lambda: open_s3(seaweed, bucket).read("runs/a.json"))
    assert "the secret key is not the one of this access key" in error.message
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "another-key")
    error = refused(lambda: open_s3(seaweed, bucket).read("runs/a.json"))
    assert "the server does not know these credentials" in error.message


def test_credentials_that_may_only_read_are_served_reads(
    seaweed: S3Server, new_bucket: NewBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = new_bucket(seaweed)
    open_s3(seaweed, bucket).create("runs/a.json", b"1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", READ_ONLY_KEY)
    store = open_s3(seaweed, bucket)
    assert store.read("runs/a.json").data == b"1"  # type: ignore[union-attr]
    assert store.read("runs/none.json") is None
    assert [one.name for one in store.list("")] == ["runs/a.json"]
    assert "may not write there" in refused(lambda: store.create("runs/b.json", b"1")).message


def test_public_bucket_is_read_without_credentials(
    seaweed: S3Server, monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path
) -> None:
    seaweed.client().create_bucket(Bucket="public")
    writer = open_s3(seaweed, "public")
    writer.create("runs/a.json", b"1")
    writer.put_blob(DIGEST, source)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    store = open_s3(seaweed, "public", anonymous="true")
    assert store.read("runs/a.json").data == b"1"  # type: ignore[union-attr]
    store.fetch_blob(DIGEST, len(CONTENT), tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == CONTENT
    error = refused(lambda: store.create("runs/b.json", b"1"))
    assert "anonymous access may not write there" in error.message


def test_endpoint_that_is_no_s3_server_is_an_error(tmp_path: Path) -> None:
    query = urlencode({"endpoint": "http://127.0.0.1:9", "retry_seconds": 0})
    store = S3Store(S3Options.parse(f"s3://bucket/p?{query}"))
    error = refused(lambda: store.create("runs/a.json", b"1"))
    assert "the endpoint cannot be reached" in error.message
    assert "HTTPS_PROXY" in (error.hint or "")
