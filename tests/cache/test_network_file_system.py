"""Directory stores over a file layer that fails as network file systems do (no server is behind it)."""

from __future__ import annotations

import errno
import itertools
import os
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from cache_samples import (
    ANYONE,
    X86_V4,
    fill,
    make_entry,
    make_manifest,
    start_child,
    wait_for,
)
from faulty_files import CALLS, PASSING, REPEATED, Fault, FaultyFiles, faulty_files, random_faults

from neffbuild.cache.catalog import (
    Hit,
    commit_entry,
    entry_name,
    index_name,
    manifest_name,
    read_entries,
    read_entry,
    read_index,
    record_files,
)
from neffbuild.cache.directory import DirectoryStore
from neffbuild.cache.entry import Entry
from neffbuild.cache.gc import collect
from neffbuild.cache.gc_rules import Policy
from neffbuild.cache.lease import collecting, leased
from neffbuild.cache.loaded import materialise
from neffbuild.cache.manifest import Manifest
from neffbuild.cache.once import build_once
from neffbuild.cache.records import append_run, record_failure
from neffbuild.cache.tag import TagRef
from neffbuild.cache.transfer import pull, push
from neffbuild.cache.verify import verify_store, verify_tag
from neffbuild.config.errors import IntegrityError, NeffbuildError, StoreError

PROD = TagRef("llama", "prod")
LONGEST_PAUSES = 2.0
UNITS = 2


@pytest.fixture
def layer() -> Iterator[FaultyFiles]:
    with faulty_files() as layer:
        yield layer


@dataclass
class Place:
    """A builder's store, a shared store and a puller's, and the files of two units."""

    root: Path

    def __post_init__(self) -> None:
        self.builder = DirectoryStore(self.root / "builder")
        self.shared = DirectoryStore(self.root / "shared")
        self.puller = DirectoryStore(self.root / "puller")
        self.made = [make_entry(self.root / "scratch", number) for number in range(UNITS)]
        # A program among the files: its blob's permissions are changed.
        entry, paths = self.made[0]
        paths["model.so"].chmod(0o755)
        self.made[0] = (replace(entry, files=record_files(paths)), paths)

    def live(self) -> None:
        """Build, push, pull, lay out, verify, collect: everything that is done with stores."""
        entries = [commit_entry(self.builder, *one) for one in self.made]
        append_run(self.builder, {"schema": "neffbuild.run/1", "units": []})
        record_failure(self.builder, "f" * 64, cause="exit", message="70", log_tail="")
        manifest = make_manifest(entries)
        push(self.builder, self.shared, manifest, PROD, trust=ANYONE)
        pull(self.shared, self.puller, PROD, trust=ANYONE)
        for entry in entries:
            materialise(self.puller, entry)
        self.puller.quarantine("nothing", {}, manifest.blobs)
        for store in self.stores:
            collect(store, Policy(untagged=True), delete=True)
            assert verify_store(store, ANYONE).problems == ()

    def root_named_by(self, work: Callable[[], None]) -> bool:
        """Whether `work` fails, in which case its error names a path of ours."""
        try:
            work()
        except NeffbuildError as error:
            stopped = error
        else:
            return False
        assert str(self.root) in stopped.message
        # A lease that could not be removed ends with its process.
        for path in self.root.glob("*/v1/leases/*"):
            path.unlink()
        return True

    @property
    def stores(self) -> tuple[DirectoryStore, ...]:
        return self.builder, self.shared, self.puller

    def check_visible(self) -> None:
        """What is visible is whole."""
        for store in self.stores:
            assert verify_store(store, ANYONE).problems == ()

    def check_complete(self) -> None:
        """Everything is there, and nothing else."""
        for store in self.stores:
            found = verify_store(store, ANYONE)
            assert found.problems == ()
            assert found.entries_checked == UNITS
            assert list(store.list("leases/")) == []
            assert list((store.root / "v1/tmp").iterdir()) == []
        for entry, _ in self.made:
            folder = materialise(self.puller, entry)
            assert folder.is_relative_to(self.puller.root)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


class TestErrorsThatPass:
    @pytest.mark.parametrize("call", CALLS)
    def test_work_goes_on_after_short_pauses(
        self, place: Place, layer: FaultyFiles, call: str
    ) -> None:
        calls = itertools.count()

        def two_of_nine(name: str, path: str) -> Fault | None:
            turn = next(calls) % 9 if name == call else 9
            return Fault(call, PASSING[turn]) if turn < len(PASSING) else None

        layer.chance = two_of_nine
        place.live()
        layer.chance = lambda name, path: None
        assert layer.struck[call] >= 2
        assert all(0 < pause < 1 for pause in layer.pauses)
        place.check_complete()

    @pytest.mark.parametrize("seed", range(10))
    def test_errors_and_lost_answers_anywhere(
        self, place: Place, layer: FaultyFiles, seed: int
    ) -> None:
        layer.chance = random_faults(random.Random(seed), 0.06)
        place.live()
        layer.chance = lambda call, path: None
        assert sum(layer.struck.values()) > 20
        place.check_complete()

    @pytest.mark.parametrize("seed", range(10))
    def test_interrupted_anywhere_what_is_visible_is_whole_and_a_rerun_completes(
        self, place: Place, layer: FaultyFiles, seed: int
    ) -> None:
        """Every kind of error that stays, at any call, in a row of runs."""
        chance = random.Random(seed)
        failed = 0
        for _ in range(8):
            call = chance.choice([*CALLS, "close", "rmdir"])
            error = chance.choice([errno.EIO, errno.ENOSPC, errno.EDQUOT, *PASSING])
            layer.fail(call, error, skip=chance.randrange(80), times=20, done=chance.random() < 0.3)
            failed += place.root_named_by(place.live)
            layer.faults.clear()
            layer.pauses.clear()
            place.check_visible()
        assert failed > 0
        place.live()
        for store in place.stores:
            assert verify_store(store, ANYONE).entries_checked == UNITS


class TestErrorsThatStay:
    @pytest.mark.parametrize(
        ("error", "hint"),
        [
            (errno.ESTALE, "mount it anew"),
            (errno.EBUSY, "fuser"),
            (errno.EIO, "the disk or the file server failed"),
            (errno.ENOSPC, "free space"),
            (errno.EDQUOT, "quota"),
            (errno.ESHUTDOWN, "cut this host off"),
            (errno.ETIMEDOUT, "does not answer"),
        ],
    )
    @pytest.mark.parametrize("call", ["create", "write", "fsync", "close", "link", "rename"])
    def test_the_path_and_what_to_do_are_named_and_nothing_is_left(
        self, place: Place, layer: FaultyFiles, call: str, error: int, hint: str
    ) -> None:
        layer.fail(call, error, where=str(place.builder.root), times=float("inf"))
        entry, made = place.made[0]
        with pytest.raises(StoreError) as stopped:
            commit_entry(place.builder, entry, made)
        assert stopped.value.message.startswith(f"cannot write {place.builder.root}/v1/")
        assert os.strerror(error) in stopped.value.message
        assert hint in (stopped.value.hint or "")
        assert sum(layer.pauses) < LONGEST_PAUSES
        layer.faults.clear()
        assert read_entry(place.builder, entry.key) != Hit(entry)
        assert verify_store(place.builder, ANYONE).problems == ()
        assert list(place.builder.root.glob("v1/tmp/*")) == []
        assert commit_entry(place.builder, entry, made) == entry

    @pytest.mark.parametrize(
        ("call", "error"),
        [
            *(("create", error) for error in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)),
            *(("write", error) for error in (errno.ENOSPC, errno.EDQUOT, errno.EIO)),
            ("close", errno.EDQUOT),
            ("open", errno.EACCES),
            ("read", errno.EIO),
        ],
    )
    def test_of_a_copy_the_side_that_failed_is_named(
        self, place: Place, layer: FaultyFiles, tmp_path: Path, call: str, error: int
    ) -> None:
        entry, made = place.made[0]
        commit_entry(place.builder, entry, made)
        source, target = place.builder.root, tmp_path / "other"
        copy_to = DirectoryStore(target)
        [record] = [one for name, one in entry.files.items() if name == "model.so"]
        reads = call in ("open", "read")
        layer.fail(call, error, where=f"{source}/v1/blobs/" if reads else f"{target}/v1/tmp/")
        with pytest.raises(StoreError) as stopped:
            copy_to.receive_blob(record.digest, record.size, record.mode, place.builder)
        said = f"cannot copy {source}/v1/blobs/" if reads else f"cannot write {target}/v1/tmp/"
        assert stopped.value.message.startswith(said)
        assert str(target if reads else source) not in stopped.value.message
        assert os.strerror(error) in stopped.value.message

    @pytest.mark.parametrize("error", [errno.ESTALE, errno.EIO])
    @pytest.mark.parametrize("call", ["open", "read", "scandir"])
    def test_reads_name_the_path_too(
        self, place: Place, layer: FaultyFiles, call: str, error: int
    ) -> None:
        place.live()
        layer.fail(call, error, where="/entries/", times=float("inf"))
        keys = [entry.key for entry, _ in place.made]
        with pytest.raises(StoreError, match=f"cannot read {place.shared.root}/v1/entries/"):
            read_entries(place.shared, keys)
        assert sum(layer.pauses) < LONGEST_PAUSES

    def test_a_damaged_answer_takes_nothing_out_of_service(
        self, place: Place, layer: FaultyFiles
    ) -> None:
        place.live()
        [entry, _] = [entry for entry, _ in place.made]
        layer.fail("read", errno.EIO, where="/blobs/", times=float("inf"))
        with pytest.raises(StoreError, match=r"cannot read .*Input/output error"):
            materialise(DirectoryStore(place.shared.root), entry)
        layer.faults.clear()
        assert read_entry(place.shared, entry.key) == Hit(entry)

    def test_a_temporary_that_cannot_be_removed_does_not_make_a_write_fail(
        self, place: Place, layer: FaultyFiles
    ) -> None:
        layer.fail("unlink", errno.EIO, where="/tmp/", times=float("inf"))
        assert place.shared.create("runs/a.json", b"1")
        assert layer.struck["unlink"] > 0
        assert len(list(place.shared.root.glob("v1/tmp/*"))) == 1

    def test_a_lease_whose_filing_failed_late_is_not_left(
        self, place: Place, layer: FaultyFiles
    ) -> None:
        layer.fail("fsync", errno.EIO, where="/leases/", times=1)
        with pytest.raises(StoreError), collecting(place.shared):
            pass
        assert layer.struck["fsync"] == 1
        assert list(place.shared.list("leases/")) == []


class TestLostAnswers:
    """The server did it, and refuses the repeated request."""

    @pytest.mark.parametrize("call", REPEATED)
    def test_every_answer_of_a_kind_is_lost(
        self, place: Place, layer: FaultyFiles, call: str
    ) -> None:
        layer.lose_answers(call)
        place.live()
        assert layer.struck[call] >= 1
        layer.faults.clear()
        place.check_complete()

    @pytest.mark.parametrize("call", ["link", "rename"])
    @pytest.mark.parametrize("error", [*PASSING, errno.EIO])
    def test_done_and_reported_as_failed(
        self, place: Place, layer: FaultyFiles, call: str, error: int
    ) -> None:
        layer.fail(call, error, times=float("inf"), done=True)
        place.live()
        assert layer.struck[call] >= 3
        layer.faults.clear()
        place.check_complete()

    def test_our_creation_is_told_from_anothers(
        self, place: Place, layer: FaultyFiles, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        layer.lose_answers("link")
        assert place.shared.create("runs/ours.json", b"same")
        assert not place.shared.create("runs/ours.json", b"same")
        other = DirectoryStore(place.shared.root)
        link = layer.link

        def overtaken(source: Any, target: Any) -> None:
            Path(target).write_bytes(b"same")
            link(source, target)

        layer.faults.clear()
        monkeypatch.setattr(layer, "link", overtaken)
        # The same bytes are not the same file: exactly one has created it.
        assert not other.create("runs/theirs.json", b"same")

    def test_a_replaced_document_is_replaced_once(self, place: Place, layer: FaultyFiles) -> None:
        place.shared.create("tags/a/b.json", b"1")
        first = place.shared.read("tags/a/b.json")
        assert first is not None
        layer.lose_answers("rename")
        assert place.shared.replace("tags/a/b.json", b"2", first.version)
        assert not place.shared.replace("tags/a/b.json", b"3", first.version)


class TestWhatIsRememberedForTooLong:
    @pytest.fixture
    def pushed(self, place: Place) -> Manifest:
        entries = [commit_entry(place.builder, *one) for one in place.made]
        manifest = make_manifest(entries)
        push(place.builder, place.shared, manifest, PROD, trust=ANYONE)
        return manifest

    def hide_everything(self, layer: FaultyFiles, store: DirectoryStore) -> None:
        for path in store.root.rglob("*"):
            if path.is_file():
                layer.hide(path)

    def test_absence_is_believed_after_opening_the_folder_only(
        self, place: Place, pushed: Manifest, layer: FaultyFiles
    ) -> None:
        self.hide_everything(layer, place.shared)
        assert pull(place.shared, place.puller, PROD, trust=ANYONE).manifest == pushed
        assert layer.struck["hidden"] > 0
        assert layer.pauses == []
        self.hide_everything(layer, place.shared)
        assert verify_store(place.shared, ANYONE).ok
        self.hide_everything(layer, place.shared)
        assert place.shared.present_blobs(pushed.blobs) == pushed.blobs.keys()
        self.hide_everything(layer, place.puller)
        for entry in pushed.entries.values():
            materialise(place.puller, entry)
        assert list(place.puller.root.glob("v1/quarantine/*")) == []

    @pytest.mark.parametrize("name_of", [manifest_name, index_name])
    def test_what_something_else_names_is_waited_for(
        self,
        place: Place,
        pushed: Manifest,
        layer: FaultyFiles,
        name_of: Callable[[str], str],
    ) -> None:
        [path] = place.shared.root.glob(f"v1/{name_of('0' * 64).partition('/')[0]}/*.json")
        layer.hide(path, opens=3)
        assert pull(place.shared, place.puller, PROD, trust=ANYONE).manifest == pushed
        assert 0 < sum(layer.pauses) < LONGEST_PAUSES

    def test_what_never_shows_is_named(
        self, place: Place, pushed: Manifest, layer: FaultyFiles
    ) -> None:
        layer.hide(place.shared.root / "v1" / manifest_name(pushed.digest), opens=float("inf"))
        with pytest.raises(IntegrityError, match=f"{pushed.digest}.*is not in") as stopped:
            pull(place.shared, place.puller, PROD, trust=ANYONE)
        assert "network file system" in (stopped.value.hint or "")
        assert 0 < sum(layer.pauses) < LONGEST_PAUSES

    def test_a_tag_keeps_its_platforms_when_its_index_is_late_to_show(
        self, place: Place, pushed: Manifest, layer: FaultyFiles
    ) -> None:
        [path] = place.shared.root.glob("v1/indexes/*.json")
        layer.hide(path, opens=3)
        other = make_manifest(list(pushed.entries.values()), platform=X86_V4)
        statement = push(place.builder, place.shared, other, PROD, trust=ANYONE).statement
        assert statement is not None
        index = read_index(place.shared, statement.index)
        assert index is not None
        assert {one.manifest for one in index.manifests} == {pushed.digest, other.digest}

    def test_a_name_that_others_have_freed_can_be_taken(
        self, place: Place, layer: FaultyFiles
    ) -> None:
        place.shared.create("runs/a.json", b"1")
        path = place.shared.root / "v1/runs/a.json"
        layer.remember(path)
        path.unlink()
        assert place.shared.create("runs/a.json", b"2")

    def test_an_entry_that_a_listing_lacks_is_adopted(
        self, place: Place, layer: FaultyFiles
    ) -> None:
        (entry, files), _ = place.made
        folder = place.shared.root / "v1" / Path(entry_name(entry.key)).parent
        folder.mkdir(parents=True)
        layer.freeze(folder, times=100)
        elsewhere, theirs = make_entry(
            place.root / "elsewhere", 0, contents={"model.so": b"built on another host"}
        )
        assert commit_entry(DirectoryStore(place.shared.root), elsewhere, theirs) == elsewhere
        assert read_entries(place.shared, [entry.key])[entry.key] != Hit(elsewhere)
        assert commit_entry(place.shared, entry, files) == elsewhere

    def test_a_lease_counts_from_when_it_is_listed(self, place: Place, layer: FaultyFiles) -> None:
        folder = place.shared.root / "v1/leases"
        folder.mkdir(parents=True)
        layer.freeze(folder, times=2)
        with collecting(place.shared) as (_, claims):
            assert not claims.writers
            assert layer.pauses
        layer.freeze(folder, times=2)
        with (
            leased(DirectoryStore(place.shared.root), documents=["runs/x.json"], blobs=()),
            collecting(place.shared) as (_, claims),
        ):
            assert claims.documents == {"runs/x.json"}
        layer.freeze(folder, times=100)
        with pytest.raises(StoreError, match=r"lease .* was removed"), collecting(place.shared):
            pass

    def test_a_collector_keeps_what_its_second_look_misses(
        self, place: Place, pushed: Manifest, layer: FaultyFiles
    ) -> None:
        entry = next(iter(pushed.entries.values()))
        for kept in ("manifests", "indexes", "tags", "attestations"):
            for path in place.shared.root.glob(f"v1/{kept}/**/*.json"):
                path.unlink()
        folder = (place.shared.root / "v1" / entry_name(entry.key)).parent
        scandir = layer.scandir
        seen: list[str] = []

        def once(path: Any) -> Any:
            if str(path) == str(folder):
                seen.append(str(path))
                if len(seen) > 1:
                    layer.listings[str(folder)] = [[]]
            return scandir(path)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(layer, "scandir", once)
            collect(place.shared, Policy(grace=-60), delete=True)
        assert len(seen) > 1
        assert verify_store(place.shared, ANYONE).problems == ()
        assert read_entry(place.shared, entry.key) == Hit(entry)


class TestFilesStillOpen:
    """A file removed while it is open stays as `.nfs…`, and its folder cannot be removed."""

    @pytest.fixture
    def laid_out(self, store: DirectoryStore, tmp_path: Path) -> tuple[Entry, Path]:
        [entry] = fill(store, tmp_path / "scratch", 1)
        folder = materialise(store, entry)
        (folder / ".nfs000000000012d6870000001a").write_bytes(b"mapped by somebody")
        return entry, folder

    def test_a_layout_is_used_on(self, store: DirectoryStore, laid_out: tuple[Entry, Path]) -> None:
        entry, folder = laid_out
        inode = folder.stat().st_ino
        assert materialise(DirectoryStore(store.root), entry) == folder
        assert folder.stat().st_ino == inode

    def test_they_stay_until_closed_and_the_collector_goes_on(
        self, store: DirectoryStore, laid_out: tuple[Entry, Path], layer: FaultyFiles
    ) -> None:
        _, folder = laid_out
        collect(store, Policy(older_than=-60, grace=-60), delete=True)
        assert [path.name for path in folder.iterdir()] == [".nfs000000000012d6870000001a"]
        assert list(store.list("entries/")) == []
        assert list(store.list_blobs()) == []
        assert layer.pauses == []
        for path in folder.iterdir():
            path.unlink()
        collect(store, Policy(older_than=-60, grace=-60), delete=True)
        assert list(store.root.glob("v1/loaded/*")) == []

    def test_a_new_layout_takes_the_place(
        self, store: DirectoryStore, laid_out: tuple[Entry, Path]
    ) -> None:
        entry, folder = laid_out
        for path in folder.rglob("*"):
            if path.is_file() and not path.name.startswith(".nfs"):
                path.unlink()
        assert materialise(store, entry) == folder
        assert (folder / "model.so").exists()

    @pytest.mark.parametrize("error", [errno.EBUSY, errno.ENOTEMPTY])
    def test_a_folder_that_cannot_be_removed_yet_is_no_error(
        self, place: Place, layer: FaultyFiles, error: int
    ) -> None:
        layer.fail("rmdir", error, times=float("inf"))
        place.live()
        assert layer.struck["rmdir"] > 0
        assert layer.pauses == []


def test_short_reads_and_writes_are_completed(place: Place, layer: FaultyFiles) -> None:
    layer.short = True
    place.live()
    assert place.shared.create("runs/large.json", bytes(200_000))
    document = place.shared.read("runs/large.json")
    assert document is not None
    assert document.data == bytes(200_000)
    place.check_complete()


def test_no_lock_lies_below_a_store_and_one_module_touches_its_disk(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looked at from below, by the interpreter's audit events of a process that does everything."""
    below = str(tmp_path)
    made = place.made

    def live() -> int:
        locks: list[str] = []
        touched: list[tuple[str, str]] = []

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            if event in ("fcntl.flock", "fcntl.lockf", "fcntl.fcntl"):
                locks.append(str(Path(f"/proc/self/fd/{arguments[0]}").readlink()))
            elif event.partition(".")[0] in ("open", "os", "shutil") and arguments:
                path = str(arguments[0])
                if path.startswith(below) and "/scratch" not in path:
                    caller = sys._getframe(1)
                    touched.append((Path(caller.f_code.co_filename).name, f"{event} {path}"))

        sys.addaudithook(hook)
        place.live()
        entry, files = made[0]
        build_once(place.builder, "a" * 64, lambda: (entry, files), wait=1)
        verify_tag(place.shared, PROD, ANYONE)
        assert locks
        assert not [path for path in locks if path.startswith(below)]
        assert len(touched) > 100
        others = {one for one in touched if one[0] not in ("filesystem.py", "files.py")}
        assert not others, others
        return 0

    assert wait_for(start_child(live)) == 0


def test_every_error_of_a_store_is_one_for_people(place: Place, layer: FaultyFiles) -> None:
    """Whatever the system answers, wherever: never a bare `OSError`."""
    chance = random.Random(7)
    # What says that something else is there than a file says that it is damaged.
    aside = {errno.ENOENT, errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENXIO}
    errors = sorted(errno.errorcode.keys() - aside - {errno.EAGAIN})
    for _ in range(40):
        call = chance.choice([*CALLS, "close", "rmdir"])
        layer.fail(call, chance.choice(errors), skip=chance.randrange(150), times=10)
        place.root_named_by(place.live)
        layer.faults.clear()
        layer.pauses.clear()
    place.live()
    place.check_visible()
