"""What the network and bad servers do, and what comes of it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fault_proxy import (
    Act,
    FaultProxy,
    Request,
    always_first_page,
    cut_to,
    done_but_slow_down_in_200,
    ignore,
    lose_answer,
    never_truncated,
    refuse,
    reset_after,
    reset_midway,
    short_pages,
    slow_down_in_200,
)
from s3_servers import S3Server

from neffbuild.cache.canonical import digest_bytes
from neffbuild.cache.problem import ProblemKind
from neffbuild.cache.s3 import S3Options, S3Store
from neffbuild.config.errors import IntegrityError, StoreError

BIG = os.urandom(9 << 20)
BIG_DIGEST = digest_bytes(BIG)
NAMES = [f"entries/{d[:2]}/{d}.json" for d in (digest_bytes(b"%d" % n) for n in range(25))]

NewBucket = Callable[[S3Server], str]


@pytest.fixture(autouse=True)
def _short_first_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """What passes at the second attempt need not be waited for as a busy server is."""
    monkeypatch.setattr("neffbuild.cache.s3.retry.FIRST_CEILING", 0.02)


@pytest.fixture
def bucket(proxy: FaultProxy, new_bucket: NewBucket) -> str:
    return new_bucket(proxy.upstream)


@pytest.fixture
def store(proxy: FaultProxy, bucket: str) -> S3Store:
    return S3Store(S3Options.parse(proxy.server.url(bucket)))


@pytest.fixture
def big(tmp_path: Path) -> Path:
    path = tmp_path / "big"
    path.write_bytes(BIG)
    return path


def retries(store: S3Store) -> dict[str, int]:
    return store.statistics.document()["retries"]  # type: ignore[return-value]


def errors(store: S3Store) -> dict[str, int]:
    return store.statistics.document()["errors"]  # type: ignore[return-value]


def is_put(request: Request) -> bool:
    return request.method == "PUT"


def is_get(request: Request) -> bool:
    return request.method == "GET" and not request.is_listing


def is_conditional(request: Request) -> bool:
    return "if-none-match" in request.headers or "if-match" in request.headers


def work_through(store: S3Store, big: Path, copy: Path) -> None:
    """Everything a store does, with its results checked."""
    assert store.create("runs/a.json", b"1")
    current = store.read("runs/a.json")
    assert current is not None
    assert store.replace("runs/a.json", b"2", current.version)
    assert store.read("runs/a.json").data == b"2"  # type: ignore[union-attr]
    for name in NAMES[:3]:
        assert store.create(name, name.encode())
    assert len(dict(store.read_many(NAMES))) == 3
    assert {one.name for one in store.list("")} == {"runs/a.json", *NAMES[:3]}
    store.put_blob(BIG_DIGEST, big)
    assert store.present_blobs({BIG_DIGEST: len(BIG)}) == {BIG_DIGEST}
    store.fetch_blob(BIG_DIGEST, len(BIG), copy)
    assert copy.read_bytes() == BIG
    store.delete("runs/a.json")
    assert store.read("runs/a.json") is None


class TestPassingFaults:
    @pytest.mark.parametrize(
        ("act", "kind"),
        [
            (refuse(503, "SlowDown"), "SlowDown"),
            (slow_down_in_200, "SlowDown"),
            (lose_answer, "ConnectionClosedError"),
        ],
    )
    def test_every_third_request_fails_and_all_work_is_done(
        self, store: S3Store, proxy: FaultProxy, big: Path, tmp_path: Path, act: Act, kind: str
    ) -> None:
        count = 0

        def every_third(request: Request) -> bool:
            nonlocal count
            # A deletion has no body to carry an error in, and a HEAD none to carry a code.
            if request.method in ("DELETE", "HEAD"):
                return False
            count += 1
            return count % 3 == 0

        proxy.misbehave(act, every_third)
        work_through(store, big, tmp_path / "copy")
        assert retries(store)[kind] >= 5
        assert errors(store) == {}

    def test_a_fault_with_a_checksum_header_is_one_that_passes(
        self, store: S3Store, proxy: FaultProxy
    ) -> None:
        """botocore takes it for a body to check, and raises what it documents nowhere."""
        assert store.create("runs/a.json", b"1")
        fault = refuse(500, "InternalError", **{"x-amz-checksum-crc32": "AAAAAA=="})
        proxy.misbehave(fault, is_get, times=2)
        document = store.read("runs/a.json")
        assert document is not None
        assert document.data == b"1"
        assert retries(store) == {"ResponseParserError": 2}

    @pytest.mark.parametrize(
        ("status", "code"),
        [
            (500, "InternalError"),
            (502, "BadGateway"),
            (504, "GatewayTimeout"),
            (429, "TooManyRequests"),
            (400, "RequestTimeout"),
            (400, "ThrottlingException"),
            (400, "BadDigest"),
        ],
    )
    def test_what_may_pass_is_tried_again_under_its_name(
        self, store: S3Store, proxy: FaultProxy, status: int, code: str
    ) -> None:
        proxy.misbehave(refuse(status, code), times=1)
        assert store.read("runs/a.json") is None
        assert retries(store) == {code: 1}

    def test_storm_of_503_is_waited_out_and_counted(
        self, store: S3Store, proxy: FaultProxy, big: Path, tmp_path: Path
    ) -> None:
        proxy.misbehave(refuse(503, "SlowDown"), seconds=2)
        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(lambda n: store.create(f"runs/{n}.json", b"{}"), range(8)))
        assert retries(store)["SlowDown"] == len(proxy.requests) - proxy.counted()["DELETE"] - (
            3 + 8
        )
        assert errors(store) == {}

    @pytest.mark.slow
    def test_storm_of_half_a_minute_is_waited_out(
        self, proxy: FaultProxy, bucket: str, big: Path, tmp_path: Path
    ) -> None:
        store = S3Store(S3Options.parse(proxy.server.url(bucket, retry_seconds=120)))
        proxy.misbehave(refuse(503, "SlowDown"), seconds=30)
        work_through(store, big, tmp_path / "copy")
        # Few enough that a fleet of them does not keep the storm going.
        assert 3 <= retries(store)["SlowDown"] <= 30

    def test_storm_that_does_not_end_is_given_up_on_in_time_with_its_name(
        self, proxy: FaultProxy, bucket: str
    ) -> None:
        store = S3Store(S3Options.parse(proxy.server.url(bucket, retry_seconds=1)))
        proxy.misbehave(refuse(503, "SlowDown", "Please reduce your request rate."))
        start = time.monotonic()
        with pytest.raises(StoreError, match=r"kept refusing for 1 s.*503 SlowDown on GetObject"):
            store.read("runs/a.json")
        assert 1 <= time.monotonic() - start < 5
        assert errors(store) == {"SlowDown": 1}
        assert retries(store)["SlowDown"] == len(proxy.requests) - 1 >= 2

    def test_download_goes_on_where_the_connection_broke(
        self, store: S3Store, proxy: FaultProxy, big: Path, tmp_path: Path
    ) -> None:
        store.put_blob(BIG_DIGEST, big)
        proxy.behave()
        proxy.misbehave(reset_after(3 << 20), is_get, times=2)
        store.fetch_blob(BIG_DIGEST, len(BIG), tmp_path / "copy")
        assert (tmp_path / "copy").read_bytes() == BIG
        ranges = [request.headers.get("range") for request in proxy.requests]
        assert ranges[0] is None
        starts = [int(text.removeprefix("bytes=").rstrip("-")) for text in ranges[1:] if text]
        assert 0 < starts[0] <= 3 << 20
        assert starts[0] < starts[1] <= 6 << 20
        assert sum(retries(store).values()) == 2

    def test_download_is_right_where_the_server_knows_no_ranges(
        self, store: S3Store, proxy: FaultProxy, big: Path, tmp_path: Path
    ) -> None:
        store.put_blob(BIG_DIGEST, big)
        proxy.misbehave(reset_after(3 << 20), is_get, times=1)
        proxy.misbehave(ignore("range", "if-match"), is_get)
        store.fetch_blob(BIG_DIGEST, len(BIG), tmp_path / "copy")
        assert (tmp_path / "copy").read_bytes() == BIG
        assert sum(retries(store).values()) == 1

    def test_object_replaced_during_a_download_is_not_mixed_with_its_successor(
        self, store: S3Store, proxy: FaultProxy, bucket: str, big: Path, tmp_path: Path
    ) -> None:
        store.put_blob(BIG_DIGEST, big)
        key = f"some/prefix/v1/blobs/sha256/{BIG_DIGEST[:2]}/{BIG_DIGEST}"

        def replace_and_break(request: Request, forward: Callable[[Request], object]) -> object:
            answer = reset_after(3 << 20)(request, forward)  # type: ignore[arg-type]
            proxy.upstream.client().put_object(Bucket=bucket, Key=key, Body=b"another")
            return answer

        proxy.misbehave(replace_and_break, is_get, times=1)  # type: ignore[arg-type]
        with pytest.raises(IntegrityError):
            store.fetch_blob(BIG_DIGEST, len(BIG), tmp_path / "copy")
        assert not (tmp_path / "copy").exists()

    @pytest.mark.parametrize("size", [0, 1000, 5 << 20])
    def test_body_cut_short_with_a_length_that_fits_is_noticed_and_read_again(
        self, store: S3Store, proxy: FaultProxy, big: Path, tmp_path: Path, size: int
    ) -> None:
        store.put_blob(BIG_DIGEST, big)
        proxy.misbehave(cut_to(size), is_get, times=1)
        store.fetch_blob(BIG_DIGEST, len(BIG), tmp_path / "copy")
        assert (tmp_path / "copy").read_bytes() == BIG

        proxy.misbehave(cut_to(size), is_get)
        with pytest.raises(IntegrityError, match="bad_size"):
            store.fetch_blob(BIG_DIGEST, len(BIG), tmp_path / "copy")
        assert not (tmp_path / "copy").exists()
        assert store.check_blob(BIG_DIGEST, len(BIG)) is ProblemKind.BAD_SIZE

    def test_document_whose_body_breaks_is_read_again_whole(
        self, store: S3Store, proxy: FaultProxy
    ) -> None:
        store.create("runs/a.json", b"0123456789" * 1000)
        proxy.misbehave(reset_midway, is_get, times=2)
        document = store.read("runs/a.json")
        assert document is not None
        assert document.data == b"0123456789" * 1000
        assert sum(retries(store).values()) == 2

    def test_unreachable_endpoint_is_told_sooner_than_a_storm(self) -> None:
        store = S3Store(S3Options.parse(S3Server("http://127.0.0.1:9").url("bkt", retry_seconds=1)))
        with pytest.raises(StoreError, match="the endpoint cannot be reached") as caught:
            store.read("runs/a.json")
        assert "http://127.0.0.1:9" in caught.value.message
        assert errors(store) == {"EndpointConnectionError": 1}
        assert caught.value.exit_status == 3


class TestLostAnswers:
    """The request took effect, but whoever sent it was told otherwise."""

    @pytest.mark.parametrize("act", [lose_answer, done_but_slow_down_in_200])
    def test_created_and_replaced_documents_are_known_as_ours(
        self, store: S3Store, proxy: FaultProxy, act: Act
    ) -> None:
        store.create("runs/warm.json", b"{}")
        proxy.misbehave(act, is_put, times=1)
        assert store.create("runs/a.json", b"ours")
        version = store.read("runs/a.json").version  # type: ignore[union-attr]
        proxy.misbehave(act, is_put, times=1)
        assert store.replace("runs/a.json", b"ours again", version)
        assert store.read("runs/a.json").data == b"ours again"  # type: ignore[union-attr]

    def test_another_writers_document_is_not_taken_for_ours(
        self, store: S3Store, proxy: FaultProxy
    ) -> None:
        store.create("runs/a.json", b"theirs")
        version = store.read("runs/a.json").version  # type: ignore[union-attr]
        for _ in range(2):
            proxy.misbehave(lose_answer, is_put, times=1)
            assert not store.create("runs/a.json", b"ours")
            proxy.misbehave(lose_answer, is_put, times=1)
            assert not store.replace("runs/a.json", b"ours", '"0"')
        assert store.read("runs/a.json").version == version  # type: ignore[union-attr]

    @pytest.mark.parametrize("act", [lose_answer, done_but_slow_down_in_200])
    def test_completed_multipart_upload_is_found(
        self, store: S3Store, proxy: FaultProxy, big: Path, act: Act
    ) -> None:
        def completes(request: Request) -> bool:
            return request.method == "POST" and "uploadId" in request.query

        proxy.misbehave(act, lambda request: "partNumber" in request.query, times=1)
        proxy.misbehave(act, completes, times=1)
        proxy.misbehave(refuse(404, "NoSuchUpload"), completes)  # as S3 answers the second time
        store.put_blob(BIG_DIGEST, big)
        assert store.check_blob(BIG_DIGEST, len(BIG)) is None

    def test_upload_that_somebody_removed_is_an_error(
        self, store: S3Store, proxy: FaultProxy, big: Path
    ) -> None:
        proxy.misbehave(
            refuse(404, "NoSuchUpload"),
            lambda request: request.method == "POST" and "uploadId" in request.query,
        )
        with pytest.raises(StoreError, match="its multipart upload was removed"):
            store.put_blob(BIG_DIGEST, big)
        assert store.present_blobs({BIG_DIGEST: len(BIG)}) == set()


class TestConflicts:
    def test_409_is_answered_by_reading_back(self, store: S3Store, proxy: FaultProxy) -> None:
        store.create("runs/a.json", b"theirs")
        version = store.read("runs/a.json").version  # type: ignore[union-attr]
        conflict = refuse(409, "ConditionalRequestConflict")
        proxy.misbehave(conflict, is_conditional, times=1)
        assert not store.create("runs/a.json", b"ours")
        proxy.misbehave(conflict, is_conditional, times=1)
        assert not store.replace("runs/a.json", b"ours", '"0"')

        # Nobody's write stands after the conflict: ours is sent again.
        proxy.misbehave(conflict, is_conditional, times=2)
        assert store.create("runs/b.json", b"ours")
        proxy.misbehave(conflict, is_conditional, times=2)
        assert store.replace("runs/a.json", b"ours", version)

    def test_conflicts_without_end_are_an_error_and_not_a_success(
        self, proxy: FaultProxy, bucket: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = S3Store(S3Options.parse(proxy.server.url(bucket)))
        store.create("runs/a.json", b"1")
        monkeypatch.setattr("neffbuild.cache.s3.writes._LONGEST_PAUSE", 0.01)
        proxy.misbehave(refuse(409, "ConditionalRequestConflict"), is_conditional)
        with pytest.raises(StoreError, match="others kept writing it"):
            store.create("runs/b.json", b"ours")
        assert store.read("runs/b.json") is None


class TestServersWithoutConditionalWrites:
    @pytest.mark.parametrize(
        ("act", "when", "found"),
        [
            (ignore("if-none-match", "if-match"), is_conditional, "ignored"),
            (ignore("if-none-match"), is_conditional, "ignored"),
            (
                ignore("if-match"),
                lambda request: is_put(request) and "if-match" in request.headers,
                "ignored",
            ),
            (refuse(501, "NotImplemented"), is_conditional, "rejected"),
            (
                refuse(501, "NotImplemented"),
                lambda request: "if-match" in request.headers,
                "rejected",
            ),
            (refuse(400, "InvalidArgument"), is_conditional, "rejected"),
        ],
    )
    def test_it_is_found_out_and_no_success_is_false(
        self,
        proxy: FaultProxy,
        bucket: str,
        act: Act,
        when: Callable[[Request], bool],
        found: str,
    ) -> None:
        proxy.misbehave(act, when)
        store = S3Store(S3Options.parse(proxy.server.url(bucket)))
        assert store.create("runs/a.json", b"1")
        assert not store.create("runs/a.json", b"2")
        version = store.read("runs/a.json").version  # type: ignore[union-attr]
        assert store.replace("runs/a.json", b"3", version)
        assert not store.replace("runs/a.json", b"4", version)
        assert found in str(store.effective()["conditional_writes"])
        with ThreadPoolExecutor(3) as pool:
            won = list(pool.map(lambda n: store.create("runs/race.json", b"%d" % n), range(3)))
        assert won.count(True) == 1
        assert store.read("runs/race.json").data == b"%d" % won.index(True)  # type: ignore[union-attr]
        assert {key.split("/")[3] for key in proxy.upstream.keys(bucket)} == {"runs"}

    def test_off_sends_no_conditional_header(
        self, proxy: FaultProxy, bucket: str, big: Path, tmp_path: Path
    ) -> None:
        store = S3Store(S3Options.parse(proxy.server.url(bucket, conditional_writes="off")))
        work_through(store, big, tmp_path / "copy")
        assert not any(is_conditional(request) for request in proxy.requests)
        assert store.effective()["conditional_writes"] == "off: claims"

    def test_overwritten_in_spite_of_the_claim_is_no_success(
        self, proxy: FaultProxy, bucket: str
    ) -> None:
        store = S3Store(S3Options.parse(proxy.server.url(bucket, conditional_writes="off")))
        key = "some/prefix/v1/runs/a.json"

        def overwrite_after(request: Request, forward: Callable[[Request], object]) -> object:
            answer = forward(request)
            proxy.upstream.client().put_object(Bucket=bucket, Key=key, Body=b"theirs")
            return answer

        proxy.misbehave(
            overwrite_after,  # type: ignore[arg-type]
            lambda request: is_put(request) and request.key == key,
            times=1,
        )
        assert not store.create("runs/a.json", b"ours")

    def test_claim_of_a_dead_process_expires(
        self, proxy: FaultProxy, bucket: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("neffbuild.cache.s3.writes.CLAIM_EXPIRES", 2.0)
        store = S3Store(S3Options.parse(proxy.server.url(bucket, conditional_writes="off")))
        # A process that dies between its claim and the removal of it.
        proxy.misbehave(refuse(403, "AccessDenied"), lambda request: request.method == "DELETE")
        with pytest.raises(StoreError):
            store.create("runs/a.json", b"1")
        proxy.behave()
        store.delete("runs/a.json")
        start = time.monotonic()
        assert store.create("runs/a.json", b"2")
        assert time.monotonic() - start > 0.5  # the server's times are whole seconds
        assert {one.name for one in store.list("")} == {"runs/a.json"}
        assert proxy.upstream.keys(bucket) == {"some/prefix/v1/runs/a.json"}


class TestListings:
    @pytest.fixture
    def filled(self, store: S3Store) -> S3Store:
        for name in NAMES:
            store.create(name, b"{}")
        return store

    @pytest.mark.parametrize("size", [1, 7, 25])
    def test_pages_that_claim_to_be_the_last_are_not_believed(
        self, filled: S3Store, proxy: FaultProxy, size: int
    ) -> None:
        def act(request: Request, forward: Callable[[Request], object]) -> object:
            return never_truncated(request, lambda r: short_pages(size)(r, forward))  # type: ignore[arg-type,return-value]

        proxy.misbehave(act, lambda request: request.is_listing)  # type: ignore[arg-type]
        assert {one.name for one in filled.list("entries/")} == set(NAMES)
        assert {one.name for one in filled.list("")} == set(NAMES)
        absent = [f"entries/{'0' * 2}/{'0' * 63}{n}.json" for n in range(9)]
        assert filled.present_documents([*NAMES, *absent]) == set(NAMES)

    def test_listing_that_repeats_itself_is_an_error_and_not_endless(
        self, filled: S3Store, proxy: FaultProxy
    ) -> None:
        proxy.misbehave(always_first_page, lambda request: request.is_listing)
        with pytest.raises(StoreError, match="repeats a page"):
            list(filled.list("entries/"))
        with pytest.raises(StoreError, match="repeats a page"):
            filled.present_documents(NAMES)

    def test_broken_page_is_asked_for_again(self, filled: S3Store, proxy: FaultProxy) -> None:
        proxy.misbehave(reset_midway, lambda request: request.is_listing, times=1)
        proxy.misbehave(cut_to(300), lambda request: request.is_listing, times=1)
        assert {one.name for one in filled.list("entries/")} == set(NAMES)
        assert sum(retries(filled).values()) == 2


class TestChecksums:
    def test_every_body_has_one_and_a_server_without_is_served_on_demand(
        self, proxy: FaultProxy, bucket: str, big: Path, tmp_path: Path
    ) -> None:
        message = "A header you provided implies functionality that is not implemented: checksum"
        reject = refuse(501, "NotImplemented", message)

        def has_checksum(request: Request) -> bool:
            return any("checksum" in name for name in request.headers) and request.method != "GET"

        work_through(S3Store(S3Options.parse(proxy.server.url(bucket))), big, tmp_path / "copy")
        bodies = [request for request in proxy.requests if is_put(request)]
        assert all("x-amz-checksum-crc32" in request.headers for request in bodies)

        proxy.misbehave(reject, has_checksum)
        store = S3Store(S3Options.parse(proxy.server.url(bucket, prefix="other")))
        with pytest.raises(StoreError) as caught:
            store.create("runs/a.json", b"1")
        assert "checksums=when_required" in (caught.value.hint or "")

        url = proxy.server.url(bucket, prefix="other", checksums="when_required")
        work_through(S3Store(S3Options.parse(url)), big, tmp_path / "copy2")
