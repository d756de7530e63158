"""What `NEFFBUILD_MANIFEST` names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neffbuild.cache.reference import Reference
from neffbuild.cache.tag import TagRef
from neffbuild.config.errors import ConfigError

DIGEST = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("text", "url", "source"),
    [
        ("s3://bucket/prefix#llama:prod", "s3://bucket/prefix", TagRef("llama", "prod")),
        ("s3://bucket/prefix#prod", "s3://bucket/prefix", TagRef("default", "prod")),
        (
            "s3://b/p?endpoint=http://127.0.0.1:1#a:b",
            "s3://b/p?endpoint=http://127.0.0.1:1",
            TagRef("a", "b"),
        ),
        (f"s3://bucket/prefix@sha256:{DIGEST}", "s3://bucket/prefix", DIGEST),
        ("/mnt/store#a:b", "/mnt/store", TagRef("a", "b")),
        (f"relative/store@sha256:{DIGEST}", "relative/store", DIGEST),
        ("file:///mnt/a#b/store#a:b", "file:///mnt/a#b/store", TagRef("a", "b")),
    ],
)
def test_a_store_and_what_to_take_from_it(text: str, url: str, source: TagRef | str) -> None:
    reference = Reference.parse(text)
    assert reference is not None
    assert (reference.url, reference.source("default")) == (url, source)
    assert str(reference) == text


@pytest.mark.parametrize("text", ["", DIGEST, "/cache/manifest.json", "here/a#b/manifest.json"])
def test_what_names_no_store(text: str) -> None:
    assert Reference.parse(text) is None


@pytest.mark.parametrize(
    ("text", "needle"),
    [
        ("s3://bucket/prefix", "not what to take from it"),
        ("s3://bucket/prefix#", "nothing stands after '#'"),
        ("s3://bucket/prefix@sha256:abc", "'abc' is no SHA-256 digest"),
    ],
)
def test_what_is_refused(text: str, needle: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Reference.parse(text)
    assert needle in caught.value.message
    assert caught.value.field == "NEFFBUILD_MANIFEST"
    assert "URL#NAME:TAG" in str(caught.value.hint)


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        reference = Reference.parse(text)
    except ConfigError:
        return
    if reference is not None:
        assert str(reference) == text
        assert (reference.tag is None) != (reference.digest is None)
