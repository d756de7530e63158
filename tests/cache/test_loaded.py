from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from cache_samples import as_nobody, fill, in_children, make_entry, start_child, wait_for

from neffbuild.cache.catalog import Hit, Miss, commit_entry, read_entry
from neffbuild.cache.directory import DirectoryStore
from neffbuild.cache.entry import Entry
from neffbuild.cache.loaded import materialise
from neffbuild.config.errors import IntegrityError


@pytest.fixture
def entry(store: DirectoryStore, tmp_path: Path) -> Entry:
    return fill(store, tmp_path / "scratch", 1)[0]


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if not path.is_dir()
    }


def expected(store: DirectoryStore, entry: Entry) -> dict[str, bytes]:
    return {
        name: store.blob_path(record.digest).read_bytes() for name, record in entry.files.items()
    }


def test_files_lie_under_their_real_names_as_links_to_the_blobs(
    store: DirectoryStore, entry: Entry
) -> None:
    folder = materialise(store, entry)
    assert folder.parent == store.root / "v1/loaded" / entry.key
    assert contents(folder) == expected(store, entry)
    for name, record in entry.files.items():
        assert (folder / name).samefile(store.blob_path(record.digest))
    assert materialise(store, entry) == folder
    assert materialise(DirectoryStore(store.root), entry) == folder
    assert list((store.root / "v1/tmp").iterdir()) == []


def test_many_processes_at_once_share_one_folder(store: DirectoryStore, entry: Entry) -> None:
    def lay_out(_: int) -> int:
        return int(contents(materialise(store, entry)) != expected(store, entry))

    assert in_children(24, lay_out) == [0] * 24
    assert len(list((store.root / "v1/loaded" / entry.key).iterdir())) == 1


def test_folder_that_somebody_else_laid_out_meanwhile_is_not_touched(
    store: DirectoryStore, entry: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch_folder = DirectoryStore.scratch_folder
    theirs: list[int] = []

    def overtaken(self: DirectoryStore) -> object:
        if not theirs:
            theirs.append(0)
            folder = materialise(DirectoryStore(store.root), entry)
            theirs[0] = folder.stat().st_ino
        return scratch_folder(self)

    monkeypatch.setattr(DirectoryStore, "scratch_folder", overtaken)
    assert materialise(store, entry).stat().st_ino == theirs[0]


@pytest.mark.parametrize("damage", ["flip", "truncate", "gone"])
def test_damaged_blob_is_refused_before_use_and_quarantined(
    store: DirectoryStore, entry: Entry, damage: str, tmp_path: Path
) -> None:
    materialise(store, entry)
    path = store.blob_path(entry.files["model.so"].digest)
    data = bytearray(path.read_bytes())
    data[7] ^= 1
    path.unlink()
    if damage != "gone":
        path.write_bytes(data if damage == "flip" else data[:-1])
    for fresh_process in (store, DirectoryStore(store.root)):
        with pytest.raises(IntegrityError, match=r"model\.so") as caught:
            materialise(fresh_process, entry)
        assert caught.value.exit_status == 4
        assert read_entry(store, entry.key) == Miss()
    commit_entry(store, *make_entry(tmp_path / "again", 0))
    assert contents(materialise(store, entry)) == expected(store, entry)


def test_damage_through_the_shared_inode_is_seen_by_the_same_process(
    store: DirectoryStore, entry: Entry
) -> None:
    folder = materialise(store, entry)
    status = (folder / "model.so").stat()
    with (folder / "model.so").open("r+b") as file:
        file.write(b"X")
    os.utime(folder / "model.so", ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(IntegrityError):
        materialise(store, entry)


def test_blobs_swapped_by_renaming_are_seen_by_the_same_process(
    store: DirectoryStore, tmp_path: Path
) -> None:
    entries = [
        commit_entry(store, *make_entry(tmp_path, number, contents={"model.so": b"%d" % number}))
        for number in range(2)
    ]
    for entry in entries:
        materialise(store, entry)
    first, second = (store.blob_path(entry.files["model.so"].digest) for entry in entries)
    first.rename(tmp_path / "first")
    second.rename(first)
    (tmp_path / "first").rename(second)
    for entry in entries:
        with pytest.raises(IntegrityError, match="bad_digest"):
            materialise(store, entry)


@pytest.mark.parametrize("damage", ["extra", "other bytes", "gone", "link", "folder is a file"])
def test_damaged_folder_is_laid_out_anew(
    store: DirectoryStore, entry: Entry, damage: str, tmp_path: Path
) -> None:
    folder = materialise(store, entry)
    file = folder / "model.so"
    data = file.read_bytes()
    match damage:
        case "extra":
            (folder / "meta/model.json").write_text("{}")
        case "folder is a file":
            folder.rename(folder.with_name("away"))
            folder.write_bytes(b"")
        case _:
            file.unlink()
    if damage == "other bytes":
        file.write_bytes(bytes(len(data)))
    if damage == "link":
        (tmp_path / "target").write_bytes(data)
        file.symlink_to(tmp_path / "target")
    fresh_process = DirectoryStore(store.root)
    assert materialise(fresh_process, entry) == folder
    assert contents(folder) == expected(store, entry)
    assert not file.is_symlink()


def test_another_build_under_the_same_key_leaves_a_folder_in_use_alone(
    store: DirectoryStore, entry: Entry, tmp_path: Path
) -> None:
    folder = materialise(store, entry)
    other, files = make_entry(tmp_path / "other", 0, contents={"model.so": b"other bytes"})
    assert other.key == entry.key
    store.delete(f"entries/{entry.key[:2]}/{entry.key}.json")
    commit_entry(store, other, files)
    assert contents(materialise(store, other)) == {"model.so": b"other bytes"}
    assert contents(folder) == expected(store, entry)
    assert materialise(store, entry) == folder


@pytest.mark.parametrize("refusal", [errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOTSUP])
def test_without_hard_links_files_are_copied(
    store: DirectoryStore, entry: Entry, monkeypatch: pytest.MonkeyPatch, refusal: int
) -> None:
    def no_link(*_: object, **__: object) -> None:
        raise OSError(refusal, os.strerror(refusal))

    monkeypatch.setattr(os, "link", no_link)
    folder = materialise(store, entry)
    assert contents(folder) == expected(store, entry)
    assert not (folder / "model.so").samefile(store.blob_path(entry.files["model.so"].digest))


def test_programs_can_be_executed_and_other_files_cannot(
    store: DirectoryStore, remote: DirectoryStore, tmp_path: Path
) -> None:
    entry, files = make_entry(tmp_path, 1)
    files["model.so"].chmod(0o755)
    program = Entry(
        entry.recipe,
        {
            **entry.files,
            "model.so": type(entry.files["model.so"])(
                entry.files["model.so"].digest, entry.files["model.so"].size, 0o755
            ),
        },
        entry.graph_digest,
        entry.graph_key,
    )
    files["model.so"].chmod(0o644)
    commit_entry(remote, program, files)  # stored without the permission: must not be linked
    blob = remote.blob_path(program.files["model.so"].digest)
    folder = materialise(remote, program)
    assert os.access(folder / "model.so", os.X_OK)
    assert not os.access(folder / "meta/binding.json", os.X_OK)
    assert not os.access(blob, os.X_OK)
    files["model.so"].chmod(0o755)
    commit_entry(store, program, files)
    folder = materialise(store, program)
    assert os.access(folder / "model.so", os.X_OK)
    assert (folder / "model.so").samefile(store.blob_path(program.files["model.so"].digest))


def test_read_only_store_is_laid_out_in_a_private_folder_that_goes_with_the_process(
    public_folder: Path, tmp_path: Path
) -> None:
    store = DirectoryStore(public_folder / "store")
    entry = fill(store, tmp_path, 1)[0]
    for path in [store.root, *store.root.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    note = public_folder / "note"
    note.touch(0o666)
    note.chmod(0o666)

    def use() -> int:
        import atexit

        folder = materialise(store, entry)
        assert not folder.is_relative_to(store.root)
        assert contents(folder) == expected(store, entry)
        assert materialise(store, entry) == folder
        assert folder.parent.parent.stat().st_mode & 0o077 == 0

        def child() -> int:
            mine = materialise(store, entry)
            assert mine != folder
            assert contents(mine) == contents(folder)
            atexit._run_exitfuncs()
            return int(mine.exists())

        assert wait_for(start_child(child)) == 0
        assert contents(folder) == expected(store, entry)
        note.write_text(str(folder))
        atexit._run_exitfuncs()
        return 0

    assert as_nobody(use) == 0
    assert note.read_text().startswith("/tmp/neffbuild-loaded-")
    assert not Path(note.read_text()).exists()

    def damaged() -> int:
        with pytest.raises(IntegrityError, match=r"model\.so"):
            materialise(store, entry)
        return 0

    blob = store.blob_path(entry.files["model.so"].digest)
    blob.chmod(0o644)
    blob.write_bytes(bytes(len(blob.read_bytes())))
    assert as_nobody(damaged) == 0
    assert isinstance(read_entry(store, entry.key), Hit)
    for path in store.root.rglob("*"):
        if path.is_dir():
            path.chmod(0o755)
