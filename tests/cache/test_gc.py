"""Collecting a directory store: what goes, what stays, and pushes that happen meanwhile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from cache_samples import (
    ANYONE,
    X86_V4,
    fill,
    in_children,
    make_entry,
    make_manifest,
    start_child,
    wait_for,
)

from neffbuild.cache import files
from neffbuild.cache import lease as leases
from neffbuild.cache.catalog import commit_entry, entry_name, read_hits
from neffbuild.cache.directory import DirectoryStore
from neffbuild.cache.entry import Entry
from neffbuild.cache.gc import collect
from neffbuild.cache.gc_rules import DAY, Policy
from neffbuild.cache.lease import collecting, leased, read_claims
from neffbuild.cache.loaded import materialise
from neffbuild.cache.records import append_run, record_pull
from neffbuild.cache.tag import TagRef
from neffbuild.cache.transfer import pull, push
from neffbuild.cache.verify import verify_store, verify_tag
from neffbuild.config.errors import ConfigError, IntegrityError, StoreError

PROD = TagRef("llama", "prod")
EVERYTHING = Policy(older_than=0, max_size=0, untagged=True, grace=0)


def paths(store: DirectoryStore) -> set[Path]:
    return {path for path in store.root.rglob("*") if path.is_file()}


def age(path: Path, days: float) -> None:
    then = time.time() - days * DAY
    os.utime(path, (then, then))


def age_all(store: DirectoryStore, days: float) -> None:
    for path in paths(store):
        age(path, days)


def link_to_nothing(path: Path) -> None:
    path.symlink_to("nothing")


def blobs(store: DirectoryStore) -> set[str]:
    return {listed.name for listed in store.list_blobs()}


@pytest.fixture
def entries(store: DirectoryStore, tmp_path: Path) -> list[Entry]:
    return fill(store, tmp_path / "scratch", 4)


def test_orphans_and_leftovers_go_once_they_are_old_and_only_with_delete(
    store: DirectoryStore, entries: list[Entry], tmp_path: Path
) -> None:
    orphan = tmp_path / "orphan"
    orphan.write_bytes(b"nobody names me")
    from neffbuild.cache.canonical import digest_file

    digest = digest_file(orphan)
    store.put_blob(digest, orphan)
    temporary = store.root / "v1/tmp/123-cut-off"
    temporary.write_bytes(b"half")
    assert collect(store, Policy(), delete=True).decision.removals == ()
    for path in (store.blob_path(digest), temporary):
        age(path, 1)

    before = paths(store)
    shown = collect(store, Policy(), delete=False).decision
    assert paths(store) == before
    done = collect(store, Policy(), delete=True).decision
    assert done == shown
    assert [(one.kind, one.name) for one in done.removals] == [("blob", digest)]
    assert [one.name for one in done.leftovers] == ["tmp/123-cut-off"]
    assert done.bytes_freed == len(b"nobody names me") + 4
    assert before - paths(store) == {store.blob_path(digest), temporary}
    assert verify_store(store, ANYONE).ok


def test_nothing_that_a_tag_reaches_is_removed_whatever_the_policy(
    store: DirectoryStore, remote: DirectoryStore, entries: list[Entry], tmp_path: Path
) -> None:
    push(store, remote, make_manifest(entries[:2]), PROD, trust=ANYONE)
    push(store, remote, make_manifest(entries[1:3], platform=X86_V4), PROD, trust=ANYONE)
    push(store, remote, make_manifest(entries[3:]), None, trust=ANYONE)
    age_all(remote, 1000)
    decision = collect(remote, EVERYTHING, delete=True).decision
    assert {one.name for one in decision.removals if one.kind == "entry"} == {entries[3].key}
    assert decision.over_size == decision.bytes_kept > 0
    assert verify_store(remote, ANYONE).ok
    for platform in (None, X86_V4):
        fresh = DirectoryStore(tmp_path / f"fresh{platform is None}")
        manifest = make_manifest(entries[:2]) if platform is None else None
        wanted = platform or manifest.platform  # type: ignore[union-attr]
        assert len(pull(remote, fresh, PROD, platform=wanted, trust=ANYONE).manifest.entries) == 2
    assert len(list(remote.list("manifests/"))) == 2


def test_other_tags_go_with_what_only_they_reach(
    store: DirectoryStore, remote: DirectoryStore, entries: list[Entry]
) -> None:
    old = TagRef("llama", "old")
    push(store, remote, make_manifest(entries[:3]), old, trust=ANYONE)
    push(store, remote, make_manifest(entries[2:]), PROD, trust=ANYONE)
    policy = Policy(keep_tags=frozenset({"llama:prod"}), grace=0)
    age_all(remote, 1)
    decision = collect(remote, policy, delete=True).decision
    assert [one.name for one in decision.removals if one.kind == "tag"] == ["llama:old"]
    assert {one.name for one in decision.removals if one.kind == "entry"} == {
        entry.key for entry in entries[:2]
    }
    assert [one.name for one in remote.list("tags/")] == ["tags/llama/prod.json"]
    assert verify_store(remote, ANYONE).ok
    with pytest.raises(ConfigError, match="has no tag llama:other; it has: llama:prod"):
        collect(remote, Policy(keep_tags=frozenset({"llama:other"})), delete=True)


@pytest.mark.parametrize(
    ("what", "how"),
    [
        ("tag", "flip"),
        ("index", "flip"),
        ("index", "gone"),
        ("manifest", "flip"),
        ("manifest", "gone"),
        ("tag", "folder"),
        ("tag", "pipe"),
        ("tag", "link"),
        ("index", "folder"),
        ("manifest", "folder"),
    ],
)
def test_where_a_tag_leads_nowhere_nothing_is_removed(
    store: DirectoryStore, remote: DirectoryStore, entries: list[Entry], what: str, how: str
) -> None:
    pushed = push(store, remote, make_manifest(entries), PROD, trust=ANYONE)
    path = {
        "tag": remote.root / "v1" / PROD.document_name,
        "index": remote.root / f"v1/indexes/{pushed.index}.json",
        "manifest": remote.root / f"v1/manifests/{pushed.manifest}.json",
    }[what]
    data = path.read_bytes()
    if how == "gone":
        path.unlink()
    elif how in ("folder", "pipe", "link"):
        path.unlink()
        {"folder": Path.mkdir, "pipe": os.mkfifo, "link": link_to_nothing}[how](path)
    else:
        path.write_bytes(data[:20] + b"\0" + data[21:])
    age_all(remote, 1000)
    before = paths(remote)
    with pytest.raises(IntegrityError) as caught:
        collect(remote, EVERYTHING, delete=True)
    assert caught.value.exit_status == 4
    assert "nothing was removed" in (caught.value.hint or "")
    assert paths(remote) == before


def test_a_folder_in_an_entrys_place_goes_and_is_kept_for_who_looks(
    store: DirectoryStore, entries: list[Entry]
) -> None:
    path = store.root / "v1" / entry_name(entries[0].key)
    path.unlink()
    path.mkdir()
    (path / "notes.txt").write_text("somebody's")
    age(path, 1000)
    decision = collect(store, Policy(older_than=DAY, grace=0), delete=True).decision
    assert [one.name for one in decision.removals if one.kind == "entry"] == [entries[0].key]
    assert not path.exists()
    assert len(list((store.root / "v1/quarantine").rglob("notes.txt"))) == 1


def test_use_is_known_from_run_and_pull_records(
    store: DirectoryStore, remote: DirectoryStore, entries: list[Entry]
) -> None:
    pulled = push(store, store, make_manifest(entries[:1]), None, trust=ANYONE)
    age_all(store, 100)
    append_run(store, {"units": [{"key": entries[1].key, "outcome": "cached"}]})
    record_pull(store, pulled.manifest)
    decision = collect(store, Policy(older_than=30 * DAY), delete=True).decision
    assert {one.name for one in decision.removals if one.kind == "entry"} == {
        entry.key for entry in entries[2:]
    }
    assert read_hits(store, [entry.key for entry in entries]).keys() == {
        entry.key for entry in entries[:2]
    }
    assert verify_store(store, ANYONE).ok


def test_a_pull_keeps_what_it_fetched_in_use(
    store: DirectoryStore, remote: DirectoryStore, entries: list[Entry]
) -> None:
    push(store, remote, make_manifest(entries[:2]), PROD, trust=ANYONE)
    pull(remote, store, PROD, trust=ANYONE)
    age_all(store, 100)
    pull(remote, store, PROD, trust=ANYONE)
    collect(store, Policy(older_than=30 * DAY), delete=True)
    assert read_hits(store, [entry.key for entry in entries]).keys() == {
        entry.key for entry in entries[:2]
    }


def test_a_removed_entry_takes_its_layout_and_pointer_along(
    store: DirectoryStore, remote: DirectoryStore, entries: list[Entry]
) -> None:
    """Links of a layout would keep the space in use; a pointer would lead nowhere."""
    push(store, remote, make_manifest(entries[:1]), PROD, trust=ANYONE)
    pull(remote, store, PROD, trust=ANYONE)
    folder = materialise(store, entries[0])
    age_all(store, 100)
    collect(store, Policy(older_than=30 * DAY), delete=True)
    assert not folder.exists()
    assert list(store.list("configs/")) == []
    assert blobs(store) == set()


class TestWhilePushing:
    def test_a_push_keeps_the_old_orphan_that_it_found(
        self, store: DirectoryStore, remote: DirectoryStore, entries: list[Entry]
    ) -> None:
        """The push has seen the blob and not copied it; nothing names it yet when the collector comes."""
        for entry in entries:
            for digest in entry.blobs:
                remote.put_blob(digest, store.blob_path(digest))
        age_all(remote, 1)
        collected = threading.Event()
        create = DirectoryStore.create

        class Slow(DirectoryStore):
            def create(self, name: str, data: bytes) -> bool:
                if name.startswith("entries/") and not collected.is_set():
                    decision = collect(remote, EVERYTHING, delete=True).decision
                    assert [one for one in decision.removals if one.kind == "blob"] == []
                    collected.set()
                return create(self, name, data)

        pushed = push(store, Slow(remote.root), make_manifest(entries), PROD, trust=ANYONE)
        assert pushed.blobs_copied == 0
        assert collected.is_set()
        assert verify_tag(remote, PROD, ANYONE).ok

    def test_a_push_waits_for_a_collector_and_then_looks_anew(
        self, store: DirectoryStore, remote: DirectoryStore, entries: list[Entry]
    ) -> None:
        for digest in entries[0].blobs:
            remote.put_blob(digest, store.blob_path(digest))
        manifest = make_manifest(entries)
        copied: list[int] = []

        def run() -> None:
            copied.append(push(store, remote, manifest, PROD, trust=ANYONE).blobs_copied)

        pushing = threading.Thread(target=run)
        with collecting(remote):
            pushing.start()
            while not any(one.name.startswith("leases/use-") for one in remote.list("leases/")):
                time.sleep(0.01)
            time.sleep(0.2)
            assert copied == []
            # It had decided before the push began.
            remote.delete_blobs(list(entries[0].blobs))
        pushing.join(timeout=30)
        assert copied == [len(manifest.blobs)]
        assert verify_tag(remote, PROD, ANYONE).ok

    def test_a_push_gives_up_on_a_collector_that_does_not_end(
        self, store: DirectoryStore, remote: DirectoryStore
    ) -> None:
        with (
            collecting(remote),
            pytest.raises(StoreError, match=f"being collected by process {os.getpid()} on"),
            leased(remote, documents=(), blobs=(), wait=0.1),
        ):
            pass

    def test_pushes_and_collectors_at_once_leave_whole_tags(
        self, store: DirectoryStore, remote: DirectoryStore, entries: list[Entry]
    ) -> None:
        """Two builders keep moving tags while everything untagged is collected without any grace."""
        manifests = [make_manifest(entries[:2]), make_manifest(entries[1:])]

        def one(number: int) -> int:
            if number == 2:
                for _ in range(15):
                    try:
                        collect(remote, EVERYTHING, delete=True)
                    except IntegrityError:
                        return 1
                return 0
            for turn in range(6):
                tag = TagRef("llama", f"t{number}")
                push(store, remote, manifests[(number + turn) % 2], tag, trust=ANYONE)
            return 0

        assert in_children(3, one) == [0, 0, 0]
        assert verify_store(remote, ANYONE).problems == ()
        assert read_claims(remote).ended == ()


class TestLeases:
    def test_one_collector_at_a_time(self, store: DirectoryStore) -> None:
        with collecting(store), pytest.raises(StoreError, match="is being collected by process"):
            collect(store, Policy(), delete=True)
        collect(store, Policy(), delete=True)
        assert list(store.list("leases/")) == []

    def test_a_killed_holder_of_this_host_is_not_waited_for(self, store: DirectoryStore) -> None:
        def die() -> int:
            with collecting(store), leased_in(store):
                os.kill(os.getpid(), 9)
            return 0

        def leased_in(store: DirectoryStore) -> leases.Lease:
            return leases.Lease(store, "use", {"blobs": ["b" * 64]})

        assert wait_for(start_child(die)) == -9
        assert len(list(store.list("leases/"))) == 2
        began = time.monotonic()
        with leased(store, documents=(), blobs=()):
            assert time.monotonic() - began < 5
        claims = read_claims(store)
        assert (claims.blobs, len(claims.ended)) == (frozenset(), 2)
        collect(store, Policy(), delete=True)
        assert list(store.list("leases/")) == []

    def test_a_holder_that_nobody_has_waited_for_is_gone(self, store: DirectoryStore) -> None:
        def die() -> int:
            with leases.Lease(store, "use", {"blobs": ["b" * 64]}):
                os.kill(os.getpid(), 9)
            return 0

        child = start_child(die)
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # it stays, as a zombie
        assert Path(f"/proc/{child}").exists()
        assert not read_claims(store).writers
        assert wait_for(child) == -9

    @pytest.mark.parametrize("started", ["1", None])
    def test_another_process_of_the_same_number_is_not_the_holder(
        self, store: DirectoryStore, started: str | None
    ) -> None:
        with leases.Lease(store, "use", {"blobs": ["b" * 64]}) as lease:
            document = store.read(lease.name)
            assert document is not None
            content = json.loads(document.data)
            assert read_claims(store).writers
            content["holder"]["started"] = started
            store.replace(lease.name, json.dumps(content).encode(), document.version)
            # What began at another time is another; where nothing is said, the number has to do.
            assert read_claims(store).writers == (started is None)

    def test_numbers_mean_nothing_where_proc_is_of_other_processes(
        self, store: DirectoryStore
    ) -> None:
        """As with `unshare --pid` and /proc as it was: what is there under our number is another."""
        code = (
            "import sys; from pathlib import Path\n"
            "from neffbuild.cache.directory import DirectoryStore\n"
            "from neffbuild.cache.lease import Lease\n"
            "store = DirectoryStore(Path(sys.argv[1]))\n"
            "with Lease(store, 'use', {}) as lease: print(store.read(lease.name).data.decode())\n"
        )
        here = [sys.executable, "-c", code, str(store.root)]
        elsewhere = ["unshare", "--map-root-user", "--pid", "--fork", *here]
        if subprocess.run([*elsewhere[:4], "true"], capture_output=True, check=False).returncode:
            pytest.skip("no process namespaces here")
        said = [
            json.loads(subprocess.run(words, capture_output=True, check=True).stdout)["holder"]
            for words in (here, elsewhere)
        ]
        assert [one["processes"].startswith("unknown:") for one in said] == [False, True]

    def test_a_lease_from_elsewhere_counts_until_it_runs_out(
        self, store: DirectoryStore, entries: list[Entry], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        blob = next(iter(entries[0].blobs))
        with leased(store, documents=[entry_name(entries[0].key)], blobs=[blob]) as lease:
            monkeypatch.setattr(leases, "_processes", lambda: "another host's")
            age_all(store, 0.001)
            assert read_claims(store).blobs == {blob}
            decision = collect(store, EVERYTHING, delete=False).decision
            assert blob not in {one.name for one in decision.removals}
            age(store.root / "v1" / lease.name, 0.1)
            assert read_claims(store).blobs == frozenset()

    def test_a_holder_that_was_away_too_long_knows_it(
        self, store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with leased(store, documents=(), blobs=()) as lease:
            lease.require()
            now = time.monotonic()
            monkeypatch.setattr(time, "monotonic", lambda: now + 500)
            with pytest.raises(StoreError, match="could not be renewed in time"):
                lease.require()
            monkeypatch.undo()

    def test_a_lease_is_renewed_while_it_is_held(
        self, store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(leases._SECONDS, "use", 0.6)
        with leased(store, documents=(), blobs=["b" * 64]) as lease:
            path = store.root / "v1" / lease.name
            written = path.stat().st_mtime_ns
            deadline = time.monotonic() + 10
            while path.stat().st_mtime_ns == written:
                assert time.monotonic() < deadline
                time.sleep(0.02)
        assert not path.exists()


def test_a_commit_keeps_the_old_orphan_that_it_found(
    store: DirectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry, files = make_entry(tmp_path / "scratch", 1)
    for name, record in entry.files.items():
        store.put_blob(record.digest, files[name])
    age_all(store, 1)
    put_blob = DirectoryStore.put_blob

    def collect_after(self: DirectoryStore, digest: str, source: Path) -> None:
        put_blob(self, digest, source)
        collect(store, EVERYTHING, delete=True)

    monkeypatch.setattr(DirectoryStore, "put_blob", collect_after)
    commit_entry(store, entry, files)
    assert verify_store(store, ANYONE).ok
    assert read_hits(store, [entry.key])


@pytest.fixture(autouse=True)
def _quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "_LOOK_SECONDS", 0.02)


@pytest.mark.parametrize("when", ["write_synced", "copy_checked"])
def test_what_a_killed_push_was_writing_is_no_hindrance_and_goes_once_it_is_old(
    store: DirectoryStore, remote: DirectoryStore, entries: list[Entry], when: str
) -> None:
    manifest = make_manifest(entries)

    def killed() -> int:
        work = getattr(files, when)

        def die(*arguments: object) -> None:
            work(*arguments)
            os.kill(os.getpid(), 9)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(files, when, die)
            push(store, remote, manifest, PROD, trust=ANYONE)
        return 0

    assert wait_for(start_child(killed)) == -9
    unfinished = set((remote.root / "v1/tmp").iterdir())
    assert len(unfinished) >= 1
    assert verify_store(remote, ANYONE).problems == ()
    push(store, remote, manifest, PROD, trust=ANYONE)
    assert verify_tag(remote, PROD, ANYONE).ok

    # Others may be writing in the same folder: what is young stays.
    collect(remote, Policy(grace=0), delete=True)
    assert set((remote.root / "v1/tmp").iterdir()) == unfinished
    for path in unfinished:
        age(path, days=0.1)
    shown = collect(remote, Policy(), delete=False).decision.leftovers
    assert {one.name for one in shown} == {f"tmp/{path.name}" for path in unfinished}
    collect(remote, Policy(), delete=True)
    assert list((remote.root / "v1/tmp").iterdir()) == []
    assert list(remote.list("leases/")) == []
    assert verify_tag(remote, PROD, ANYONE).ok
