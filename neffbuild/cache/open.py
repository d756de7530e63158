"""From the URL a user gives to the store it names."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

from neffbuild.cache.directory import DirectoryStore
from neffbuild.cache.store import ManagedStore
from neffbuild.config.errors import ConfigError, MissingExtra


def open_store(url: str) -> ManagedStore:
    """The store at a path, `file:///path` or `s3://bucket/prefix`. Touches nothing yet.

    Raises `ConfigError` for anything else, `MissingExtra` where S3 needs what is not installed.
    """
    scheme, separator, _ = url.partition("://")
    if not separator:
        return DirectoryStore(_path(url, url))
    if scheme.lower() == "s3":
        return _s3_store(url)
    if scheme.lower() != "file":
        raise ConfigError(
            f"cannot open the store {url!r}: {scheme}:// is not supported",
            field="url",
            value=url,
            hint="supported are a path, file:///path and s3://bucket/prefix",
        )
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise ConfigError(
            f"cannot open the store {url!r}: it names the host {parts.netloc!r}",
            field="url",
            value=url,
            hint="write file:///path, with three slashes, for a path of this machine",
        )
    return DirectoryStore(_path(unquote(parts.path), url))


def _s3_store(url: str) -> ManagedStore:
    for module in ("boto3", "zstandard"):
        if find_spec(module) is None:
            raise MissingExtra(
                f"a store in S3 needs {module}, which is not installed",
                field="url",
                hint="pip install 'neffbuild[s3]'",
            )
    from neffbuild.cache.s3 import S3Options, S3Store

    return S3Store(S3Options.parse(url))


def _path(text: str, url: str) -> Path:
    if not text or "\0" in text:
        raise ConfigError(f"{url!r} names no directory", field="url", value=url)
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"cannot open the store {url!r}: {error}", field="url") from error
