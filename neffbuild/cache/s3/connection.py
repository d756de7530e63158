"""One bucket behind one boto3 client: sends requests, retries them, counts them, and turns what is
left of errors into `StoreError`."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import botocore
from botocore.config import Config
from botocore.parsers import ResponseParserError

from neffbuild import __version__
from neffbuild.cache.s3.errors import (
    REQUEST_ERRORS,
    Expected,
    Fault,
    Patience,
    error_in_body,
    fault_of,
    store_error,
)
from neffbuild.cache.s3.identity import aws_partition, place
from neffbuild.cache.s3.options import S3Options
from neffbuild.cache.s3.retry import Pauses
from neffbuild.cache.s3.statistics import S3Statistics

BRIEF_PATIENCE = 10.0
"""Seconds for faults that rarely pass: an endpoint nobody listens on or that does not answer, a body
damaged on the way."""

_CONNECT_TIMEOUT = 10.0
_READ_TIMEOUT = 30.0
_CONNECTIONS = 64
_SLOW_FAULTS = frozenset({"ReadTimeoutError", "ConnectTimeoutError"})
"""Faults that take so long to show that whoever waits should hear of them."""

_log = logging.getLogger(__name__)
_DEFAULT_REGION = "us-east-1"
_ADDRESSING: Mapping[bool | None, Literal["auto", "path", "virtual"]] = {
    None: "auto",
    True: "path",
    False: "virtual",
}
_ENCRYPTED = frozenset({"PutObject", "CreateMultipartUpload"})

Response = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refusal the caller was prepared for. `repeated`: an earlier attempt at the same request failed
    without telling whether it took effect."""

    why: Expected
    repeated: bool


class S3Connection:
    """`sleep` takes seconds."""

    def __init__(self, options: S3Options, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self.options = options
        self.statistics = S3Statistics()
        self._sleep = sleep
        self._opening = threading.Lock()
        self._opened: _Opened | None = None

    def call(
        self,
        operation: str,
        key: str | None = None,
        *,
        expect: Collection[Expected] = (),
        **parameters: Any,
    ) -> Response | Refusal:
        """The response to an S3 operation (`PutObject`), or the refusal if it is one of `expect`.

        Retries what may pass. Raises `StoreError` for everything else.
        """
        attempts = self.attempts(operation, key)
        while True:
            try:
                return self.send(operation, key, **parameters)
            except REQUEST_ERRORS as error:
                refusal = attempts.failed(error, expect)
            if refusal is not None:
                return refusal

    def done(self, operation: str, key: str | None = None, **parameters: Any) -> Response:
        """`call` for a caller that has no answer to any refusal."""
        answer = self.call(operation, key, **parameters)
        assert not isinstance(answer, Refusal)
        return answer

    def read_whole(
        self, key: str, *, expect: Collection[Expected] = (), largest: int
    ) -> tuple[bytes, str] | Refusal:
        """An object's bytes (up to `largest`) and its ETag."""
        attempts = self.attempts("GetObject", key)
        while True:
            try:
                response = self.send("GetObject", key)
                with response["Body"] as body:
                    data: bytes = body.read(largest)
                    body.read(1)  # at the end of the body, botocore compares its checksum
                self.statistics.count_received(len(data))
                if (error := error_in_body(data, "GetObject")) is None:
                    return data, response["ETag"]
                refusal = attempts.failed(error, expect)
            except REQUEST_ERRORS as error:
                refusal = attempts.failed(error, expect)
            if refusal is not None:
                return refusal

    def send(self, operation: str, key: str | None = None, **parameters: Any) -> Response:
        """One request, tried once. Raises one of `REQUEST_ERRORS`."""
        parameters["Bucket"] = self.options.bucket
        if key is not None:
            parameters["Key"] = key
        if self.options.expected_bucket_owner is not None:
            parameters["ExpectedBucketOwner"] = self.options.expected_bucket_owner
        if self.options.sse_kms_key_id is not None and operation in _ENCRYPTED:
            parameters["ServerSideEncryption"] = "aws:kms"
            parameters["SSEKMSKeyId"] = self.options.sse_kms_key_id
        method = self._open().methods[operation]
        try:
            response: Response = method(**parameters)
        except AttributeError as error:
            # botocore trips over a server's fault whose answer has a checksum header.
            raise ResponseParserError(f"an unreadable answer: {error}") from error
        return response

    def attempts(self, operation: str, key: str | None) -> Attempts:
        """The retries of one request, for a caller that sends it itself."""
        return Attempts(self, operation, key)

    def pause(self, seconds: float) -> None:
        self._sleep(seconds)

    @property
    def region_known(self) -> bool:
        """Whether anybody said which region the bucket is in."""
        return self._opened is None or self._opened.region_source != "default"

    @property
    def is_aws(self) -> bool:
        """Whether the endpoint is AWS's own, of which we know what it honours."""
        return self._open().is_aws

    @property
    def identity(self) -> str:
        """As `neffbuild.cache.s3.identity.place`, by the endpoint in force. Raises `StoreError`."""
        endpoint = self._open().client.meta.endpoint_url
        return place(endpoint, self.options.bucket, self.options.prefix)

    def effective(self) -> dict[str, str | bool | float | None]:
        """What is in force after URL, environment and AWS configuration were taken together. Names where
        credentials come from, never what they are."""
        opened, options = self._open(), self.options
        return {
            "bucket": options.bucket,
            "prefix": options.prefix,
            "endpoint": opened.client.meta.endpoint_url,
            "region": opened.client.meta.region_name,
            "region_source": opened.region_source,
            "profile": opened.profile,
            "credentials": opened.credentials,
            "path_style": opened.path_style,
            "checksums": options.checksums,
            "sse_kms_key_id": options.sse_kms_key_id,
            "expected_bucket_owner": options.expected_bucket_owner,
            "anonymous": options.anonymous,
            "retry_seconds": options.retry_seconds,
        }

    def _open(self) -> _Opened:
        if self._opened is None:
            with self._opening:
                if self._opened is None:
                    try:
                        self._opened = _open(self.options, self._count)
                    except (*REQUEST_ERRORS, ValueError) as error:
                        self.statistics.count_error(type(error).__name__)
                        raise store_error(error, "open", None, self.options, True) from error
        return self._opened

    def _count(self, event_name: str, **_: object) -> None:
        # "before-send.s3.GetObject"
        self.statistics.count_request(event_name.rpartition(".")[2])


class Attempts:
    """The attempts at one request so far."""

    def __init__(self, connection: S3Connection, operation: str, key: str | None) -> None:
        self._connection = connection
        self._operation = operation
        self._key = key
        self._pauses = Pauses()

    def failed(self, error: Exception, expect: Collection[Expected] = ()) -> Refusal | None:
        """Called with what an attempt raised. Returns the refusal if it is one of `expect`; None, after
        a pause, when the request is to be tried again. Raises `StoreError` when it is not."""
        fault = fault_of(error)
        if fault.expected is not None and fault.expected in expect:
            return Refusal(fault.expected, repeated=self._pauses.taken > 0)
        connection = self._connection
        pause = self._pauses.next(_patience(fault, connection.options))
        if pause is None:
            connection.statistics.count_error(fault.kind)
            raise store_error(
                error, self._operation, self._key, connection.options, connection.region_known
            ) from error
        connection.statistics.count_retry(fault.kind)
        if fault.kind in _SLOW_FAULTS and self._pauses.taken == 1:
            _log.warning("no answer from s3://%s yet: %s", connection.options.bucket, fault.kind)
        connection.pause(pause)
        return None


def _patience(fault: Fault, options: S3Options) -> float:
    match fault.patience:
        case Patience.NONE:
            return 0.0
        case Patience.BRIEF:
            return min(BRIEF_PATIENCE, options.retry_seconds)
        case Patience.LONG:
            return options.retry_seconds


@dataclass(frozen=True, slots=True)
class _Opened:
    client: Any
    methods: Mapping[str, Callable[..., Response]]
    is_aws: bool
    path_style: bool
    region_source: str
    profile: str | None
    credentials: str | None


def _open(options: S3Options, count: Callable[..., None]) -> _Opened:
    import boto3

    session = boto3.session.Session(profile_name=options.profile, region_name=options.region)
    path_style = options.path_style
    if path_style is None and options.endpoint is not None:
        path_style = aws_partition(options.endpoint) is None
    client = _client(session, options, _ADDRESSING[path_style])
    is_aws = aws_partition(client.meta.endpoint_url) is not None
    if path_style is None and not is_aws:
        # The environment or a file names the endpoint, which shows only in the finished client.
        path_style, client = True, _client(session, options, "path")
    client.meta.events.register("before-send.s3", count)
    found = None if options.anonymous else session.get_credentials()
    return _Opened(
        client=client,
        methods={
            operation: getattr(client, method)
            for method, operation in client.meta.method_to_api_mapping.items()
        },
        is_aws=is_aws,
        path_style=bool(path_style),
        region_source=_region_source(options, session.region_name),
        profile=session.profile_name,
        credentials="anonymous" if options.anonymous else found.method if found else None,
    )


def _client(
    session: Any, options: S3Options, addressing_style: Literal["auto", "path", "virtual"]
) -> Any:
    return session.client(
        "s3",
        endpoint_url=options.endpoint,
        region_name=session.region_name or _DEFAULT_REGION,
        config=Config(
            # Retries are ours: botocore's are neither counted nor fully jittered.
            retries={"total_max_attempts": 1, "mode": "standard"},
            signature_version=botocore.UNSIGNED if options.anonymous else None,
            s3={"addressing_style": addressing_style},
            request_checksum_calculation=options.checksums,
            response_checksum_validation=options.checksums,
            connect_timeout=_CONNECT_TIMEOUT,
            read_timeout=_READ_TIMEOUT,
            max_pool_connections=_CONNECTIONS,
            tcp_keepalive=True,
            user_agent_extra=f"neffbuild/{__version__}",
        ),
    )


def _region_source(options: S3Options, configured: str | None) -> str:
    if options.region is not None:
        return "url"
    return "aws configuration" if configured else "default"
