from __future__ import annotations

import os
from pathlib import Path

import pytest

from neffbuild.cache.open import open_store
from neffbuild.config.errors import ConfigError


def test_a_path_and_a_file_url_name_the_same_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a store"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    urls = {
        open_store(url).url
        for url in (
            str(folder),
            "a store",
            "~/a store",
            f"file://{tmp_path}/a%20store",
            f"FILE://localhost{tmp_path}/a%20store",
        )
    }
    assert urls == {str(folder)}
    assert os.listdir(tmp_path) == []  # noqa: PTH208


def test_a_relative_store_stays_where_it_was_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_store("store")
    monkeypatch.chdir("/")
    assert store.create("runs/a.json", b"1")
    assert (tmp_path / "store/v1/runs/a.json").exists()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("gs://bucket/prefix", "gs:// is not supported"),
        ("https://host/x", "https:// is not supported"),
        ("file://host/x", "names the host 'host'"),
        ("", "names no directory"),
        ("file://", "names no directory"),
        ("a\0b", "names no directory"),
        ("~no-such-user-here/x", "cannot open the store"),
    ],
)
def test_what_cannot_be_opened_is_refused_with_what_can(url: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(url)
    assert says in caught.value.message
    assert caught.value.field == "url"
    assert caught.value.exit_status == 2
