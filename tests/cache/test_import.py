"""Bringing another directory, or a tar of one, into a cache."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import tarfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from cache_samples import (
    ANYONE,
    X86_V4,
    as_nobody,
    fill,
    make_entry,
    make_manifest,
    start_child,
    wait_for,
)

from neffbuild.cache import import_source, importing
from neffbuild.cache.canonical import canonical_json, digest_document
from neffbuild.cache.catalog import (
    commit_entry,
    entry_name,
    manifest_name,
    read_hits,
    read_manifest,
    write_manifest,
)
from neffbuild.cache.directory import DirectoryStore
from neffbuild.cache.import_source import open_source
from neffbuild.cache.importing import Count, Imported
from neffbuild.cache.manifest import Manifest
from neffbuild.cache.problem import ProblemKind
from neffbuild.cache.records import append_run, read_pointer, read_runs, write_pointer
from neffbuild.cache.tag import TagRef
from neffbuild.cache.transfer import push
from neffbuild.cache.verify import verify_store
from neffbuild.config.errors import ConfigError, IntegrityError, StoreError

RUN = {
    "schema": "neffbuild.run/1",
    "counts": {"built": 1, "cached": 0, "failed": 0},
    "wall_seconds": 2.5,
    "interrupted": False,
    "units": [{"key": digest_document(1), "outcome": "built", "compile_seconds": 2.0}],
}
Pack = Callable[[DirectoryStore, Path], Path]


def as_directory(store: DirectoryStore, _: Path) -> Path:
    return store.root


def as_tar(mode: str, suffix: str, *, backwards: bool = False) -> Pack:
    def pack(store: DirectoryStore, folder: Path) -> Path:
        path = folder / f"packed{suffix}"
        names = sorted((one for one in store.root.rglob("*") if one.is_file()), reverse=backwards)
        with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
            for name in names:
                tar.add(name, arcname=f"cache/{name.relative_to(store.root)}")
        return path

    return pack


def as_zstd(store: DirectoryStore, folder: Path) -> Path:
    import zstandard

    plain = as_tar("w", ".tar")(store, folder)
    path = folder / "packed.tar.zst"
    path.write_bytes(zstandard.ZstdCompressor().compress(plain.read_bytes()))
    return path


PACKS = {
    "directory": as_directory,
    "tar, blobs first": as_tar("w", ".tar"),
    "tar, blobs last": as_tar("w", ".tar", backwards=True),
    "tar.gz": as_tar("w:gz", ".tar.gz"),
    "tar.zst": as_zstd,
}


@pytest.fixture
def manifest(store: DirectoryStore, tmp_path: Path) -> Manifest:
    """`store` is a local cache of four units, as a compile leaves it."""
    manifest = make_manifest(fill(store, tmp_path / "scratch", 4))
    write_pointer(store, manifest.config, write_manifest(store, manifest))
    append_run(store, RUN)
    return manifest


@pytest.fixture
def fresh(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "fresh")


def bring(path: Path, local: DirectoryStore) -> Imported:
    with open_source(path, local) as source:
        return importing.import_artifacts(source, local, trust=ANYONE)


def blob_file(store: DirectoryStore, manifest: Manifest, number: int = 0) -> Path:
    return store.blob_path(sorted(manifest.blobs)[number])


def owners(manifest: Manifest, digest: str) -> set[str]:
    return {key for key, entry in manifest.entries.items() if digest in entry.blobs}


def nothing_unfinished(store: DirectoryStore) -> bool:
    return list(store.list_leftovers()) == []


@pytest.mark.parametrize("pack", PACKS.values(), ids=PACKS.keys())
def test_everything_useful_comes_over_and_a_second_time_nothing(
    store: DirectoryStore, fresh: DirectoryStore, manifest: Manifest, tmp_path: Path, pack: Pack
) -> None:
    path = pack(store, tmp_path)
    imported = bring(path, fresh)
    assert imported == Imported(
        entries=Count(4, 4),
        manifests=Count(1, 1),
        configs=Count(1, 1),
        runs=Count(1, 1),
        unsigned=0,
        blobs_copied=len(manifest.blobs),
        bytes_copied=sum(manifest.blobs.values()),
        problems=(),
    )
    assert read_hits(fresh, manifest.entries) == manifest.entries
    assert read_manifest(fresh, manifest.digest) == manifest
    assert read_pointer(fresh, manifest.config) == manifest.digest
    assert list(read_runs(fresh)) == list(read_runs(store))
    assert verify_store(fresh, ANYONE).ok
    assert nothing_unfinished(fresh)

    again = bring(path, fresh)
    assert again == replace(
        imported,
        entries=Count(4, 0),
        manifests=Count(1, 0),
        configs=Count(1, 0),
        runs=Count(1, 0),
        blobs_copied=0,
        bytes_copied=0,
    )


@pytest.mark.parametrize("pack", PACKS.values(), ids=PACKS.keys())
def test_programs_stay_programs(
    store: DirectoryStore, fresh: DirectoryStore, tmp_path: Path, pack: Pack
) -> None:
    entry, files = make_entry(tmp_path / "scratch", 0, contents={"run": b"#!/bin/sh\n"})
    files["run"].chmod(0o755)
    records = {name: replace(record, mode=0o755) for name, record in entry.files.items()}
    entry = commit_entry(store, replace(entry, files=records), files)
    bring(pack(store, tmp_path), fresh)
    assert os.access(fresh.blob_path(entry.files["run"].digest), os.X_OK)


def test_a_directory_that_was_pushed_to_has_no_pointers_and_gets_them(
    store: DirectoryStore, remote: DirectoryStore, fresh: DirectoryStore, manifest: Manifest
) -> None:
    push(store, remote, manifest, TagRef("llama", "prod"), trust=ANYONE)
    imported = bring(remote.root, fresh)
    assert imported.configs == Count(1, 1)
    assert read_pointer(fresh, manifest.config) == manifest.digest
    # They speak of the store they were pushed to.
    for folder in ("tags/", "indexes/", "leases/", "seen/", "pulls/"):
        assert list(fresh.list(folder)) == []


def test_of_several_manifests_of_a_config_the_most_complete_is_pointed_to(
    store: DirectoryStore, tmp_path: Path
) -> None:
    entries = fill(store, tmp_path / "scratch", 3)
    whole, partial = make_manifest(entries), make_manifest(entries[:2], lacking=1)
    other = make_manifest(entries, platform=X86_V4)
    for newest, second in ((whole, other), (other, whole)):
        for number, one in enumerate((second, newest, partial)):
            write_manifest(store, one)
            os.utime(store.root / "v1" / manifest_name(one.digest), (1000 + number, 1000 + number))
        for pack in (as_directory, PACKS["tar, blobs first"]):
            local = DirectoryStore(tmp_path / f"local-{newest.digest}-{pack is as_directory}")
            assert bring(pack(store, tmp_path), local).manifests == Count(3, 3)
            assert read_pointer(local, whole.config) == newest.digest


def test_the_cache_keeps_a_pointer_that_is_as_good(
    store: DirectoryStore, fresh: DirectoryStore, manifest: Manifest, tmp_path: Path
) -> None:
    own = make_manifest(fill(fresh, tmp_path / "scratch", 4), platform=X86_V4)
    write_pointer(fresh, own.config, write_manifest(fresh, own))
    assert bring(store.root, fresh).configs == Count(1, 0)
    assert read_pointer(fresh, own.config) == own.digest

    partial = make_manifest(fill(fresh, tmp_path / "scratch", 2), lacking=2)
    write_pointer(fresh, own.config, write_manifest(fresh, partial))
    assert bring(store.root, fresh).configs == Count(1, 1)
    assert read_pointer(fresh, own.config) == manifest.digest

    (fresh.root / "v1" / manifest_name(manifest.digest)).write_bytes(b"{}")
    assert bring(store.root, fresh).manifests == Count(1, 1)
    assert read_manifest(fresh, manifest.digest) == manifest


def test_an_entry_that_the_cache_has_stays_beside_a_manifest_with_its_own(
    store: DirectoryStore, fresh: DirectoryStore, manifest: Manifest, tmp_path: Path
) -> None:
    """Two builders compiled one key to different bytes; the manifest's are imported with it."""
    entry, files = make_entry(tmp_path / "other", 0, contents={"model.so": b"another build"})
    commit_entry(fresh, entry, files)
    assert bring(store.root, fresh).entries == Count(4, 3)
    assert read_hits(fresh, [entry.key]) == {entry.key: entry}
    assert verify_store(fresh, ANYONE).ok
    assert read_manifest(fresh, manifest.digest) == manifest


@pytest.mark.parametrize("pack", PACKS.values(), ids=PACKS.keys())
@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), ProblemKind.BAD_DIGEST),
        (lambda data: data[:-1], ProblemKind.BAD_SIZE),
        (lambda data: data + b"x" * 5000, ProblemKind.BAD_SIZE),
        (lambda data: None, ProblemKind.MISSING_BLOB),
    ],
    ids=["flipped", "short", "long", "gone"],
)
def test_a_damaged_artifact_is_named_and_the_rest_imported(
    store: DirectoryStore,
    fresh: DirectoryStore,
    manifest: Manifest,
    tmp_path: Path,
    pack: Pack,
    damage: Callable[[bytes], bytes | None],
    kind: ProblemKind,
) -> None:
    blob = blob_file(store, manifest)
    data = damage(blob.read_bytes())
    blob.unlink()
    if data is not None:
        blob.write_bytes(data)
    imported = bring(pack(store, tmp_path), fresh)
    [key] = owners(manifest, blob.name)
    [problem] = imported.problems
    assert (problem.kind, problem.key) == (kind, key)
    assert blob.name in problem.detail
    assert imported.entries == Count(3, 3)
    # Not whole, so not there.
    assert imported.manifests == Count(0, 0)
    assert imported.configs == Count(0, 0)
    assert verify_store(fresh, ANYONE).ok
    assert nothing_unfinished(fresh)


@pytest.mark.parametrize("pack", PACKS.values(), ids=PACKS.keys())
def test_damaged_documents_are_named_and_the_rest_imported(
    store: DirectoryStore, fresh: DirectoryStore, manifest: Manifest, tmp_path: Path, pack: Pack
) -> None:
    other = make_manifest(list(manifest.entries.values()), platform=X86_V4)
    write_manifest(store, other)
    key, second = sorted(manifest.entries)[:2]
    base = store.root / "v1"
    (base / entry_name(key)).write_bytes(b"{")
    entry = base / entry_name(second)
    entry.write_bytes(entry.read_bytes().replace(b"1.5", b"2.5"))
    (base / manifest_name(other.digest)).write_bytes(manifest.to_json())
    [run] = (base / "runs").iterdir()
    shutil.copy(run, base / "runs/zzz.json")
    run.write_bytes(canonical_json({**RUN, "units": [{"key": 1}]}))
    gone = digest_document("config of the gone")
    (base / f"configs/{gone}.json").write_bytes(canonical_json({"manifest": digest_document(9)}))
    (base / f"configs/{key}.json").write_bytes(b"[]")
    imported = bring(pack(store, tmp_path), fresh)
    assert {(one.kind, one.key) for one in imported.problems} == {
        (ProblemKind.BAD_ENTRY, key),
        (ProblemKind.BAD_ENTRY, second),
        (ProblemKind.BAD_DIGEST, other.digest),
        (ProblemKind.BAD_ENTRY, run.stem),
        (ProblemKind.BAD_ENTRY, "zzz"),
        (ProblemKind.MISSING_BLOB, digest_document(9)),
    }
    # The whole manifest holds the damaged entries too.
    assert imported.entries == Count(4, 4)
    assert imported.runs == Count(0, 0)
    assert verify_store(fresh, ANYONE).ok


def test_a_damaged_blob_of_the_cache_is_replaced(
    store: DirectoryStore, fresh: DirectoryStore, manifest: Manifest
) -> None:
    bring(store.root, fresh)
    for number, change in enumerate((lambda data: bytes(len(data)), lambda data: data[:3])):
        blob = blob_file(fresh, manifest, number)
        blob.write_bytes(change(blob.read_bytes()))
    (fresh.root / "v1" / entry_name(min(manifest.entries))).write_bytes(b"{")
    imported = bring(store.root, fresh)
    assert imported.blobs_copied == 2
    assert imported.problems == ()
    assert verify_store(fresh, ANYONE).ok


@pytest.mark.parametrize("pack", PACKS.values(), ids=PACKS.keys())
def test_an_entry_that_lies_about_a_size_does_not_harm_the_others(
    store: DirectoryStore, fresh: DirectoryStore, manifest: Manifest, tmp_path: Path, pack: Pack
) -> None:
    entry = manifest.entries[min(manifest.entries)]
    for number, size in enumerate((1, 1 << 40)):
        liar, _ = make_entry(tmp_path / "scratch", 0, note=f"liar {number}")
        records = {name: replace(one, size=size) for name, one in entry.files.items()}
        liar = replace(liar, files=records)
        store.create(entry_name(liar.key), liar.to_json())
    imported = bring(pack(store, tmp_path), fresh)
    assert {one.kind for one in imported.problems} == {ProblemKind.BAD_SIZE}
    assert imported.entries == Count(4, 4)
    assert imported.manifests == Count(1, 1)
    assert verify_store(fresh, ANYONE).ok


def test_what_is_no_store_says_what_was_expected(fresh: DirectoryStore, tmp_path: Path) -> None:
    empty, text = tmp_path / "empty", tmp_path / "text"
    empty.mkdir()
    text.write_text("hello\n" * 1000)
    with tarfile.open(tmp_path / "empty.tar", "w"):
        pass
    (tmp_path / "nothing").touch()
    os.mkfifo(tmp_path / "pipe")
    for name, message in {
        "empty": "nothing to import .* no entry, manifest or run record",
        "empty.tar": "nothing to import",
        "text": "neither a directory nor a tar",
        "nothing": "neither a directory nor a tar",
        "gone": "there is no directory and no file",
        "pipe": "there is no directory and no file",
    }.items():
        with pytest.raises(ConfigError, match=message):
            bring(tmp_path / name, fresh)
    assert not (fresh.root / "v1/entries").exists()
    assert nothing_unfinished(fresh)


def test_a_cache_is_not_imported_into_itself(store: DirectoryStore, manifest: Manifest) -> None:
    with pytest.raises(ConfigError, match="the local cache itself"):
        bring(store.root / "v1" / "..", store)


def test_where_everything_is_damaged_the_first_problem_is_told(
    store: DirectoryStore, fresh: DirectoryStore, tmp_path: Path
) -> None:
    [entry] = fill(store, tmp_path / "scratch", 1)
    (store.root / "v1" / entry_name(entry.key)).write_bytes(b"{}")
    with pytest.raises(IntegrityError, match=f"bad_entry {entry.key}"):
        bring(store.root, fresh)


def test_links_in_a_directory_are_not_followed(
    store: DirectoryStore, fresh: DirectoryStore, manifest: Manifest, tmp_path: Path
) -> None:
    blob, secret = blob_file(store, manifest), tmp_path / "secret"
    blob.rename(secret)
    blob.symlink_to(secret)
    [problem] = bring(store.root, fresh).problems
    assert problem.kind is ProblemKind.MISSING_BLOB


@pytest.mark.parametrize("pack", PACKS.values(), ids=PACKS.keys())
def test_a_full_disk_is_a_store_error_that_leaves_nothing_torn(
    store: DirectoryStore,
    fresh: DirectoryStore,
    manifest: Manifest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pack: Pack,
) -> None:
    path = pack(store, tmp_path)
    limit = 2000

    def full() -> int:
        import resource

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        with pytest.raises(StoreError) as caught:
            bring(path, fresh)
        assert isinstance(caught.value.__cause__, OSError)
        assert caught.value.__cause__.errno == errno.EFBIG
        return caught.value.exit_status

    big, files = make_entry(tmp_path / "scratch", 9, contents={"model.so": bytes(5000)})
    commit_entry(store, big, files)
    path = pack(store, tmp_path)
    assert wait_for(start_child(full)) == 3
    assert list(fresh.list("entries/")) == []
    assert nothing_unfinished(fresh)
    assert verify_store(fresh, ANYONE).ok
    assert bring(path, fresh).entries.whole == 5


def test_a_cache_that_cannot_be_written_is_a_store_error(
    store: DirectoryStore, manifest: Manifest, public_folder: Path
) -> None:
    shutil.copytree(store.root, public_folder / "source")

    def work() -> int:
        try:
            bring(public_folder / "source", DirectoryStore(Path("/neffbuild-no-such")))
        except StoreError as error:
            return error.exit_status
        return 0

    assert as_nobody(work) == 3


@pytest.mark.parametrize("name", ["directory", "tar, blobs last", "tar.gz"])
def test_killed_at_any_moment_leaves_whole_things_and_a_rerun_completes(
    store: DirectoryStore, tmp_path: Path, name: str
) -> None:
    entries = []
    for number in range(8):
        contents = {"model.so": os.urandom(300_000)}
        entries.append(commit_entry(store, *make_entry(tmp_path, number, contents=contents)))
    manifest = make_manifest(entries)
    write_pointer(store, manifest.config, write_manifest(store, manifest))
    path = PACKS[name](store, tmp_path)
    killed = 0
    for attempt in range(8):
        target = DirectoryStore(tmp_path / f"target{attempt}")

        def work(target: DirectoryStore = target) -> int:
            bring(path, target)
            return 0

        child = start_child(work)
        time.sleep(0.005 + attempt * 0.01)
        os.kill(child, signal.SIGKILL)
        killed += wait_for(child) == -signal.SIGKILL
        assert verify_store(target, ANYONE).problems == ()
        there = {one.name for one in target.list_blobs()}
        imported = bring(path, target)
        # What had come over before the kill is not copied again.
        assert imported.blobs_copied == len(manifest.blobs) - len(there)
        assert verify_store(target, ANYONE).entries_checked == 8
        assert read_pointer(target, manifest.config) == manifest.digest
    assert killed > 0


def test_two_imports_at_once_leave_one_whole_cache(
    store: DirectoryStore, fresh: DirectoryStore, manifest: Manifest, tmp_path: Path
) -> None:
    path = as_tar("w:gz", ".tar.gz")(store, tmp_path)

    def work(number: int) -> int:
        bring(path if number % 2 else store.root, fresh)
        return 0

    children = [start_child(lambda number=number: work(number)) for number in range(4)]
    assert [wait_for(child) for child in children] == [0] * 4
    assert read_hits(fresh, manifest.entries) == manifest.entries
    assert verify_store(fresh, ANYONE).ok


def test_progress_counts_bytes(store: DirectoryStore, tmp_path: Path, manifest: Manifest) -> None:
    for number, pack in enumerate(PACKS.values()):
        seen: list[tuple[int, int]] = []
        local = DirectoryStore(tmp_path / f"local{number}")
        with open_source(pack(store, tmp_path), local) as source:
            importing.import_artifacts(
                source, local, trust=ANYONE, progress=lambda *one, seen=seen: seen.append(one)
            )
        total = sum(manifest.blobs.values())
        assert seen[-1] == (total, total)
        assert len(seen) == len(manifest.blobs)


def test_zstd_without_its_package_names_the_extra(
    store: DirectoryStore,
    fresh: DirectoryStore,
    manifest: Manifest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = as_zstd(store, tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    with pytest.raises(ConfigError, match="zstandard is not installed") as caught:
        bring(path, fresh)
    assert "neffbuild[s3]" in (caught.value.hint or "")
    assert not fresh.root.exists()


def test_documents_of_an_archive_are_bounded_together(
    store: DirectoryStore,
    fresh: DirectoryStore,
    manifest: Manifest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(import_source, "MOST_DOCUMENT_BYTES", 3000)
    with pytest.raises(IntegrityError, match="too many for a document"):
        bring(as_tar("w", ".tar")(store, tmp_path), fresh)
    assert nothing_unfinished(fresh)
