from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from s3_servers import SECRET_KEY, S3Server

from neffbuild.cache.open import open_store
from neffbuild.cache.s3 import S3Options, S3Store
from neffbuild.config.errors import ConfigError, MissingExtra, StoreError

_words = st.text(st.characters(codec="utf-8", exclude_characters="/\\\x7f#"), min_size=1).filter(
    lambda text: text not in (".", "..") and text.isprintable() and len(text.encode()) < 80
)
_options = st.builds(
    S3Options,
    bucket=st.from_regex(r"[a-z0-9][a-z0-9.-]{1,20}[a-z0-9]", fullmatch=True),
    prefix=st.lists(_words, max_size=4).map("/".join),
    endpoint=st.none() | st.sampled_from(["http://127.0.0.1:9000", "https://s3.local/root"]),
    region=st.none() | st.sampled_from(["eu-west-1", "us-gov-east-1"]),
    profile=st.none() | _words,
    path_style=st.none() | st.booleans(),
    checksums=st.sampled_from(["when_supported", "when_required"]),
    conditional_writes=st.sampled_from(["auto", "off"]),
    sse_kms_key_id=st.none() | st.just("arn:aws:kms:eu-west-1:123456789012:key/1234-ab"),
    expected_bucket_owner=st.none() | st.just("123456789012"),
    anonymous=st.booleans(),
    retry_seconds=st.sampled_from([0.0, 0.5, 30.0, 120.0]),
)


@given(_options)
def test_a_store_is_reopened_by_its_own_url(options: S3Options) -> None:
    assert S3Options.parse(options.url) == options


def test_plain_url_takes_every_default() -> None:
    options = S3Options.parse("s3://artifacts/team/llama/")
    assert options == S3Options(bucket="artifacts", prefix="team/llama")
    assert options.url == "s3://artifacts/team/llama"
    assert S3Options.parse("s3://artifacts") == S3Options(bucket="artifacts")


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("s3://", "not a bucket name"),
        ("s3:///prefix", "not a bucket name"),
        ("s3://bucket:9000/prefix", "not a bucket name"),
        ("s3://b/prefix", "not a bucket name"),
        ("s3://bucket/a/../b", "'..'"),
        ("s3://bucket/a//b", "an empty part"),
        ("s3://bucket/a%2F%2E%2E%2Fb", "'..'"),
        ("s3://bucket/a%00b", "control character"),
        ("s3://bucket/" + "a" * 600, "longer than 512 bytes"),
        ("s3://bucket/p#name:tag", "'#'"),
        ("s3://bucket/p?regoin=eu-west-1", "unknown option 'regoin'"),
        ("s3://bucket/p?region=eu-west-1&region=eu-west-2", "twice"),
        ("s3://bucket/p?region=EU West", "not a region"),
        ("s3://bucket/p?region=", "not a region"),
        ("s3://bucket/p?profile=", "empty"),
        ("s3://bucket/p?path_style=yes", "allowed are true, false"),
        ("s3://bucket/p?checksums=never", "allowed are when_supported, when_required"),
        ("s3://bucket/p?conditional_writes=on", "allowed are auto, off"),
        ("s3://bucket/p?retry_seconds=-1", "allowed are 0 to 3600"),
        ("s3://bucket/p?retry_seconds=nan", "allowed are 0 to 3600"),
        ("s3://bucket/p?retry_seconds=soon", "allowed are 0 to 3600"),
        ("s3://bucket/p?endpoint=localhost:9000", "not like https://host:port"),
        ("s3://bucket/p?endpoint=ftp://host", "not like https://host:port"),
        ("s3://bucket/p?endpoint=http://host:99999", "not like https://host:port"),
        ("s3://bucket/p?endpoint=http://user:pw@host", "not like https://host:port"),
        ("s3://bucket/p?expected_bucket_owner=12", "12 digits"),
    ],
)
def test_what_a_url_may_not_say_is_refused_with_what_it_may(url: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(url)
    assert says in caught.value.message
    assert caught.value.field == "url"
    assert "conditional_writes" in (caught.value.hint or "")


def test_a_misspelt_option_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        open_store("s3://bucket/p?endpiont=http://127.0.0.1:1")
    assert "did you mean 'endpoint'?" in (caught.value.hint or "")


def test_credentials_in_a_url_are_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError) as caught:
        open_store("s3://KEYID:topsecret@bucket/prefix")
    text = f"{caught.value.message} {caught.value.value} {caught.value.hint}"
    assert "topsecret" not in text
    assert "profile" in text


def test_effective_options_say_what_came_from_where_and_no_secret(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tmp_path / "config"
    config.write_text("[profile builder]\nregion = eu-central-1\n")
    credentials = tmp_path / "credentials"
    credentials.write_text(
        "[builder]\naws_access_key_id = AKIAFILE\naws_secret_access_key = hidden-secret\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))

    def effective(url: str) -> dict[str, object]:
        store = open_store(url)
        assert isinstance(store, S3Store)
        return dict(store.effective())

    plain = effective("s3://bucket/p")
    assert plain["endpoint"] == "https://s3.amazonaws.com"
    assert (plain["region"], plain["region_source"]) == ("us-east-1", "default")
    assert plain["path_style"] is False
    assert plain["credentials"] == "env"
    assert plain["conditional_writes"] == "auto"

    profiled = effective("s3://bucket/p?profile=builder")
    assert (profiled["region"], profiled["region_source"]) == ("eu-central-1", "aws configuration")
    assert (profiled["profile"], profiled["credentials"]) == ("builder", "shared-credentials-file")
    assert "hidden-secret" not in str(profiled)

    assert effective("s3://bucket/p?profile=builder&region=eu-west-3")["region_source"] == "url"
    assert effective("s3://bucket/p?anonymous=true")["credentials"] == "anonymous"

    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    elsewhere = effective("s3://bucket/p?expected_bucket_owner=123456789012&sse_kms_key_id=key")
    assert elsewhere["endpoint"] == "http://127.0.0.1:9"
    assert elsewhere["path_style"] is True
    assert elsewhere["expected_bucket_owner"] == "123456789012"
    assert elsewhere["sse_kms_key_id"] == "key"
    assert effective("s3://bucket/p?path_style=false")["path_style"] is False
    assert SECRET_KEY not in str(elsewhere)


def test_unknown_profile_is_a_store_error_that_names_it() -> None:
    with pytest.raises(StoreError, match="no-such-profile"):
        open_store("s3://bucket/p?profile=no-such-profile").read("runs/a.json")


@pytest.mark.parametrize("module", ["boto3", "zstandard"])
def test_missing_extra_is_named_with_how_to_install_it(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(
        "neffbuild.cache.open.find_spec", lambda name: None if name == module else real(name)
    )
    with pytest.raises(MissingExtra) as caught:
        open_store("s3://bucket/prefix")
    assert module in caught.value.message
    assert caught.value.hint == "pip install 'neffbuild[s3]'"


def test_a_directory_store_imports_nothing_of_s3(tmp_path: Path) -> None:
    code = (
        "import sys; from neffbuild.cache.open import open_store;"
        f"open_store({str(tmp_path)!r}).read('runs/a.json');"
        "print([m for m in ('boto3', 'botocore', 'zstandard') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_opening_a_store_sends_no_request() -> None:
    store = open_store(S3Server("http://127.0.0.1:9").url("bucket"))
    assert isinstance(store, S3Store)
    assert store.statistics.document()["requests"] == {}
