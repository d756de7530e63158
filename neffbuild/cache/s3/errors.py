"""What an exception from botocore means: its name, whether trying again may help, and what to tell a
person."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import Enum, StrEnum
from typing import Any

from botocore import exceptions as boto
from botocore.parsers import ResponseParserError
from urllib3.exceptions import HTTPError

from neffbuild.cache.s3.options import S3Options
from neffbuild.config.errors import StoreError

REQUEST_ERRORS = (
    boto.BotoCoreError,
    boto.ClientError,
    ResponseParserError,
    # Parts of a response that botocore reads outside its own error handling.
    HTTPError,
    OSError,
)
"""Whatever a request, or the reading of its answer, may raise."""


class Patience(Enum):
    """How long a fault is worth trying again."""

    NONE = "none"
    BRIEF = "brief"
    LONG = "long"


class Expected(StrEnum):
    """Refusals that a caller may have an answer to."""

    MISSING = "missing"
    FORBIDDEN = "forbidden"
    PRECONDITION = "precondition"
    CONFLICT = "conflict"
    UNSUPPORTED = "unsupported"
    NO_UPLOAD = "no_upload"


@dataclass(frozen=True, slots=True)
class Fault:
    """`kind` is the S3 error code where there is one, else the name of what broke."""

    kind: str
    patience: Patience
    expected: Expected | None = None


_THROTTLED = frozenset(
    {
        "SlowDown",
        "ServiceUnavailable",
        "Throttling",
        "ThrottlingException",
        "ThrottledException",
        "RequestThrottled",
        "RequestLimitExceeded",
        "TooManyRequests",
        "TooManyRequestsException",
        "BandwidthLimitExceeded",
        "KMS.ThrottlingException",
        "EC2ThrottledException",
    }
)
_DAMAGED_ON_THE_WAY = frozenset({"BadDigest", "IncompleteBody", "XAmzContentChecksumMismatch"})
_UNSUPPORTED = frozenset(
    {"NotImplemented", "InvalidArgument", "InvalidRequest", "MethodNotAllowed", "BadRequest"}
)
_UNREACHABLE = (
    boto.EndpointConnectionError,
    boto.ConnectTimeoutError,
    boto.ProxyConnectionError,
    boto.SSLError,
)
_SILENT = (boto.ReadTimeoutError,)
_CREDENTIALS_MAY_COME = (boto.CredentialRetrievalError, boto.MetadataRetrievalError)
_BROKEN_TRANSPORT = (
    boto.ConnectionError,
    boto.HTTPClientError,
    boto.IncompleteReadError,
    boto.ResponseStreamingError,
    ResponseParserError,
    HTTPError,
    OSError,
)


def fault_of(error: Exception) -> Fault:
    """What kind of fault one of `REQUEST_ERRORS` is."""
    if isinstance(error, boto.ClientError):
        return _service_fault(_code(error), _status(error))
    kind = type(error).__name__
    if isinstance(error, _UNREACHABLE + _SILENT + _CREDENTIALS_MAY_COME):
        return Fault(kind, Patience.BRIEF)
    if isinstance(error, boto.FlexibleChecksumError):
        return Fault(kind, Patience.BRIEF)
    if isinstance(error, _BROKEN_TRANSPORT):
        return Fault(kind, Patience.LONG)
    return Fault(kind, Patience.NONE)


def error_in_body(start: bytes, operation: str) -> boto.ClientError | None:
    """The passing error that a 200 response carries in place of the object, if its first bytes are one.

    Nothing that neffbuild stores begins like XML.
    """
    if not start.lstrip().startswith((b"<?xml", b"<Error")):
        return None
    found = re.search(rb"<Error>.*?<Code>([A-Za-z.]{1,64})</Code>", start, re.DOTALL)
    code = found[1].decode() if found else ""
    if code not in _THROTTLED and code != "InternalError":
        return None
    error = {"Code": code, "Message": "an error in the body of a 200 response"}
    return boto.ClientError(
        {"Error": error, "ResponseMetadata": {"HTTPStatusCode": 500}},  # type: ignore[typeddict-item]
        operation,
    )


def store_error(
    error: Exception, operation: str, key: str | None, options: S3Options, region_known: bool
) -> StoreError:
    """The `StoreError` that tells a person what failed, why, and what to do."""
    where = f"s3://{options.bucket}/{options.base if key is None else key}"
    cause, hint = _explanation(error, operation, options, region_known)
    return StoreError(
        f"cannot {_VERBS.get(operation, 'use')} {where}: {cause}", value=options.url, hint=hint
    )


_VERBS = {
    "GetObject": "read",
    "HeadObject": "read",
    "ListObjectsV2": "list",
    "PutObject": "write",
    "CreateMultipartUpload": "write",
    "UploadPart": "write",
    "CompleteMultipartUpload": "write",
    "AbortMultipartUpload": "abandon the upload of",
    "DeleteObject": "delete",
    "DeleteObjects": "delete",
    "ListMultipartUploads": "list",
}
_PERMISSIONS = {
    "GetObject": "s3:GetObject",
    "HeadObject": "s3:GetObject",
    "ListObjectsV2": "s3:ListBucket",
    "AbortMultipartUpload": "s3:AbortMultipartUpload",
    "DeleteObject": "s3:DeleteObject",
}
_EXPIRED = frozenset(
    {
        "ExpiredToken",
        "ExpiredTokenException",
        "TokenRefreshRequired",
        "RequestExpired",
        "UnauthorizedSSOTokenError",
        "SSOTokenLoadError",
        "TokenRetrievalError",
        "LoginRefreshRequired",
        "LoginTokenLoadError",
    }
)
_WRONG_REGION = frozenset(
    {
        "AuthorizationHeaderMalformed",
        "PermanentRedirect",
        "TemporaryRedirect",
        "IllegalLocationConstraintException",
        "NoRegionError",
        "InvalidRegionError",
        "301",
        "307",
    }
)
_UNKNOWN_CREDENTIALS = frozenset({"InvalidAccessKeyId", "InvalidToken", "InvalidClientTokenId"})
_FULL = frozenset({"QuotaExceeded", "XMinioStorageFull", "StorageFull", "InsufficientStorage"})
_CONDITIONAL = re.compile(r"if-(none-)?match|conditional", re.IGNORECASE)
_CHECKSUM = re.compile(r"checksum|trailer|crc|aws-chunked|content-md5", re.IGNORECASE)


def _explanation(
    error: Exception, operation: str, options: S3Options, region_known: bool
) -> tuple[str, str | None]:
    """(cause, hint)."""
    kind = fault_of(error).kind
    said = _said(error, operation)
    if kind in _EXPIRED:
        return (
            f"the session token has expired ({said})",
            "renew the credentials (`aws sso login`, a new role session) and run again",
        )
    if kind in _WRONG_REGION:
        return _region_explanation(error, said, options, region_known)
    if kind == "RequestTimeTooSkewed":
        return f"{_skew(error)} ({said})", "set the clock of this machine (NTP) and run again"
    if kind == "NoSuchBucket":
        return (
            f"there is no bucket {options.bucket!r} ({said})",
            "check its name, the endpoint and the account; neffbuild creates no buckets",
        )
    if kind in ("NoCredentialsError", "PartialCredentialsError"):
        return (
            f"there are no AWS credentials: {error}",
            "set them in the environment, name a profile (?profile=NAME), or read a public bucket "
            "with ?anonymous=true",
        )
    if kind in _UNKNOWN_CREDENTIALS:
        return f"the server does not know these credentials ({said})", _CHECK_CREDENTIALS
    if kind == "SignatureDoesNotMatch":
        return f"the secret key is not the one of this access key ({said})", _CHECK_CREDENTIALS
    if kind.startswith("KMS."):
        return (
            f"the KMS key cannot be used ({said})",
            "check the key's state and policy: writing needs kms:GenerateDataKey, reading kms:Decrypt",
        )
    if kind in ("AccessDenied", "Forbidden", "403", "AllAccessDisabled", "AccountProblem"):
        return _denied(operation, said, options)
    if kind in _FULL:
        return f"the server has no space left ({said})", "free space there or raise its quota"
    if kind in _THROTTLED or kind in ("InternalError", "500", "502", "503", "504"):
        return (
            f"it kept refusing for {options.retry_seconds:g} s ({said})",
            "try again later, with fewer workers, or with a larger ?retry_seconds",
        )
    if isinstance(error, _UNREACHABLE):
        return (
            f"the endpoint cannot be reached: {error}",
            "check the endpoint, the network, proxies (HTTPS_PROXY, NO_PROXY) and certificates "
            "(AWS_CA_BUNDLE)",
        )
    if isinstance(error, _SILENT):
        return (
            f"the endpoint takes connections and does not answer: {error}",
            "check that it is the endpoint's S3 port and that the server is well",
        )
    return said, _option_hint(error, operation)


_CHECK_CREDENTIALS = "check the credentials, the profile and that they belong to this endpoint"


def _region_explanation(
    error: Exception, said: str, options: S3Options, region_known: bool
) -> tuple[str, str]:
    actual = _bucket_region(error)
    cause = "the configured region is wrong" if region_known else "no region is configured"
    if actual:
        cause += f", and the bucket is in {actual}"
    return (
        f"{cause} ({said})",
        f"add ?region={actual or 'REGION'} to s3://{options.bucket}, or set AWS_REGION",
    )


def _denied(operation: str, said: str, options: S3Options) -> tuple[str, str]:
    arn = f"arn:aws:s3:::{options.bucket}"
    permission = _PERMISSIONS.get(operation, "s3:PutObject")
    resource = arn if operation == "ListObjectsV2" else f"{arn}/{options.base}*"
    who = "anonymous access" if options.anonymous else "these credentials"
    if permission == "s3:PutObject":
        cause = f"{who} may not write there; reading is another permission ({said})"
        hint = f"grant {permission} on {resource}, or use the remote with `mode: ro`"
        if options.sse_kms_key_id:
            hint += "; with ?sse_kms_key_id, kms:GenerateDataKey on that key too"
    else:
        cause = f"{who} may not do that ({said})"
        hint = f"grant {permission} on {resource}"
        if permission == "s3:GetObject":
            hint += "; without s3:ListBucket what is missing looks forbidden"
    if options.expected_bucket_owner:
        hint += f"; check that account {options.expected_bucket_owner} owns the bucket"
    return cause, hint


def _option_hint(error: Exception, operation: str) -> str | None:
    """The option that helps against a server which does not take what AWS's does."""
    text = str(error)
    if fault_of(error).expected is Expected.UNSUPPORTED:
        if _CONDITIONAL.search(text):
            return "this server takes no conditional writes: add ?conditional_writes=off"
        if _CHECKSUM.search(text) or operation in ("PutObject", "UploadPart"):
            return "if this server takes no checksum headers, add ?checksums=when_required"
    return None


def _service_fault(code: str, status: int) -> Fault:
    if code in _THROTTLED or status in (429, 503):
        return Fault(code, Patience.LONG)
    if code in _DAMAGED_ON_THE_WAY:
        return Fault(code, Patience.BRIEF)
    if code == "RequestTimeout" or status in (500, 502, 504):
        return Fault(code, Patience.LONG)
    return Fault(code, Patience.NONE, expected=_expected(code, status))


def _expected(code: str, status: int) -> Expected | None:
    if code == "NoSuchUpload":
        return Expected.NO_UPLOAD
    if status == 404 and code != "NoSuchBucket":
        return Expected.MISSING
    if status in (412, 416):
        return Expected.PRECONDITION
    if status == 409:
        return Expected.CONFLICT
    if status == 403 and code in ("403", "AccessDenied", "Forbidden"):
        return Expected.FORBIDDEN
    if status in (501, 405) or (status == 400 and code in _UNSUPPORTED):
        return Expected.UNSUPPORTED
    return None


def _response(error: Exception) -> Mapping[str, Any]:
    return error.response if isinstance(error, boto.ClientError) else {}


def _code(error: Exception) -> str:
    return str(_response(error).get("Error", {}).get("Code") or _status(error))


def _status(error: Exception) -> int:
    return int(_response(error).get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _headers(error: Exception) -> Mapping[str, str]:
    headers: Mapping[str, str] = _response(error).get("ResponseMetadata", {}).get("HTTPHeaders", {})
    return headers


def _said(error: Exception, operation: str) -> str:
    """The server's own words, in one line."""
    if not isinstance(error, boto.ClientError):
        return f"{type(error).__name__}: {error}"[:300]
    message = " ".join(str(_response(error).get("Error", {}).get("Message", "")).split())
    said = f"{_status(error)} {_code(error)} on {operation}"
    return f"{said}: {message}"[:300] if message else said


def _bucket_region(error: Exception) -> str | None:
    region = _response(error).get("Error", {}).get("Region")
    return str(region or _headers(error).get("x-amz-bucket-region") or "") or None


def _skew(error: Exception) -> str:
    try:
        server = parsedate_to_datetime(_headers(error)["date"])
    except (KeyError, ValueError):
        return "this machine's clock and the server's differ too much"
    seconds = (datetime.now(UTC) - server).total_seconds()
    direction = "ahead of" if seconds > 0 else "behind"
    return f"this machine's clock is {abs(seconds):.0f} s {direction} the server's"
