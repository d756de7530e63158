from __future__ import annotations

import errno
import os
import resource
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from cache_samples import as_nobody, in_children, start_child, wait_for, write_files
from hypothesis import given
from hypothesis import strategies as st

from neffbuild.cache.canonical import digest_bytes
from neffbuild.cache.directory import DirectoryStore
from neffbuild.cache.problem import ProblemKind
from neffbuild.config.errors import IntegrityError, NeffbuildError, StoreError


def full_folder(path: Path) -> None:
    path.mkdir(parents=True)
    (path / "notes.txt").write_text("somebody's")


def a_socket(path: Path) -> None:
    folder = os.open(path.parent, os.O_PATH)
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(f"/proc/self/fd/{folder}/{path.name}")  # short: a socket's path has a limit
    os.close(folder)


PLACES = [full_folder, Path.mkdir, os.mkfifo, a_socket, lambda path: path.symlink_to("/etc/passwd")]
CONTENT = b"a compiled program" * 1000
DIGEST = digest_bytes(CONTENT)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_files(tmp_path, {"source": CONTENT})["source"]


def leftovers(store: DirectoryStore) -> list[Path]:
    return list((store.root / "v1" / "tmp").iterdir())


class TestDocuments:
    def test_created_document_reads_back_and_is_created_once(self, store: DirectoryStore) -> None:
        assert store.read("runs/a.json") is None
        assert store.create("runs/a.json", b"1")
        assert not store.create("runs/a.json", b"2")
        document = store.read("runs/a.json")
        assert document is not None
        assert document.data == b"1"
        assert (store.root / "v1/runs/a.json").read_bytes() == b"1"
        assert leftovers(store) == []

    def test_replace_compares_with_what_was_read(self, store: DirectoryStore) -> None:
        store.create("runs/a.json", b"1")
        first = store.read("runs/a.json")
        assert first is not None
        assert store.replace("runs/a.json", b"2", first.version)
        assert not store.replace("runs/a.json", b"3", first.version)
        second = store.read("runs/a.json")
        assert second is not None
        assert second.data == b"2"
        store.delete("runs/a.json")
        store.delete("runs/a.json")
        assert not store.replace("runs/a.json", b"3", second.version)
        assert store.read("runs/a.json") is None
        assert leftovers(store) == []

    def test_one_of_many_creators_wins_and_the_document_is_never_torn(
        self, store: DirectoryStore
    ) -> None:
        def create(number: int) -> int:
            return int(store.create("runs/a.json", b"%d" % (number % 10) * 100_000))

        assert sum(in_children(32, create)) == 1
        document = store.read("runs/a.json")
        assert document is not None
        assert len(set(document.data)) == 1
        assert len(document.data) == 100_000

    def test_one_of_many_replacers_of_one_version_wins(self, store: DirectoryStore) -> None:
        store.create("runs/a.json", b"0")
        version = store.read("runs/a.json").version

        def replace(number: int) -> int:
            return int(store.replace("runs/a.json", b"by %d" % number, version))

        assert sum(in_children(16, replace)) == 1

    @pytest.mark.parametrize("refusal", [errno.EPERM, errno.ENOTSUP, errno.EMLINK])
    def test_create_without_hard_links(
        self, store: DirectoryStore, monkeypatch: pytest.MonkeyPatch, refusal: int
    ) -> None:
        def no_link(*_: object, **__: object) -> None:
            raise OSError(refusal, os.strerror(refusal))

        monkeypatch.setattr(os, "link", no_link)
        assert sum(in_children(16, lambda number: int(store.create("a.json", b"%d" % number)))) == 1
        assert not store.create("a.json", b"late")
        assert leftovers(store) == []

    def test_a_repeated_link_request_of_a_network_file_system_is_a_success(
        self, store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        link = os.link

        def link_twice(source: str, target: str) -> None:
            link(source, target)
            link(source, target)

        monkeypatch.setattr(os, "link", link_twice)
        assert store.create("a.json", b"1")

    @pytest.mark.parametrize("size", [(1 << 16) - 1, 1 << 16, (1 << 16) + 1, (1 << 21) + 5])
    def test_documents_of_any_size_are_read_whole(self, store: DirectoryStore, size: int) -> None:
        data = os.urandom(size)
        store.create("manifests/a.json", data)
        document = store.read("manifests/a.json")
        assert document is not None
        assert document.data == data

    def test_many_documents_are_read_at_once(self, store: DirectoryStore) -> None:
        for number in range(20):
            store.create(f"entries/{number % 3}0/{number}.json", b"%d" % number)
        names = [f"entries/{number % 3}0/{number}.json" for number in range(40)]
        found = {name: document.data for name, document in store.read_many(names)}
        assert found == {
            f"entries/{number % 3}0/{number}.json": b"%d" % number for number in range(20)
        }
        assert dict(DirectoryStore(store.root / "nowhere").read_many(names)) == {}

    def test_listing_gives_documents_by_prefix_and_nothing_else(
        self, store: DirectoryStore, source: Path
    ) -> None:
        names = ["tags/a/x.json", "tags/a/y.json", "tags/ab/z.json", "entries/00/k.json"]
        for name in names:
            store.create(name, name.encode())
        store.put_blob(DIGEST, source)
        assert sorted(one.name for one in store.list("")) == sorted(names)
        assert sorted(one.name for one in store.list("tags/a")) == names[:3]
        assert sorted(one.name for one in store.list("tags/a/")) == names[:2]
        assert list(store.list("runs/")) == []
        [listed] = store.list("entries/00/k")
        assert listed.size == len("entries/00/k.json")
        assert abs(listed.modified - (store.root / "v1/entries/00/k.json").stat().st_mtime) < 1

    def test_documents_survive_power_failure_by_sync_before_their_name(
        self, store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The order of calls is the point: content, then name, then the folder that holds it."""
        calls: list[str] = []
        fsync, link = os.fsync, os.link

        def record_sync(descriptor: int) -> None:
            path = Path(f"/proc/self/fd/{descriptor}").readlink()
            calls.append(f"sync {path.relative_to(store.root)}")
            fsync(descriptor)

        def record_link(source: Path, target: Path) -> None:
            calls.append("link")
            link(source, target)

        store.create("runs/first.json", b"1")
        monkeypatch.setattr(os, "fsync", record_sync)
        monkeypatch.setattr(os, "link", record_link)
        store.create("runs/a.json", b"1")
        assert len(calls) == 3
        assert calls[0].startswith("sync v1/tmp/")
        assert calls[1:] == ["link", "sync v1/runs"]


class TestNames:
    @pytest.mark.parametrize(
        "name",
        ["", "/etc/passwd", "../x", "a/../x", "a//b", "a/", ".hidden", "a/.b", "a\0b", "a b", "ä"],
    )
    def test_names_that_could_leave_the_store_are_refused(
        self, store: DirectoryStore, name: str
    ) -> None:
        for refused in (
            lambda: store.read(name),
            lambda: list(store.read_many([name])),
            lambda: store.create(name, b""),
            lambda: store.replace(name, b"", ""),
            lambda: store.delete(name),
        ):
            with pytest.raises(StoreError, match="not a document name"):
                refused()

    @pytest.mark.parametrize("digest", ["", "../../x", "A" * 64, "0" * 63, "0" * 64 + "\n"])
    def test_malformed_digests_are_refused(
        self, store: DirectoryStore, digest: str, source: Path, tmp_path: Path
    ) -> None:
        for refused in (
            lambda: store.put_blob(digest, source),
            lambda: store.fetch_blob(digest, 1, tmp_path / "out"),
            lambda: store.check_blob(digest, 1),
        ):
            with pytest.raises(IntegrityError, match="malformed"):
                refused()

    @given(name=st.text(max_size=40))
    def test_any_name_is_refused_or_stays_below_the_layout(self, name: str) -> None:
        store = DirectoryStore(Path("/nowhere/store"))
        try:
            assert store.read(name) is None
        except NeffbuildError:
            return
        path = os.path.normpath(f"/nowhere/store/v1/{name}")
        assert path.startswith("/nowhere/store/v1/")

    def test_links_pipes_and_folders_in_a_documents_place_are_damage_and_never_followed(
        self, store: DirectoryStore, tmp_path: Path
    ) -> None:
        store.create("runs/a.json", b"1")
        folder = store.root / "v1/runs"
        (tmp_path / "secret").write_bytes(b"secret")
        (folder / "link.json").symlink_to(tmp_path / "secret")
        os.mkfifo(folder / "pipe.json")
        (folder / "folder.json").mkdir()
        for name in ("link", "pipe", "folder"):
            document = store.read(f"runs/{name}.json")
            assert document is not None
            assert document.data == b""
        link = store.read("runs/link.json")
        assert link is not None
        assert store.replace("runs/link.json", b"2", link.version)
        assert (tmp_path / "secret").read_bytes() == b"secret"
        assert (folder / "link.json").read_bytes() == b"2"
        assert not (folder / "link.json").is_symlink()

    @pytest.mark.parametrize("place", PLACES)
    def test_whatever_has_a_documents_name_is_listed_and_makes_way(
        self, store: DirectoryStore, place: Callable[[Path], object]
    ) -> None:
        store.create("tags/a.json/x.json", b"1")  # a folder by its place, whatever its name
        path = store.root / "v1/tags/a.json/v1.json"
        place(path)
        names = ["tags/a.json/v1.json", "tags/a.json/x.json"]
        assert sorted(one.name for one in store.list("tags/")) == names
        assert [one.name for one in store.list("tags/a.json/v")] == names[:1]
        assert not store.create(names[0], b"2")
        damaged = store.read(names[0])
        assert damaged is not None
        assert damaged.data == b""
        assert store.replace(names[0], b"2", damaged.version)
        assert path.read_bytes() == b"2"

        path.unlink()
        place(path)
        store.quarantine("t", {names[0]: damaged.version}, {})
        assert store.read(names[0]) is None
        place(path)
        store.delete(names[0])
        assert store.read(names[0]) is None

    def test_a_folder_in_the_way_is_kept_with_what_is_in_it(
        self, store: DirectoryStore, source: Path
    ) -> None:
        path = store.root / "v1/runs/a.json"
        for work in (
            lambda: store.replace("runs/a.json", b"2", digest_bytes(b"")),
            lambda: store.delete("runs/a.json"),
        ):
            path.unlink(missing_ok=True)
            full_folder(path)
            work()
            assert not path.is_dir()
        blob = store.blob_path(DIGEST)
        full_folder(blob)
        store.put_blob(DIGEST, source)
        assert store.check_blob(DIGEST, len(CONTENT)) is None
        kept = sorted((store.root / "v1/quarantine").rglob("notes.txt"))
        assert [one.parent.name for one in kept] == [DIGEST, "a.json", "a.json"]
        assert leftovers(store) == []

    def test_a_pipe_that_somebody_writes_to_is_not_read(self, store: DirectoryStore) -> None:
        store.create("runs/a.json", b"1")
        path = store.root / "v1/runs/pipe.json"
        os.mkfifo(path)
        descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        try:
            os.write(descriptor, b"{}")
            document = store.read("runs/pipe.json")
            assert document is not None
            assert document.data == b""
            assert os.read(descriptor, 10) == b"{}"
        finally:
            os.close(descriptor)

    @pytest.mark.parametrize("place", [Path.touch, lambda path: path.symlink_to("gone"), os.mkfifo])
    def test_something_else_in_a_folders_place_is_no_empty_listing(
        self, store: DirectoryStore, place: Callable[[Path], object]
    ) -> None:
        store.create("runs/a.json", b"1")
        place(store.root / "v1/tags")
        with pytest.raises(StoreError, match=r"cannot list .*/v1/tags.*Not a directory"):
            list(store.list("tags/"))


class TestBlobs:
    def test_blob_round_trip(self, store: DirectoryStore, source: Path, tmp_path: Path) -> None:
        assert store.present_blobs({DIGEST: len(CONTENT)}) == set()
        store.put_blob(DIGEST, source)
        store.put_blob(DIGEST, source)
        assert store.present_blobs({DIGEST: len(CONTENT), "0" * 64: 1}) == {DIGEST}
        assert store.present_blobs({DIGEST: len(CONTENT) + 1}) == set()
        assert store.check_blob(DIGEST, len(CONTENT)) is None
        store.fetch_blob(DIGEST, len(CONTENT), tmp_path / "out")
        assert (tmp_path / "out").read_bytes() == CONTENT
        assert store.blob_path(DIGEST).read_bytes() == CONTENT
        assert store.blob_path(DIGEST).parent == store.root / "v1/blobs/sha256" / DIGEST[:2]
        assert leftovers(store) == []

    def test_bytes_that_are_not_the_digests_are_not_stored(
        self, store: DirectoryStore, source: Path
    ) -> None:
        with pytest.raises(IntegrityError, match="bad_digest"):
            store.put_blob("0" * 64, source)
        assert not store.blob_path("0" * 64).exists()
        assert leftovers(store) == []

    @pytest.mark.parametrize(
        ("damage", "kind"),
        [
            (CONTENT[:-1], ProblemKind.BAD_SIZE),
            (b"", ProblemKind.BAD_SIZE),
            (CONTENT + b"x", ProblemKind.BAD_SIZE),
            (bytes([CONTENT[0] ^ 1]) + CONTENT[1:], ProblemKind.BAD_DIGEST),
            (None, ProblemKind.MISSING_BLOB),
        ],
    )
    def test_damaged_blob_is_never_handed_out_and_is_replaced_by_the_next_put(
        self,
        store: DirectoryStore,
        source: Path,
        tmp_path: Path,
        damage: bytes | None,
        kind: ProblemKind,
    ) -> None:
        store.put_blob(DIGEST, source)
        path = store.blob_path(DIGEST)
        if damage is None:
            path.unlink()
        else:
            path.write_bytes(damage)
        assert store.check_blob(DIGEST, len(CONTENT)) is kind
        with pytest.raises(IntegrityError, match=kind.value):
            store.fetch_blob(DIGEST, len(CONTENT), tmp_path / "out")
        assert not (tmp_path / "out").exists()
        store.put_blob(DIGEST, source)
        assert store.check_blob(DIGEST, len(CONTENT)) is None

    def test_link_or_pipe_in_a_blobs_place_is_no_blob(
        self, store: DirectoryStore, source: Path, tmp_path: Path
    ) -> None:
        path = store.blob_path(DIGEST)
        path.parent.mkdir(parents=True)
        path.symlink_to(source)
        assert store.present_blobs({DIGEST: path.lstat().st_size}) == set()
        assert store.check_blob(DIGEST, len(CONTENT)) is ProblemKind.MISSING_BLOB
        path.unlink()
        os.mkfifo(path)
        assert store.check_blob(DIGEST, len(CONTENT)) is ProblemKind.MISSING_BLOB
        assert store.check_blob(DIGEST, 0) is ProblemKind.MISSING_BLOB

    def test_blobs_of_two_stores_share_no_inode(
        self, store: DirectoryStore, remote: DirectoryStore, source: Path
    ) -> None:
        remote.put_blob(DIGEST, source)
        store.receive_blob(DIGEST, len(CONTENT), 0o755, remote)
        inodes = {path.stat().st_ino for path in (store.blob_path(DIGEST), source)}
        inodes.add(remote.blob_path(DIGEST).stat().st_ino)
        assert len(inodes) == 3

    def test_quarantine_moves_only_what_is_still_damaged(
        self, store: DirectoryStore, source: Path
    ) -> None:
        store.put_blob(DIGEST, source)
        store.create("entries/aa/k.json", b"broken")
        old = store.read("entries/aa/k.json")
        assert old is not None
        store.replace("entries/aa/k.json", b"healed", old.version)
        store.quarantine("k", {"entries/aa/k.json": old.version}, {DIGEST: len(CONTENT)})
        healed = store.read("entries/aa/k.json")
        assert healed is not None
        assert healed.data == b"healed"
        assert store.check_blob(DIGEST, len(CONTENT)) is None
        assert list((store.root / "v1/quarantine").iterdir()) == []

        store.blob_path(DIGEST).write_bytes(b"damaged")
        store.quarantine("k", {"entries/aa/k.json": healed.version}, {DIGEST: len(CONTENT)})
        assert store.read("entries/aa/k.json") is None
        assert not store.blob_path(DIGEST).exists()
        [folder] = (store.root / "v1/quarantine").iterdir()
        assert folder.name.startswith("k-2")
        assert sorted(path.name for path in folder.iterdir()) == sorted([DIGEST, "k.json"])


class TestPermissions:
    @pytest.mark.parametrize(
        ("mask", "file_mode", "folder_mode"), [(0o027, 0o640, 0o750), (0o002, 0o664, 0o775)]
    )
    def test_umask_is_respected(
        self, store: DirectoryStore, source: Path, mask: int, file_mode: int, folder_mode: int
    ) -> None:
        source.chmod(0o755)

        def write() -> int:
            os.umask(mask)
            store.create("runs/a.json", b"1")
            store.put_blob(DIGEST, source)
            return 0

        assert wait_for(start_child(write)) == 0
        assert (store.root / "v1/runs/a.json").stat().st_mode & 0o777 == file_mode
        assert (store.root / "v1/runs").stat().st_mode & 0o777 == folder_mode
        # A program may be executed by whoever may read it.
        executable = file_mode | (file_mode & 0o444) >> 2
        assert store.blob_path(DIGEST).stat().st_mode & 0o777 == executable

    def test_read_only_root_serves_reads_and_refuses_writes(self, public_folder: Path) -> None:
        store = DirectoryStore(public_folder / "store")
        store.create("runs/a.json", b"1")
        source = write_files(public_folder, {"source": CONTENT})["source"]
        store.put_blob(DIGEST, source)
        for path in [store.root, *store.root.rglob("*")]:
            path.chmod(0o555 if path.is_dir() else 0o444)
        before = sorted(store.root.rglob("*"))

        def use() -> int:
            os.environ.pop("XDG_RUNTIME_DIR")
            document = store.read("runs/a.json")
            assert document is not None
            assert document.data == b"1"
            assert [name for name, _ in store.read_many(["runs/a.json"])] == ["runs/a.json"]
            assert [one.name for one in store.list("")] == ["runs/a.json"]
            assert store.present_blobs({DIGEST: len(CONTENT)}) == {DIGEST}
            assert store.check_blob(DIGEST, len(CONTENT)) is None
            assert not store.create("runs/a.json", b"2")  # somebody else's stands: no write needed
            store.put_blob(DIGEST, source)  # it is there: no write needed
            for refused in (
                lambda: store.create("runs/b.json", b"2"),
                lambda: store.replace("runs/a.json", b"2", document.version),
                lambda: store.delete("runs/a.json"),
            ):
                with pytest.raises(StoreError, match="Permission denied") as caught:
                    refused()
                assert str(store.root) in caught.value.message
                assert caught.value.hint
                assert caught.value.exit_status == 3
            return 0

        assert as_nobody(use) == 0
        assert sorted(store.root.rglob("*")) == before
        for path in store.root.rglob("*"):
            if path.is_dir():
                path.chmod(0o755)

    def test_unreadable_document_is_an_error_that_names_it(self, public_folder: Path) -> None:
        store = DirectoryStore(public_folder / "store")
        store.create("runs/a.json", b"1")
        path = store.root / "v1/runs/a.json"
        path.chmod(0)

        def read() -> int:
            for refused in (
                lambda: store.read("runs/a.json"),
                lambda: list(store.read_many(["runs/a.json"])),
            ):
                with pytest.raises(StoreError, match="Permission denied") as caught:
                    refused()
                assert str(path) in caught.value.message
            return 0

        assert as_nobody(read) == 0

    def test_root_that_is_a_file_is_an_error(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"")
        store = DirectoryStore(tmp_path / "file")
        with pytest.raises(StoreError, match="Not a directory"):
            store.create("runs/a.json", b"1")
        with pytest.raises(StoreError, match="Not a directory"):
            store.read("runs/a.json")


class TestFullDisk:
    def test_file_size_limit_leaves_nothing_behind(
        self, store: DirectoryStore, source: Path
    ) -> None:
        def write() -> int:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
            for refused in (
                lambda: store.put_blob(DIGEST, source),
                lambda: store.create("runs/a.json", b"x" * 2000),
            ):
                with pytest.raises(StoreError, match="File too large"):
                    refused()
            assert store.create("runs/b.json", b"x")
            return 0

        assert wait_for(start_child(write)) == 0
        assert [one.name for one in store.list("")] == ["runs/b.json"]
        assert not store.blob_path(DIGEST).exists()
        assert leftovers(store) == []

    @pytest.mark.skipif(os.getuid() != 0, reason="needs root to mount a small file system")
    def test_full_file_system_is_an_error_that_says_so_and_what_is_there_stays(
        self, tmp_path: Path, source: Path
    ) -> None:
        mount = tmp_path / "small"
        mount.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(mount)],
            capture_output=True,
            check=False,
        )
        if done.returncode != 0:
            pytest.skip("cannot mount a tmpfs here")
        try:
            store = DirectoryStore(mount / "store")
            store.put_blob(DIGEST, source)
            big = write_files(tmp_path, {"big": os.urandom(1 << 20)})["big"]
            digest = digest_bytes(big.read_bytes())
            with pytest.raises(StoreError, match="No space left on device") as caught:
                store.put_blob(digest, big)
            assert caught.value.hint == "free space there, or name another directory"
            assert not store.blob_path(digest).exists()
            assert leftovers(store) == []
            assert store.check_blob(DIGEST, len(CONTENT)) is None

            remote = DirectoryStore(tmp_path / "remote")
            remote.put_blob(digest, big)
            with pytest.raises(StoreError, match="No space left on device") as caught:
                store.receive_blob(digest, 1 << 20, 0o644, remote)
            assert caught.value.message.startswith(f"cannot write {store.root}/")
            assert str(remote.root) not in caught.value.message
            assert leftovers(store) == []
        finally:
            subprocess.run(["umount", str(mount)], check=True)
