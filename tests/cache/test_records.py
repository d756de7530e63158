from __future__ import annotations

from pathlib import Path

import pytest
from cache_samples import in_children

from neffbuild.cache.directory import DirectoryStore
from neffbuild.cache.records import (
    append_run,
    clear_failure,
    note_sequence,
    read_failures,
    read_pointer,
    read_runs,
    record_failure,
    seen_sequence,
    write_pointer,
)
from neffbuild.config.errors import IntegrityError

KEY = "a" * 64


def test_runs_are_kept_for_good_and_read_newest_first(store: DirectoryStore) -> None:
    ids = [append_run(store, {"schema": "neffbuild.run/1", "number": n}) for n in range(3)]
    assert len(set(ids)) == 3
    runs = dict(read_runs(store))
    assert list(runs) == sorted(ids, reverse=True)
    assert {run["number"] for run in runs.values()} == {0, 1, 2}


def test_unreadable_run_record_is_skipped_with_a_warning(
    store: DirectoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    append_run(store, {"number": 1})
    store.create("runs/20260101T000000Z-00000000.json", b"{half")
    assert [run["number"] for _, run in read_runs(store)] == [1]
    assert "20260101T000000Z" in caplog.text


def test_failures_count_attempts_until_the_unit_is_built(store: DirectoryStore) -> None:
    assert read_failures(store, [KEY]) == {}
    record_failure(store, KEY, cause="exit", message="exit status 70", log_tail="error: x")
    failure = record_failure(store, KEY, cause="timeout", message="60 s", log_tail="")
    assert failure.attempts == 2
    assert read_failures(store, [KEY, "b" * 64]) == {KEY: failure}
    assert (store.root / f"v1/failures/{KEY}.json").exists()
    clear_failure(store, KEY)
    assert read_failures(store, [KEY]) == {}
    clear_failure(store, KEY)


@pytest.mark.parametrize("junk", [b"", b"[]", b'{"key": 1}', b'{"attempts":"x"}'])
def test_unreadable_failure_is_ignored_and_overwritten(
    store: DirectoryStore, junk: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    store.create(f"failures/{KEY}.json", junk)
    assert read_failures(store, [KEY]) == {}
    assert KEY in caplog.text
    record_failure(store, KEY, cause="exit", message="70", log_tail="")
    assert read_failures(store, [KEY])[KEY].attempts == 1


def test_pointer_leads_from_config_to_the_latest_manifest(store: DirectoryStore) -> None:
    assert read_pointer(store, KEY) is None
    write_pointer(store, KEY, "1" * 64)
    write_pointer(store, KEY, "2" * 64)
    assert read_pointer(store, KEY) == "2" * 64
    (store.root / f"v1/configs/{KEY}.json").write_bytes(b'{"manifest": "../../x"}')
    with pytest.raises(IntegrityError, match="names no manifest"):
        read_pointer(store, KEY)
    write_pointer(store, KEY, "3" * 64)
    assert read_pointer(store, KEY) == "3" * 64


def test_seen_sequence_only_rises_and_is_kept_per_store(store: DirectoryStore) -> None:
    def note(number: int) -> int:
        note_sequence(store, "/remote", "llama", "prod", number + 1)
        return 0

    assert seen_sequence(store, "/remote", "llama", "prod") == 0
    assert in_children(12, note) == [0] * 12
    assert seen_sequence(store, "/remote", "llama", "prod") == 12
    note_sequence(store, "/remote", "llama", "prod", 3)
    assert seen_sequence(store, "/remote", "llama", "prod") == 12
    assert seen_sequence(store, "/other", "llama", "prod") == 0
    for path in Path(store.root, "v1/seen").iterdir():
        assert "/remote" not in path.read_text()
        for damage in (b"{}", b"{half", b"[]", b'{"sequence": "1"}'):
            path.write_bytes(damage)
            for act in (
                lambda: seen_sequence(store, "/remote", "llama", "prod"),
                lambda: note_sequence(store, "/remote", "llama", "prod", 99),
            ):
                with pytest.raises(IntegrityError, match="unreadable") as caught:
                    act()
                assert str(path) in caught.value.message
                assert "remove this file" in str(caught.value.hint)
