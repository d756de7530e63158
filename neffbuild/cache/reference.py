"""One text that names a store and what to take from it: `s3://bucket/prefix#llama:prod`,
`/mnt/store@sha256:<digest>`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from neffbuild.cache.tag import TagRef
from neffbuild.config.errors import ConfigError

_DIGEST = re.compile(r"(?P<url>.+)@sha256:(?P<digest>[^@/#]*)", re.DOTALL)
_TAG = re.compile(r"(?P<url>.+)#(?P<tag>[^/#]*)", re.DOTALL)
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Reference:
    """The URL of a store, and a tag (`NAME:TAG`, or `TAG` alone) or the digest of an index or
    manifest. One of the two is None."""

    url: str
    tag: str | None = None
    digest: str | None = None

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """What a text names, or None where it names no store: a digest alone, a file's path.

        Raises `ConfigError` for a URL without a tag or digest, and for a malformed digest.
        """
        if found := _DIGEST.fullmatch(text):
            if not _SHA256.fullmatch(found["digest"]):
                raise _error(text, f"{found['digest']!r} is no SHA-256 digest of 64 digits")
            return cls(found["url"], digest=found["digest"])
        if found := _TAG.fullmatch(text):
            if not found["tag"]:
                raise _error(text, "nothing stands after '#'")
            return cls(found["url"], tag=found["tag"])
        if "://" in text:
            raise _error(text, "it names a store, but not what to take from it")
        return None

    def source(self, default_name: str | None) -> TagRef | str:
        """The tag or the digest; `default_name` is the NAME of a tag that stands alone. Raises
        `ConfigError` where there is none."""
        if self.digest is not None:
            return self.digest
        return TagRef.parse(str(self.tag), default_name=default_name)

    def __str__(self) -> str:
        return f"{self.url}@sha256:{self.digest}" if self.digest else f"{self.url}#{self.tag}"


def _error(text: str, what: str) -> ConfigError:
    return ConfigError(
        f"cannot tell what to pull from {text!r}: {what}",
        field="NEFFBUILD_MANIFEST",
        value=text,
        hint="write URL#NAME:TAG or URL@sha256:DIGEST, for example s3://bucket/prefix#llama:prod",
    )
