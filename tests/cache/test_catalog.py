from __future__ import annotations

import logging
import os
import shutil
import signal
import tarfile
import time
from pathlib import Path

import pytest
from cache_samples import (
    fill,
    in_children,
    make_entry,
    make_manifest,
    start_child,
    wait_for,
)

from neffbuild.cache.catalog import (
    Broken,
    Hit,
    Miss,
    commit_entry,
    entry_name,
    quarantine_entry,
    read_entries,
    read_entry,
    read_index,
    read_manifest,
    stored_keys,
    write_index,
    write_manifest,
)
from neffbuild.cache.directory import DirectoryStore
from neffbuild.cache.entry import Entry, FileRecord
from neffbuild.cache.index import Index
from neffbuild.cache.loaded import materialise
from neffbuild.cache.problem import ProblemKind
from neffbuild.cache.records import append_run, record_failure, write_pointer
from neffbuild.cache.tag import Trust
from neffbuild.cache.verify import verify_keys, verify_store
from neffbuild.config.errors import IntegrityError


def entry_path(store: DirectoryStore, key: str) -> Path:
    return store.root / "v1" / entry_name(key)


def test_committed_entry_is_a_hit_under_its_key_alone(
    store: DirectoryStore, tmp_path: Path
) -> None:
    entry, files = make_entry(tmp_path, 1)
    assert read_entry(store, entry.key) == Miss()
    assert commit_entry(store, entry, files) == entry
    assert read_entry(store, entry.key) == Hit(entry)
    assert stored_keys(store, [entry.key, "0" * 64]) == {entry.key: None}
    assert read_entry(store, "0" * 64) == Miss()


def test_blobs_are_stored_before_the_entry(
    store: DirectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry, files = make_entry(tmp_path, 1)
    create = DirectoryStore.create

    def create_last(self: DirectoryStore, name: str, data: bytes) -> bool:
        if not name.startswith("leases/"):
            assert self.present_blobs(entry.blobs) == set(entry.blobs)
        return create(self, name, data)

    monkeypatch.setattr(DirectoryStore, "create", create_last)
    commit_entry(store, entry, files)


def test_loser_of_a_race_adopts_the_whole_entry_of_the_winner(
    store: DirectoryStore, tmp_path: Path
) -> None:
    """The same recipe, compiled twice to different bytes: one of them stands, for everybody."""
    first, first_files = make_entry(tmp_path / "a", 1)
    second, second_files = make_entry(tmp_path / "b", 1, contents={"model.so": b"other bytes"})
    assert first.key == second.key
    assert commit_entry(store, first, first_files) == first
    assert commit_entry(store, second, second_files) == first
    assert read_entry(store, first.key) == Hit(first)


def test_many_committers_of_one_key_agree(store: DirectoryStore, tmp_path: Path) -> None:
    key = make_entry(tmp_path, 1)[0].key

    def commit(number: int) -> int:
        made = make_entry(tmp_path / str(number), 1, contents={"model.so": b"%d" % number})
        standing = commit_entry(store, *made)
        return int(standing == made[0])

    assert sum(in_children(16, commit)) == 1
    assert isinstance(read_entry(store, key), Hit)
    assert verify_keys(store, [key]).ok


def test_file_that_changed_since_it_was_recorded_commits_nothing(
    store: DirectoryStore, tmp_path: Path
) -> None:
    entry, files = make_entry(tmp_path, 1)
    files["model.so"].write_bytes(b"half a progr")
    with pytest.raises(IntegrityError, match=r"model\.so"):
        commit_entry(store, entry, files)
    assert read_entry(store, entry.key) == Miss()
    with pytest.raises(IntegrityError, match="different files"):
        commit_entry(store, entry, {"model.so": files["model.so"]})


class TestBrokenEntries:
    @pytest.mark.parametrize(
        "damage",
        ["truncated", "empty", "flipped", "swapped", "blob gone", "blob truncated", "blob empty"],
    )
    def test_is_a_miss_with_a_reason_and_is_healed_by_the_next_commit(
        self,
        store: DirectoryStore,
        tmp_path: Path,
        damage: str,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        entry, files = make_entry(tmp_path, 1)
        other, other_files = make_entry(tmp_path, 2)
        commit_entry(store, entry, files)
        commit_entry(store, other, other_files)
        path = entry_path(store, entry.key)
        blob = store.blob_path(entry.files["model.so"].digest)
        match damage:
            case "truncated":
                path.write_bytes(path.read_bytes()[:-20])
            case "empty":
                path.write_bytes(b"")
            case "flipped":
                path.write_bytes(path.read_bytes().replace(b"query_len", b"query_lex"))
            case "swapped":
                path.write_bytes(entry_path(store, other.key).read_bytes())
            case "blob gone":
                blob.unlink()
            case "blob truncated":
                blob.write_bytes(blob.read_bytes()[:-1])
            case "blob empty":
                blob.write_bytes(b"")

        found = read_entries(store, [other.key, entry.key])
        assert found[other.key] == Hit(other)
        broken = found[entry.key]
        assert isinstance(broken, Broken)
        about_blob = damage.startswith("blob")
        assert broken.kind is (ProblemKind.MISSING_BLOB if about_blob else ProblemKind.BAD_ENTRY)
        assert broken.reason
        known = stored_keys(store, [entry.key, other.key])
        assert known[other.key] is None
        assert known[entry.key] == broken.reason

        with caplog.at_level(logging.WARNING):
            assert commit_entry(store, entry, files) == entry
        assert entry.key in caplog.text
        assert read_entry(store, entry.key) == Hit(entry)
        assert verify_keys(store, [entry.key]).ok

    def test_lying_about_the_size_of_a_blob_breaks_the_liar_alone(
        self, store: DirectoryStore, tmp_path: Path
    ) -> None:
        honest, files = make_entry(tmp_path, 1, contents={"model.so": b"twelve bytes"})
        commit_entry(store, honest, files)
        digest = honest.files["model.so"].digest
        for number in range(2, 6):  # whichever is asked about first
            made = make_entry(tmp_path, number)[0]
            liar = Entry(
                made.recipe,
                {"model.so": FileRecord(digest, 11)},
                made.graph_digest,
                made.graph_key,
            )
            store.create(entry_name(liar.key), liar.to_json())
            found = read_entries(store, [honest.key, liar.key])
            assert isinstance(found[liar.key], Broken)
            known = stored_keys(store, [honest.key, liar.key])
            assert known[liar.key] is not None
            assert found[honest.key] == Hit(honest)
            assert known[honest.key] is None

    def test_healing_replaces_only_what_was_read(
        self, store: DirectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Two heal at once: the second finds the first one's entry whole and adopts it."""
        first, first_files = make_entry(tmp_path / "a", 1)
        second, second_files = make_entry(tmp_path / "b", 1, contents={"model.so": b"other"})
        path = entry_path(store, first.key)
        path.parent.mkdir(parents=True)
        path.write_bytes(b"broken")
        replace = DirectoryStore.replace

        def healed_in_between(self: DirectoryStore, name: str, data: bytes, version: str) -> bool:
            monkeypatch.undo()
            assert commit_entry(self, first, first_files) == first
            return replace(self, name, data, version)

        monkeypatch.setattr(DirectoryStore, "replace", healed_in_between)
        assert commit_entry(store, second, second_files) == first
        assert read_entry(store, first.key) == Hit(first)

    def test_quarantine_makes_it_a_clean_miss_and_keeps_what_was_found(
        self, store: DirectoryStore, tmp_path: Path
    ) -> None:
        entry, files = make_entry(tmp_path, 1)
        commit_entry(store, entry, files)
        blob = store.blob_path(entry.files["model.so"].digest)
        content = bytearray(blob.read_bytes())
        content[10] ^= 1
        blob.write_bytes(content)
        assert isinstance(read_entry(store, entry.key), Hit)  # only reading the blob can tell

        quarantine_entry(store, entry.key, entry.blobs)
        assert read_entry(store, entry.key) == Miss()
        [folder] = (store.root / "v1/quarantine").iterdir()
        assert folder.name.startswith(f"{entry.key}-")
        assert (folder / entry.files["model.so"].digest).read_bytes() == bytes(content)
        whole = entry.files["meta/binding.json"]
        assert store.check_blob(whole.digest, whole.size) is None

        commit_entry(store, entry, files)
        assert verify_keys(store, [entry.key]).ok

    def test_quarantine_leaves_a_whole_entry_alone(
        self, store: DirectoryStore, tmp_path: Path
    ) -> None:
        [entry] = fill(store, tmp_path, 1)
        quarantine_entry(store, entry.key, entry.blobs)
        assert read_entry(store, entry.key) == Hit(entry)


def test_last_failure_is_the_reason_of_a_miss_and_never_a_hit(
    store: DirectoryStore, tmp_path: Path
) -> None:
    entry, files = make_entry(tmp_path, 1)
    record_failure(store, entry.key, cause="timeout", message="no end after 60 s", log_tail="…")
    assert read_entry(store, entry.key) == Miss()
    assert stored_keys(store, [entry.key]) == {
        entry.key: "last compile failed (timeout): no end after 60 s"
    }
    commit_entry(store, entry, files)
    assert stored_keys(store, [entry.key]) == {entry.key: None}


def test_manifests_and_indexes_are_found_by_digest_and_healed_when_damaged(
    store: DirectoryStore, tmp_path: Path
) -> None:
    manifest = make_manifest(fill(store, tmp_path, 2))
    digest = write_manifest(store, manifest)
    assert digest == manifest.digest
    assert read_manifest(store, digest) == manifest
    assert read_manifest(store, "0" * 64) is None
    index = Index().with_manifest(manifest.platform, digest)
    assert read_index(store, write_index(store, index)) == index
    path = store.root / f"v1/manifests/{digest}.json"
    path.write_bytes(path.read_bytes().replace(b"4096", b"8192"))
    with pytest.raises(IntegrityError, match="digest"):
        read_manifest(store, digest)
    write_manifest(store, manifest)
    assert read_manifest(store, digest) == manifest


def test_moved_copied_or_tarred_store_hits_and_holds_no_absolute_path(tmp_path: Path) -> None:
    old = DirectoryStore(tmp_path / "home/user/cache")
    entries = fill(old, tmp_path / "scratch", 5)
    digest = write_manifest(old, make_manifest(entries))
    write_pointer(old, "c" * 64, digest)
    append_run(old, {"schema": "neffbuild.run/1", "units": []})
    record_failure(old, "f" * 64, cause="exit", message="70", log_tail="")
    materialise(old, entries[0])
    with tarfile.open(tmp_path / "cache.tar", "w") as tar:
        tar.add(old.root / "v1", "v1")
    with tarfile.open(tmp_path / "cache.tar") as tar:
        tar.extractall(tmp_path / "mnt/other", filter="data")
    shutil.copytree(old.root, tmp_path / "copied")
    shutil.move(old.root, tmp_path / "moved")

    for root in (tmp_path / "mnt/other", tmp_path / "copied", tmp_path / "moved"):
        store = DirectoryStore(root)
        keys = [entry.key for entry in entries]
        assert read_entries(store, keys) == {entry.key: Hit(entry) for entry in entries}
        assert verify_store(store, Trust()).ok
        for entry in entries:
            folder = materialise(store, entry)
            assert sorted(entry.files) == sorted(
                str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()
            )
        for path in root.rglob("*.json"):
            assert str(tmp_path) not in path.read_text()


@pytest.mark.parametrize("round_number", range(4))
def test_process_killed_at_any_moment_of_committing_leaves_whole_entries(
    store: DirectoryStore, tmp_path: Path, round_number: int
) -> None:
    committed, told = os.pipe()

    def commit_for_ever() -> int:
        number = 0
        while True:
            number += 1
            contents = {"model.so": os.urandom(300_000), "binding.json": b"{}"}
            made = make_entry(tmp_path, 0, note=f"{os.getpid()}-{number}", contents=contents)
            commit_entry(store, *made)
            os.write(told, b"!")

    for kill in range(10):
        child = start_child(commit_for_ever)
        os.read(committed, 1)
        time.sleep((round_number * 10 + kill) * 0.0005)
        os.kill(child, signal.SIGKILL)
        assert wait_for(child) == -signal.SIGKILL
        found = verify_store(store, Trust())
        assert found.problems == ()
        assert found.entries_checked > kill
    # Nothing has to be cleaned before the next run.
    [entry] = fill(store, tmp_path / "after", 1)
    assert read_entry(store, entry.key) == Hit(entry)
