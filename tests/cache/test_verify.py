from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cache_samples import ANYONE, fill, make_entry, make_manifest

from neffbuild.cache.catalog import Hit, Miss, commit_entry, entry_name, read_entry, write_manifest
from neffbuild.cache.directory import DirectoryStore
from neffbuild.cache.entry import Entry
from neffbuild.cache.problem import ProblemKind
from neffbuild.cache.tag import TagRef, Trust
from neffbuild.cache.transfer import push
from neffbuild.cache.verify import repair, verify_keys, verify_manifest, verify_store, verify_tag
from neffbuild.config.errors import StoreError

PROD = TagRef("llama", "prod")


@pytest.fixture
def entries(store: DirectoryStore, tmp_path: Path) -> list[Entry]:
    return fill(store, tmp_path / "scratch", 3)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def test_whole_store_has_no_problems_and_everything_is_counted(
    store: DirectoryStore, entries: list[Entry]
) -> None:
    write_manifest(store, make_manifest(entries))
    found = verify_store(store, ANYONE)
    assert found.ok
    assert found.entries_checked == 3
    assert found.blobs_checked == 6
    keys = [entry.key for entry in entries]
    assert verify_keys(store, keys[:2]).blobs_checked == 4
    assert verify_manifest(store, make_manifest(entries)).entries_checked == 3
    assert verify_store(DirectoryStore(store.root / "empty"), ANYONE).entries_checked == 0


@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        (flip, ProblemKind.BAD_DIGEST),
        (shorten, ProblemKind.BAD_SIZE),
        (lambda path: path.write_bytes(b""), ProblemKind.BAD_SIZE),
        (Path.unlink, ProblemKind.MISSING_BLOB),
    ],
)
def test_damaged_blob_is_found_named_and_healed(
    store: DirectoryStore,
    entries: list[Entry],
    tmp_path: Path,
    damage: Callable[[Path], None],
    kind: ProblemKind,
) -> None:
    write_manifest(store, make_manifest(entries))
    entry = entries[1]
    digest = entry.files["model.so"].digest
    damage(store.blob_path(digest))
    for found in (
        verify_store(store, ANYONE),
        verify_keys(store, [one.key for one in entries]),
        verify_manifest(store, make_manifest(entries)),
    ):
        [problem] = found.problems
        assert (problem.kind, problem.key) == (kind, entry.key)
        assert digest in problem.detail
        assert not found.ok

    repair(store, verify_store(store, ANYONE))
    assert read_entry(store, entry.key) == Miss()
    assert verify_keys(store, [entries[0].key, entries[2].key]).ok
    commit_entry(store, *make_entry(tmp_path / "again", 1))
    assert read_entry(store, entry.key) == Hit(entry)
    assert verify_store(store, ANYONE).ok


def test_blob_shared_by_two_entries_is_a_problem_of_both(
    store: DirectoryStore, tmp_path: Path
) -> None:
    made = [make_entry(tmp_path, number, contents={"model.so": b"shared"}) for number in range(2)]
    entries = [commit_entry(store, *one) for one in made]
    store.blob_path(entries[0].files["model.so"].digest).write_bytes(b"sharex")
    found = verify_store(store, ANYONE)
    assert {problem.key for problem in found.problems} == {entry.key for entry in entries}
    assert found.blobs_checked == 1
    repair(store, found)
    assert [read_entry(store, entry.key) for entry in entries] == [Miss(), Miss()]


def test_swapped_artifacts_are_found(store: DirectoryStore, tmp_path: Path) -> None:
    made = [
        make_entry(tmp_path, number, contents={"model.so": b"equally long %d" % number})
        for number in range(2)
    ]
    entries = [commit_entry(store, *one) for one in made]
    first, second = (store.blob_path(entry.files["model.so"].digest) for entry in entries)
    first.rename(first.with_suffix(".x"))
    second.rename(first)
    first.with_suffix(".x").rename(second)
    kinds = {problem.kind for problem in verify_store(store, ANYONE).problems}
    assert kinds == {ProblemKind.BAD_DIGEST}


def folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    "damage", [flip, shorten, lambda path: path.write_bytes(b""), folder_instead]
)
def test_damaged_entry_is_found_and_healed(
    store: DirectoryStore, entries: list[Entry], damage: Callable[[Path], None], tmp_path: Path
) -> None:
    path = store.root / "v1" / entry_name(entries[1].key)
    damage(path)
    found = verify_store(store, ANYONE)
    [problem] = found.problems
    assert (problem.kind, problem.key) == (ProblemKind.BAD_ENTRY, entries[1].key)
    assert found.entries_checked == 3
    repair(store, found)
    assert not path.exists()
    assert verify_store(store, ANYONE).ok
    [folder] = (store.root / "v1/quarantine").iterdir()
    assert [one.name for one in folder.iterdir()] == [path.name]


def test_entry_filed_under_another_key_and_strange_names_are_found(
    store: DirectoryStore, entries: list[Entry]
) -> None:
    first, second = (store.root / "v1" / entry_name(entry.key) for entry in entries[:2])
    second.write_bytes(first.read_bytes())
    (first.parent / "notes.json").write_text("{}")
    found = verify_store(store, ANYONE)
    problems = {problem.key: problem.kind for problem in found.problems}
    assert problems == {entries[1].key: ProblemKind.BAD_ENTRY, "notes": ProblemKind.BAD_ENTRY}


def test_missing_units_are_found(store: DirectoryStore, entries: list[Entry]) -> None:
    found = verify_keys(store, [entries[0].key, "0" * 64])
    assert [(one.kind, one.key) for one in found.problems] == [(ProblemKind.MISSING_UNIT, "0" * 64)]
    assert found.entries_checked == 1
    found = verify_manifest(store, make_manifest(entries, lacking=1))
    assert [one.kind for one in found.problems] == [ProblemKind.MISSING_UNIT]
    assert "decode_b4_ctx4096" in found.problems[0].detail


class TestTags:
    @pytest.fixture(autouse=True)
    def _pushed(self, store: DirectoryStore, remote: DirectoryStore, entries: list[Entry]) -> None:
        self.pushed = push(store, remote, make_manifest(entries), PROD, trust=ANYONE)

    def kinds(self, remote: DirectoryStore, trust: Trust = ANYONE, seen: int = 0) -> list[str]:
        one = verify_tag(remote, PROD, trust, last_seen=seen).problems
        assert verify_store(remote, trust, last_seen=lambda _: seen).problems == one
        return [problem.kind.value for problem in one]

    def test_tag_leads_to_everything(self, remote: DirectoryStore, entries: list[Entry]) -> None:
        assert self.kinds(remote) == []
        assert verify_tag(remote, PROD, ANYONE).blobs_checked == 6
        remote.blob_path(entries[0].files["model.so"].digest).unlink()
        assert self.kinds(remote) == ["missing_blob"]

    def test_each_document_is_read_once(
        self, remote: DirectoryStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Tag, index, manifest and provenance.
        asked: list[str] = []
        read = DirectoryStore.read

        def note(self: DirectoryStore, name: str) -> object:
            asked.append(name)
            return read(self, name)

        monkeypatch.setattr(DirectoryStore, "read", note)
        assert verify_store(remote, ANYONE).ok
        assert len(asked) == len(set(asked)) == 4

    def test_only_what_the_tag_names_is_checked(
        self, store: DirectoryStore, remote: DirectoryStore, tmp_path: Path
    ) -> None:
        [other] = fill(remote, tmp_path / "other", 1, note="other")
        remote.blob_path(other.files["model.so"].digest).unlink()
        assert verify_tag(remote, PROD, ANYONE).ok
        assert not verify_store(remote, ANYONE).ok

    def test_unsigned_rolled_back_and_expired(
        self, store: DirectoryStore, remote: DirectoryStore, entries: list[Entry]
    ) -> None:
        # The tag, and the provenance of the manifest.
        assert self.kinds(remote, Trust(require_signature=True)) == ["bad_signature"] * 2
        assert self.kinds(remote, seen=2) == ["rollback"]
        assert self.kinds(remote, Trust(min_sequence=2)) == ["rollback"]
        past = datetime.now(UTC) - timedelta(seconds=1)
        push(store, remote, make_manifest(entries), PROD, trust=ANYONE, expires=past)
        assert self.kinds(remote) == ["expired"]

    def test_damaged_tag_index_and_manifest(self, remote: DirectoryStore) -> None:
        for name, kind in (
            (f"manifests/{self.pushed.manifest}.json", "bad_digest"),
            (f"indexes/{self.pushed.index}.json", "bad_digest"),
        ):
            path = remote.root / "v1" / name
            data = path.read_bytes()
            flip(path)
            assert self.kinds(remote) == [kind]
            path.unlink()
            assert "missing_blob" in [p.kind for p in verify_tag(remote, PROD, ANYONE).problems]
            path.write_bytes(data)
        (remote.root / "v1" / PROD.document_name).write_bytes(b"{")
        assert self.kinds(remote) == ["bad_entry"]
        folder_instead(remote.root / "v1" / PROD.document_name)
        assert self.kinds(remote) == ["bad_entry"]

    def test_a_push_heals_folders_in_the_place_of_documents(
        self, store: DirectoryStore, remote: DirectoryStore, entries: list[Entry]
    ) -> None:
        for name in (
            f"manifests/{self.pushed.manifest}.json",
            f"indexes/{self.pushed.index}.json",
            entry_name(entries[0].key),
        ):
            folder_instead(remote.root / "v1" / name)
        assert len(verify_store(remote, ANYONE).problems) == 3
        push(store, remote, make_manifest(entries), PROD, trust=ANYONE)
        assert verify_store(remote, ANYONE).ok

    def test_no_such_tag(self, remote: DirectoryStore) -> None:
        with pytest.raises(StoreError, match="no tag llama:test"):
            verify_tag(remote, TagRef("llama", "test"), ANYONE)

    def test_strange_file_among_the_tags(self, remote: DirectoryStore) -> None:
        (remote.root / "v1/tags/loose.json").write_text("{}")
        [problem] = verify_store(remote, ANYONE).problems
        assert problem.kind is ProblemKind.BAD_ENTRY
        assert problem.key == "tags/loose.json"
