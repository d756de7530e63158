"""What an `s3://` URL says: the place, and in its query how to reach it."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, fields
from typing import Any, Literal, Self, cast
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from neffbuild.config.errors import ConfigError

Checksums = Literal["when_supported", "when_required"]
ConditionalWrites = Literal["auto", "off"]

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]")
_PREFIX_PART = re.compile(r"(?!\.{1,2}\Z)[^\x00-\x1f\x7f/\\]+")
_REGION = re.compile(r"[a-z0-9][a-z0-9-]*")
_ACCOUNT = re.compile(r"[0-9]{12}")
_LONGEST_PREFIX = 512
_LONGEST_RETRY = 3600.0


@dataclass(frozen=True, slots=True)
class S3Options:
    """`bucket` and `prefix` (no slash at either end) name the place; the others are what may stand in
    the query of the URL, under these names. None leaves a choice to the AWS configuration (environment,
    shared files) or to what the endpoint is.

    `path_style`: the bucket in the path rather than the host name; by default only where the endpoint
    is not AWS's. `checksums` as botocore's `request_checksum_calculation`. `conditional_writes`:
    `auto` uses them where the server honours them, `off` never. `retry_seconds`: how long one request
    is retried through throttling and server faults.
    """

    bucket: str
    prefix: str = ""
    endpoint: str | None = None
    region: str | None = None
    profile: str | None = None
    path_style: bool | None = None
    checksums: Checksums = "when_supported"
    conditional_writes: ConditionalWrites = "auto"
    sse_kms_key_id: str | None = None
    expected_bucket_owner: str | None = None
    anonymous: bool = False
    retry_seconds: float = 120.0

    @classmethod
    def parse(cls, url: str) -> Self:
        """`s3://BUCKET[/PREFIX][?OPTION=VALUE&…]`. Raises `ConfigError` naming what is wrong."""
        parts = urlsplit(url)
        if parts.scheme != "s3":
            raise _error(url, "it does not start with s3://")
        if "@" in parts.netloc:
            # Not repeated in the message: it would put a secret into a log.
            raise ConfigError(
                "an s3:// URL names credentials, which do not belong there",
                field="url",
                hint="use the AWS environment variables, a profile (?profile=NAME) or an IAM role",
            )
        if parts.fragment or "#" in url:
            raise _error(url, "it has a '#' part")
        if not _BUCKET.fullmatch(parts.netloc):
            raise _error(url, f"{parts.netloc!r} is not a bucket name")
        return cls(bucket=parts.netloc, prefix=_prefix(parts.path, url), **_query(parts.query, url))

    @property
    def url(self) -> str:
        """The one spelling of these options as a URL."""
        said = {
            name: _text(getattr(self, name))
            for name in OPTION_NAMES
            if getattr(self, name) != _DEFAULTS[name]
        }
        query = f"?{urlencode(said, safe='/:')}" if said else ""
        prefix = f"/{quote(self.prefix)}" if self.prefix else ""
        return f"s3://{self.bucket}{prefix}{query}"

    @property
    def base(self) -> str:
        """What every object key starts with before the layout version."""
        return f"{self.prefix}/" if self.prefix else ""


OPTION_NAMES = tuple(
    field.name for field in fields(S3Options) if field.name not in ("bucket", "prefix")
)
_DEFAULTS = {field.name: field.default for field in fields(S3Options)}


def _prefix(path: str, url: str) -> str:
    prefix = unquote(path).strip("/")
    if len(prefix.encode()) > _LONGEST_PREFIX:
        raise _error(url, f"its prefix is longer than {_LONGEST_PREFIX} bytes")
    if prefix and not all(_PREFIX_PART.fullmatch(part) for part in prefix.split("/")):
        raise _error(url, f"{prefix!r} has an empty part, '.', '..' or a control character in it")
    return prefix


def _query(query: str, url: str) -> dict[str, Any]:
    said: dict[str, Any] = {}
    for name, text in parse_qsl(query, keep_blank_values=True):
        if name not in OPTION_NAMES:
            near = difflib.get_close_matches(name, OPTION_NAMES, n=1)
            raise ConfigError(
                f"{url!r} has the unknown option {name!r}",
                field="url",
                value=name,
                hint=(f"did you mean {near[0]!r}? " if near else "")
                + "options are "
                + ", ".join(OPTION_NAMES),
            )
        if name in said:
            raise _error(url, f"it gives {name!r} twice")
        said[name] = _value(name, text, url)
    return said


def _value(name: str, text: str, url: str) -> object:
    match name:
        case "path_style" | "anonymous":
            return _one_of(name, text.lower(), ("true", "false"), url) == "true"
        case "checksums":
            return _one_of(name, text, ("when_supported", "when_required"), url)
        case "conditional_writes":
            return _one_of(name, text, ("auto", "off"), url)
        case "retry_seconds":
            return _seconds(name, text, url)
        case "endpoint":
            return _endpoint(text, url)
        case "region":
            return _matching(name, text, _REGION, "a region such as eu-west-1", url)
        case "expected_bucket_owner":
            return _matching(name, text, _ACCOUNT, "an AWS account id of 12 digits", url)
        case _:
            if not text:
                raise _error(url, f"its option {name!r} is empty")
            return text


def _one_of(name: str, text: str, allowed: tuple[str, ...], url: str) -> str:
    if text not in allowed:
        raise _error(url, f"{name} is {text!r}; allowed are {', '.join(allowed)}")
    return text


def _matching(name: str, text: str, pattern: re.Pattern[str], what: str, url: str) -> str:
    if not pattern.fullmatch(text):
        raise _error(url, f"{name} is {text!r}, which is not {what}")
    return text


def _seconds(name: str, text: str, url: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= _LONGEST_RETRY:
        raise _error(url, f"{name} is {text!r}; allowed are 0 to {_LONGEST_RETRY:g}")
    return seconds


def _endpoint(text: str, url: str) -> str:
    parts = urlsplit(text)
    try:
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable or "@" in parts.netloc or parts.query or parts.fragment:
        raise _error(url, f"endpoint is {text!r}, which is not like https://host:port")
    return text.rstrip("/")


def _text(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case float():
            return f"{value:g}"
        case _:
            return cast("str", value)


def _error(url: str, what: str) -> ConfigError:
    return ConfigError(
        f"cannot use the store {url!r}: {what}",
        field="url",
        value=url,
        hint="write s3://BUCKET/PREFIX?OPTION=VALUE; options are " + ", ".join(OPTION_NAMES),
    )
