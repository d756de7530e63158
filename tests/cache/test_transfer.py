from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from cache_samples import (
    ANYONE,
    X86_V3,
    X86_V4,
    fill,
    in_children,
    make_entry,
    make_manifest,
    start_child,
    wait_for,
)

from neffbuild.cache.catalog import (
    Hit,
    commit_entry,
    entry_name,
    read_entries,
    read_index,
    read_manifest,
)
from neffbuild.cache.directory import DirectoryStore
from neffbuild.cache.entry import Entry
from neffbuild.cache.loaded import materialise
from neffbuild.cache.manifest import Manifest
from neffbuild.cache.records import read_pointer
from neffbuild.cache.tag import TagRef, Trust, resolve_tag
from neffbuild.cache.transfer import pull, push
from neffbuild.cache.verify import verify_manifest, verify_store
from neffbuild.config.errors import IntegrityError, StoreError, UnitsIncomplete

PROD = TagRef("llama", "prod")


@pytest.fixture
def entries(store: DirectoryStore, tmp_path: Path) -> list[Entry]:
    return fill(store, tmp_path / "scratch", 4)


@pytest.fixture
def manifest(entries: list[Entry]) -> Manifest:
    return make_manifest(entries)


@pytest.fixture
def fresh(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "fresh")


def blob_count(store: DirectoryStore) -> int:
    return sum(path.is_file() for path in (store.root / "v1/blobs").rglob("*"))


def test_pushed_manifest_is_pulled_whole_into_an_empty_store(
    store: DirectoryStore, remote: DirectoryStore, fresh: DirectoryStore, manifest: Manifest
) -> None:
    pushed = push(store, remote, manifest, PROD, trust=ANYONE)
    assert pushed.manifest == manifest.digest
    assert pushed.blobs_copied == len(manifest.blobs)
    assert pushed.bytes_copied == sum(manifest.blobs.values())
    assert pushed.statement is not None
    assert pushed.statement.sequence == 1
    assert verify_store(remote, ANYONE).ok

    pulled = pull(remote, fresh, PROD, platform=X86_V3, trust=ANYONE)
    assert pulled.manifest == manifest
    assert pulled.digest == manifest.digest
    assert (pulled.blobs_copied, pulled.bytes_copied) == (
        pushed.blobs_copied,
        pushed.bytes_copied,
    )
    assert read_manifest(fresh, pulled.digest) == manifest
    assert read_pointer(fresh, manifest.config) == pulled.digest
    assert read_entries(fresh, manifest.entries) == {
        key: Hit(entry) for key, entry in manifest.entries.items()
    }
    assert verify_manifest(fresh, manifest).ok
    for entry in manifest.entries.values():
        folder = materialise(fresh, entry)
        assert (folder / "model.so").read_bytes() == store.blob_path(
            entry.files["model.so"].digest
        ).read_bytes()


def test_only_what_is_missing_is_copied(
    store: DirectoryStore,
    remote: DirectoryStore,
    fresh: DirectoryStore,
    manifest: Manifest,
    tmp_path: Path,
) -> None:
    push(store, remote, manifest, PROD, trust=ANYONE)
    again = push(store, remote, manifest, PROD, trust=ANYONE)
    assert (again.blobs_copied, again.bytes_copied) == (0, 0)
    assert again.statement is not None
    assert again.statement.sequence == 2
    pull(remote, fresh, PROD, platform=X86_V3, trust=ANYONE)

    entry, files = make_entry(tmp_path / "scratch", 9)
    commit_entry(store, entry, files)
    more = make_manifest([*manifest.entries.values(), entry])
    assert push(store, remote, more, PROD, trust=ANYONE).blobs_copied == 2
    progress: list[tuple[int, int]] = []
    one_at_a_time = threading.Lock()

    def note(done: int, total: int) -> None:
        assert one_at_a_time.acquire(blocking=False)
        time.sleep(0.02)
        progress.append((done, total))
        one_at_a_time.release()

    pulled = pull(remote, fresh, PROD, platform=X86_V3, trust=ANYONE, progress=note)
    assert pulled.blobs_copied == 2
    total = sum(entry.blobs.values())
    assert [one[1] for one in progress] == [total, total]
    assert sorted(one[0] for one in progress) == [one[0] for one in progress]
    assert progress[-1] == (total, total)


def test_writes_come_in_the_order_that_keeps_visible_things_whole(
    store: DirectoryStore,
    remote: DirectoryStore,
    manifest: Manifest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written: list[str] = []
    create, put_blob = DirectoryStore.create, DirectoryStore.put_blob

    def record_create(self: DirectoryStore, name: str, data: bytes) -> bool:
        if self is remote:
            written.append(name.split("/")[0])
        return create(self, name, data)

    def record_blob(self: DirectoryStore, digest: str, source: Path) -> None:
        put_blob(self, digest, source)
        written.append("blobs")

    monkeypatch.setattr(DirectoryStore, "create", record_create)
    monkeypatch.setattr(DirectoryStore, "put_blob", record_blob)
    push(store, remote, manifest, PROD, trust=ANYONE)
    order = ["leases", "blobs", "entries", "manifests", "indexes", "tags"]
    assert sorted(written, key=order.index) == written
    assert set(written) == set(order)


def test_partial_manifest_is_refused_unless_allowed(
    store: DirectoryStore, remote: DirectoryStore, fresh: DirectoryStore, entries: list[Entry]
) -> None:
    manifest = make_manifest(entries, lacking=2)
    with pytest.raises(UnitsIncomplete) as caught:
        push(store, remote, manifest, PROD, trust=ANYONE)
    assert "decode_b5_ctx4096, decode_b6_ctx4096" in caught.value.message
    assert caught.value.exit_status == 1
    assert not remote.root.exists()
    push(store, remote, manifest, PROD, trust=ANYONE, allow_partial=True)
    with pytest.raises(UnitsIncomplete, match="decode_b5_ctx4096, decode_b6_ctx4096"):
        pull(remote, fresh, PROD, trust=ANYONE)
    assert not fresh.root.exists()
    pulled = pull(remote, fresh, PROD, trust=ANYONE, allow_partial=True)
    assert len(pulled.manifest.missing) == 2


def test_without_a_tag_the_index_or_manifest_digest_leads_there(
    store: DirectoryStore, remote: DirectoryStore, fresh: DirectoryStore, manifest: Manifest
) -> None:
    pushed = push(store, remote, manifest, None, trust=ANYONE)
    assert pushed.statement is None
    assert list(remote.list("tags/")) == []
    for digest in (pushed.index, pushed.manifest):
        assert pull(remote, fresh, digest, trust=ANYONE).manifest == manifest
    with pytest.raises(StoreError, match="no index and no manifest"):
        pull(remote, fresh, "0" * 64, trust=ANYONE)
    with pytest.raises(IntegrityError, match="malformed"):
        pull(remote, fresh, "../../etc/passwd", trust=ANYONE)


def test_platform_selects_and_a_miss_lists_what_is_there(
    store: DirectoryStore, remote: DirectoryStore, fresh: DirectoryStore, entries: list[Entry]
) -> None:
    v3, v4 = make_manifest(entries), make_manifest(entries[:2], platform=X86_V4)
    push(store, remote, v3, PROD, trust=ANYONE)
    push(store, remote, v4, PROD, trust=ANYONE)
    assert pull(remote, fresh, PROD, platform=X86_V3, trust=ANYONE).manifest == v3
    assert pull(remote, fresh, PROD, platform=X86_V4, trust=ANYONE).manifest == v4
    both = "inductor, aoti, x86-64-v3, torch 2.13.0; inductor, aoti, x86-64-v4, torch 2.13.0"
    with pytest.raises(StoreError, match=both):
        pull(remote, fresh, PROD, trust=ANYONE)
    with pytest.raises(StoreError, match=both) as caught:
        pull(remote, fresh, PROD, platform={**X86_V3, "target": "trn2"}, trust=ANYONE)
    assert "no artifacts for inductor, aoti, trn2" in caught.value.message


def test_two_platforms_pushed_at_once_to_one_tag_both_end_in_its_index(
    store: DirectoryStore, remote: DirectoryStore, entries: list[Entry]
) -> None:
    manifests = [make_manifest(entries, platform=X86_V3), make_manifest(entries, platform=X86_V4)]

    def one(number: int) -> int:
        for _ in range(10):
            push(store, remote, manifests[number], PROD, trust=ANYONE)
        return 0

    assert in_children(2, one) == [0, 0]
    statement = resolve_tag(remote, PROD, ANYONE)
    assert statement.sequence == 20
    index = read_index(remote, statement.index)
    assert index is not None
    assert index.manifest_for(X86_V3) == manifests[0].digest
    assert index.manifest_for(X86_V4) == manifests[1].digest


def test_builders_pushing_overlapping_sets_at_once_leave_one_entry_per_key_and_valid_manifests(
    remote: DirectoryStore, tmp_path: Path
) -> None:
    """Both compiled the shared units to different bytes; each manifest embeds its own."""

    def build_and_push(number: int) -> int:
        local = DirectoryStore(tmp_path / f"local{number}")
        own = []
        for unit in range(number * 2, number * 2 + 4):
            contents = {"model.so": b"builder %d unit %d" % (number, unit)}
            made = make_entry(tmp_path / f"scratch{number}", unit, contents=contents)
            own.append(commit_entry(local, *made))
        push(local, remote, make_manifest(own), TagRef("llama", f"t{number}"), trust=ANYONE)
        return 0

    assert in_children(4, build_and_push) == [0] * 4
    found = verify_store(remote, ANYONE)
    assert found.problems == ()
    assert len(list(remote.list("entries/"))) == 10
    for number in range(4):
        fresh = DirectoryStore(tmp_path / f"fresh{number}")
        pulled = pull(remote, fresh, TagRef("llama", f"t{number}"), trust=ANYONE)
        assert verify_manifest(fresh, pulled.manifest).ok


class TestDamage:
    @pytest.mark.parametrize("what", ["blob", "manifest", "index", "tag"])
    @pytest.mark.parametrize("how", ["flip", "truncate", "empty", "gone"])
    def test_damaged_remote_is_refused_and_nothing_becomes_visible(
        self,
        store: DirectoryStore,
        remote: DirectoryStore,
        fresh: DirectoryStore,
        manifest: Manifest,
        what: str,
        how: str,
    ) -> None:
        pushed = push(store, remote, manifest, PROD, trust=ANYONE)
        path = {
            "blob": remote.blob_path(sorted(manifest.blobs)[0]),
            "manifest": remote.root / f"v1/manifests/{pushed.manifest}.json",
            "index": remote.root / f"v1/indexes/{pushed.index}.json",
            "tag": remote.root / "v1" / PROD.document_name,
        }[what]
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        if how == "gone":
            path.unlink()
        else:
            path.write_bytes({"flip": data, "truncate": data[:-3], "empty": b""}[how])

        # Without a signature a flip inside a tag's payload can only be seen as some other mistake.
        expected: Any = StoreError if (what, how) == ("tag", "gone") else IntegrityError
        with pytest.raises(expected) as caught:
            pull(remote, fresh, PROD, platform=X86_V3, trust=ANYONE)
        assert caught.value.exit_status in (3, 4)
        for folder in ("entries/", "manifests/", "configs/", "seen/"):
            assert list(fresh.list(folder)) == []
        tmp = fresh.root / "v1/tmp"
        assert not tmp.exists() or list(tmp.iterdir()) == []

        # Pushing again heals whatever it was. A damaged blob of the right size is only found by
        # reading it, so it has to be taken out of service first; a damaged tag by hand, because which
        # other platforms it named is lost with it.
        remote.quarantine("damaged", {}, manifest.blobs)
        if what == "tag" and how != "gone":
            with pytest.raises(IntegrityError, match=PROD.document_name):
                push(store, remote, manifest, PROD, trust=ANYONE)
            path.unlink()
        push(store, remote, manifest, PROD, trust=ANYONE)
        assert pull(remote, fresh, PROD, platform=X86_V3, trust=ANYONE).manifest == manifest
        assert verify_store(remote, ANYONE).ok

    def test_swapped_blobs_are_refused(
        self,
        store: DirectoryStore,
        remote: DirectoryStore,
        fresh: DirectoryStore,
        tmp_path: Path,
    ) -> None:
        made = [
            make_entry(tmp_path, number, contents={"model.so": b"same length %d" % number})
            for number in range(2)
        ]
        own = [commit_entry(store, *one) for one in made]
        push(store, remote, make_manifest(own), PROD, trust=ANYONE)
        first, second = (remote.blob_path(entry.files["model.so"].digest) for entry in own)
        content = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(content)
        with pytest.raises(IntegrityError, match="bad_digest"):
            pull(remote, fresh, PROD, trust=ANYONE)

    def test_damaged_local_blob_is_not_pushed(
        self, store: DirectoryStore, remote: DirectoryStore, manifest: Manifest
    ) -> None:
        path = store.blob_path(sorted(manifest.blobs)[0])
        path.write_bytes(bytes(len(path.read_bytes())))
        with pytest.raises(IntegrityError, match="bad_digest"):
            push(store, remote, manifest, PROD, trust=ANYONE)
        assert list(remote.list("")) == []

    def test_broken_remote_entry_is_replaced_by_the_next_push(
        self, store: DirectoryStore, remote: DirectoryStore, manifest: Manifest
    ) -> None:
        push(store, remote, manifest, PROD, trust=ANYONE)
        key = min(manifest.entries)
        path = remote.root / "v1" / entry_name(key)
        path.write_bytes(path.read_bytes()[:100])
        push(store, remote, manifest, PROD, trust=ANYONE)
        assert verify_store(remote, ANYONE).ok
        assert read_entries(remote, [key]) == {key: Hit(manifest.entries[key])}

    def test_rollback_is_refused_where_a_newer_tag_was_seen(
        self,
        store: DirectoryStore,
        remote: DirectoryStore,
        fresh: DirectoryStore,
        manifest: Manifest,
        entries: list[Entry],
        tmp_path: Path,
    ) -> None:
        push(store, remote, make_manifest(entries[:2]), PROD, trust=ANYONE)
        tag = remote.root / "v1" / PROD.document_name
        old = tag.read_bytes()
        push(store, remote, manifest, PROD, trust=ANYONE)
        pull(remote, fresh, PROD, trust=ANYONE)
        tag.write_bytes(old)
        with pytest.raises(IntegrityError, match="sequence 1; 2"):
            pull(remote, fresh, PROD, trust=ANYONE)
        with pytest.raises(IntegrityError, match="sequence 1; 2"):  # the pusher has seen it too
            push(store, remote, manifest, PROD, trust=ANYONE)
        stranger = DirectoryStore(tmp_path / "stranger")
        with pytest.raises(IntegrityError, match="sequence 1; 2"):
            pull(remote, stranger, PROD, trust=Trust(min_sequence=2))
        assert len(pull(remote, stranger, PROD, trust=ANYONE).manifest.entries) == 2

    def test_required_signature_is_required(
        self,
        store: DirectoryStore,
        remote: DirectoryStore,
        fresh: DirectoryStore,
        manifest: Manifest,
    ) -> None:
        push(store, remote, manifest, PROD, trust=ANYONE)
        with pytest.raises(IntegrityError, match="not signed") as caught:
            pull(remote, fresh, PROD, trust=Trust(require_signature=True))
        assert caught.value.exit_status == 4
        assert not fresh.root.exists()


def test_blobs_are_copied_in_parallel_and_the_first_error_ends_it(
    store: DirectoryStore,
    remote: DirectoryStore,
    manifest: Manifest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    together = threading.Barrier(4)
    put_blob = DirectoryStore.put_blob

    def meet(self: DirectoryStore, digest: str, source: Path) -> None:
        together.wait(timeout=10)
        put_blob(self, digest, source)

    monkeypatch.setattr(DirectoryStore, "put_blob", meet)
    push(store, remote, manifest, PROD, trust=ANYONE, workers=4)

    asked: list[str] = []

    def refuse(self: DirectoryStore, digest: str, source: Path) -> None:
        asked.append(digest)
        raise StoreError("403 Forbidden")

    monkeypatch.setattr(DirectoryStore, "put_blob", refuse)
    with pytest.raises(StoreError, match="403"):
        push(store, DirectoryStore(store.root / "other"), manifest, PROD, trust=ANYONE, workers=1)
    assert len(asked) < len(manifest.blobs)


def test_manifest_with_paths_that_escape_is_refused(
    store: DirectoryStore, remote: DirectoryStore, fresh: DirectoryStore, manifest: Manifest
) -> None:
    document = json.loads(manifest.to_json())
    for entry in document["entries"].values():
        entry["files"] = {"../../../escaped": next(iter(entry["files"].values()))}
    from neffbuild.cache.canonical import canonical_json, digest_bytes

    data = canonical_json(document)
    remote.create(f"manifests/{digest_bytes(data)}.json", data)
    with pytest.raises(IntegrityError, match="unsafe file"):
        pull(remote, fresh, digest_bytes(data), trust=ANYONE)


@pytest.mark.parametrize("direction", ["push", "pull"])
def test_transfer_killed_at_any_moment_leaves_whole_things_and_a_rerun_completes(
    store: DirectoryStore, remote: DirectoryStore, tmp_path: Path, direction: str
) -> None:
    contents = [{"model.so": os.urandom(100_000)} for _ in range(8)]
    made = [
        make_entry(tmp_path / "scratch", number, contents=one)
        for number, one in enumerate(contents)
    ]
    manifest = make_manifest([commit_entry(store, *one) for one in made])
    if direction == "pull":
        push(store, remote, manifest, PROD, trust=ANYONE)
    killed = 0
    for attempt in range(20):
        target = DirectoryStore(tmp_path / f"target{attempt}")

        def transfer(target: DirectoryStore = target) -> int:
            if direction == "push":
                push(store, target, manifest, PROD, trust=ANYONE)
            else:
                pull(remote, target, PROD, trust=ANYONE)
            return 0

        child = start_child(transfer)
        time.sleep(0.003 + attempt * 0.002)
        os.kill(child, signal.SIGKILL)
        killed += wait_for(child) == -signal.SIGKILL
        assert verify_store(target, ANYONE).problems == ()
        assert wait_for(start_child(transfer)) == 0
        found = verify_store(target, ANYONE)
        assert found.ok
        assert found.entries_checked == 8
    assert killed > 0
