"""Which S3 places are one and which are not, for what is remembered of them. No request is sent."""

from __future__ import annotations

import pytest

from neffbuild.cache.open import open_store
from neffbuild.cache.s3.identity import place

LOCAL = "s3://bucket/p?endpoint=http://host:9000"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (LOCAL, "s3://bucket/p/?endpoint=http://HOST:9000/"),
        (LOCAL, f"{LOCAL}&region=eu-west-1&retry_seconds=3&path_style=false&anonymous=true"),
        (LOCAL, "s3://bucket/%70?conditional_writes=off&endpoint=http://host:9000"),
        ("s3://bucket/p?endpoint=https://host", "s3://bucket/p?endpoint=https://host:443"),
        ("s3://bucket/p", "s3://bucket/p?region=eu-west-1"),
        ("s3://bucket/p", "s3://bucket/p?endpoint=https://s3.eu-west-1.amazonaws.com"),
    ],
)
def test_one_place(one: str, other: str) -> None:
    assert open_store(one).identity == open_store(other).identity


@pytest.mark.parametrize(
    "other",
    [
        "s3://bucket/p",
        "s3://bucket/P?endpoint=http://host:9000",
        "s3://bucket/p/q?endpoint=http://host:9000",
        "s3://bucket2/p?endpoint=http://host:9000",
        "s3://bucket/p?endpoint=http://host:9001",
        "s3://bucket/p?endpoint=https://host:9000",
        "s3://bucket/p?endpoint=http://host2:9000",
        "s3://bucket/p?endpoint=http://host:9000/tenant",
    ],
)
def test_another_place(other: str) -> None:
    assert open_store(LOCAL).identity != open_store(other).identity


def test_the_endpoint_of_the_environment_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "s3://bucket/p"
    seen = {open_store(url).identity}
    for port in (9000, 9001):
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://host:{port}")
        seen.add(open_store(url).identity)
    assert len(seen) == 3
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://host:9000")
    assert open_store(url).identity == open_store(LOCAL).identity


def test_partitions_have_buckets_of_their_own() -> None:
    endpoints = [
        "https://s3.amazonaws.com",
        "https://s3.cn-north-1.amazonaws.com.cn",
        "https://s3.us-gov-west-1.amazonaws.com",
        "https://s3.eusc-de-east-1.amazonaws.eu",
    ]
    assert len({place(endpoint, "bucket", "p") for endpoint in endpoints}) == 4
