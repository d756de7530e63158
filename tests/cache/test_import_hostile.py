"""Archives made to harm: each is refused with its member named, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import gzip
import io
import random
import resource
import tarfile
from pathlib import Path

import pytest
from cache_samples import ANYONE, fill, make_entry, make_manifest, start_child, wait_for

from neffbuild.cache import archive
from neffbuild.cache.archive_reader import ArchiveReader
from neffbuild.cache.canonical import digest_bytes
from neffbuild.cache.catalog import commit_entry, entry_name, write_manifest
from neffbuild.cache.directory import DirectoryStore
from neffbuild.cache.entry import Entry
from neffbuild.cache.files import LARGEST_DOCUMENT
from neffbuild.cache.import_source import open_source
from neffbuild.cache.importing import Imported, import_artifacts
from neffbuild.cache.problem import ProblemKind
from neffbuild.cache.verify import verify_store
from neffbuild.config.errors import IntegrityError, NeffbuildError

BLOB = f"v1/blobs/sha256/aa/{'a' * 64}"
ENTRY = f"v1/entries/aa/{'a' * 64}.json"
MEBIBYTE = 1 << 20


@pytest.fixture
def fresh(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "fresh")


def bring(path: Path, local: DirectoryStore) -> Imported:
    with open_source(path, local) as source:
        return import_artifacts(source, local, trust=ANYONE)


def untouched(local: DirectoryStore) -> bool:
    """Whether nothing of an archive is in a cache, not even unfinished."""
    return not any(path.is_file() for path in local.root.rglob("*"))


def info(name: str, size: int = 0, **attributes: object) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size = size
    for attribute, value in attributes.items():
        setattr(member, attribute, value)
    return member


class Archive:
    """A tar of a good store, to which worse is added."""

    def __init__(self, folder: Path) -> None:
        self.store = DirectoryStore(folder / "good")
        self.entries = fill(self.store, folder / "scratch", 2)
        write_manifest(self.store, make_manifest(self.entries))
        self.path = folder / "hostile.tar"

    def write(
        self,
        *worse: tuple[tarfile.TarInfo, bytes],
        mode: str = "w",
        first: bool = False,
        pax: dict[str, str] | None = None,
    ) -> Path:
        """The good store, and the worse members after it (or before, where they come `first`)."""
        with tarfile.open(self.path, mode, pax_headers=pax) as tar:  # type: ignore[call-overload]
            if not first:
                tar.add(self.store.root / "v1", "v1")
            for member, content in worse:
                tar.addfile(member, io.BytesIO(content))
            if first:
                tar.add(self.store.root / "v1", "v1")
        return self.path


@pytest.fixture
def hostile(tmp_path: Path) -> Archive:
    return Archive(tmp_path)


MEMBERS: dict[str, tuple[tarfile.TarInfo, str]] = {
    "above": (info("../escaped", 1), "leads out"),
    "above, inside": (info("v1/entries/../../../escaped", 1), "leads out"),
    "above, folder": (info("v1/..", type=tarfile.DIRTYPE), "leads out"),
    "absolute": (info("/tmp/neffbuild-escaped", 1), "absolute name"),
    "absolute, in layout": (info(f"/{ENTRY}", 1), "absolute name"),
    "symbolic link": (
        info(ENTRY, type=tarfile.SYMTYPE, linkname="/etc/passwd"),
        "a symbolic link",
    ),
    "linked folder": (
        info("v1/entries/bb", type=tarfile.SYMTYPE, linkname="/tmp"),
        "a symbolic link",
    ),
    "hard link": (info(BLOB, type=tarfile.LNKTYPE, linkname="/etc/passwd"), "a hard link"),
    "link where nothing is read": (
        info("v1/loaded/a/b", type=tarfile.LNKTYPE, linkname=BLOB),
        "a hard link",
    ),
    "character device": (info(BLOB, type=tarfile.CHRTYPE, devmajor=1, devminor=5), "a device"),
    "block device": (info(ENTRY, type=tarfile.BLKTYPE), "a device"),
    "pipe": (info(ENTRY, type=tarfile.FIFOTYPE), "a named pipe"),
    "contiguous": (info(ENTRY, type=tarfile.CONTTYPE), "unknown kind"),
    "unknown type": (info(ENTRY, type=b"Z"), "unknown kind"),
    "outside": (info("setup.py", 1), "outside the layout"),
    "outside, nested": (info("a/b/v1/entries/x", 1), "outside the layout"),
    "two stores": (info(f"other/{ENTRY}", 1), "not in one folder"),
    "old layout": (info("v2/entries/x", 1), "outside the layout"),
    "strange document": (info("v1/entries/aa/x.json", 1), "not a name of the layout"),
    "strange run": (info("v1/runs/.x.json", 1), "not a name of the layout"),
    "long name": (info(f"v1/runs/{'r' * 4000}.json", 1), "not a name of the layout"),
    "deep name": (info(f"v1/entries/{'a/' * 2000}x.json", 1), "not a name of the layout"),
    "very long name": (
        info(f"v1/runs/{'r' * 70_000}.json", 1),
        "a header that is not of 0 to 65536 bytes",
    ),
    "blob in another folder": (info(BLOB.replace("/aa/", "/bb/"), 1), "not a name of the layout"),
    "blob by another name": (info("v1/blobs/sha256/aa/x", 1), "not a name of the layout"),
    "blob without a folder": (info("v1/blobs/x", 1), "not a name of the layout"),
}


@pytest.mark.parametrize("first", [False, True], ids=["last", "first"])
@pytest.mark.parametrize("name", MEMBERS)
def test_a_member_that_no_archive_of_ours_has_is_refused_by_name(
    hostile: Archive, fresh: DirectoryStore, tmp_path: Path, name: str, first: bool
) -> None:
    member, why = MEMBERS[name]
    path = hostile.write((member, b"x" * member.size), first=first)
    if name.startswith("outside") or name == "old layout":
        why = f"{why}|not in one folder"
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(IntegrityError, match=why) as caught:
        bring(path, fresh)
    if name != "very long name":
        spelled = caught.value.value
        assert isinstance(spelled, str)
        assert repr(spelled)[:300] in caught.value.message
    assert "tar -C DIR" in (caught.value.hint or "")
    assert untouched(fresh)
    assert [
        one for one in sorted(tmp_path.rglob("*")) if fresh.root not in (one, *one.parents)
    ] == before
    assert not Path("/tmp/neffbuild-escaped").exists()


def test_a_name_is_there_once(hostile: Archive, fresh: DirectoryStore) -> None:
    name = entry_name(hostile.entries[0].key)
    for spelled in (f"v1/{name}", f"./v1//{name}", f"v1/./{name}"):
        path = hostile.write((info(spelled, 1), b"x"))
        with pytest.raises(IntegrityError, match="is there twice"):
            bring(path, fresh)
        assert untouched(fresh)


def test_leading_folders_are_allowed_and_folders_may_repeat(
    hostile: Archive, tmp_path: Path
) -> None:
    for number, (top, spelled) in enumerate(
        [(".", "./v1"), ("cache", "cache/v1"), ("./my.cache", "./my.cache/v1"), ("v1", "v1")]
    ):
        with tarfile.open(hostile.path, "w") as tar:
            for _ in range(2):
                tar.addfile(info(top, type=tarfile.DIRTYPE))
            tar.add(hostile.store.root / "v1", spelled)
            # What is beside the artifacts in a cache is passed over, whatever it is called.
            tar.addfile(info(f"{spelled}/tmp/1 2/ü", 1), io.BytesIO(b"x"))
            tar.addfile(info(f"{spelled}/tags/llama/t.json", 1), io.BytesIO(b"x"))
            tar.addfile(info(f"{spelled.removesuffix('v1')}logs/a.log", 1), io.BytesIO(b"x"))
        local = DirectoryStore(tmp_path / f"local{number}")
        assert bring(hostile.path, local).entries.imported == 2
        assert verify_store(local, ANYONE).ok
        assert list(local.list("tags/")) == []


def test_negative_and_endless_sizes_are_refused(hostile: Archive, fresh: DirectoryStore) -> None:
    """Headers that would lead a reader back, or beyond every disk."""
    for size in (-512, -1, 1 << 40, 1 << 62, 1 << 70):
        member = info(ENTRY, 0)
        member.pax_headers = {"size": str(size)}
        with tarfile.open(hostile.path, "w", format=tarfile.PAX_FORMAT) as tar:
            tar.addfile(member)
            tar.add(hostile.store.root / "v1", "v1")
        with pytest.raises(IntegrityError) as caught:
            bring(hostile.path, fresh)
        assert ENTRY in caught.value.message
        assert untouched(fresh)


@pytest.mark.parametrize(
    "headers",
    [
        {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "9"},
        {"GNU.sparse.size": "9", "GNU.sparse.offset": "0", "GNU.sparse.numbytes": "1"},
        {"GNU.sparse.map": "0,1,5,1"},
    ],
)
def test_sparse_files_are_refused(
    hostile: Archive, fresh: DirectoryStore, headers: dict[str, str]
) -> None:
    member = info(BLOB, 512)
    member.pax_headers = headers
    with tarfile.open(hostile.path, "w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(member, io.BytesIO(b"1\n0\n1\n".ljust(512, b"\0")))
    with pytest.raises(IntegrityError):
        bring(hostile.path, fresh)
    assert untouched(fresh)


def test_old_sparse_files_are_refused(hostile: Archive, fresh: DirectoryStore) -> None:
    block = bytearray(info(BLOB, 512).tobuf(tarfile.GNU_FORMAT))
    block[156:157] = tarfile.GNUTYPE_SPARSE
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    hostile.path.write_bytes(bytes(block) + bytes(512 * 3))
    with pytest.raises(IntegrityError, match="sparse"):
        bring(hostile.path, fresh)


@pytest.mark.parametrize("size", [1 << 30, -512, -(1 << 40)])
@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME])
def test_large_headers_cost_no_memory(
    hostile: Archive, fresh: DirectoryStore, kind: bytes, size: int
) -> None:
    """A gigabyte of extended header in a megabyte of gzip; negative sizes ask for all there is."""
    header = info("./PaxHeaders/x", size, type=kind).tobuf(tarfile.GNU_FORMAT)
    path = hostile.path.with_suffix(".tar.gz")
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(info("v1", type=tarfile.DIRTYPE).tobuf())
        file.write(header)
        for _ in range(150):
            file.write(bytes(MEBIBYTE))
    assert in_little_memory(path, fresh) == 4
    assert untouched(fresh)


def test_a_reader_never_goes_back(hostile: Archive) -> None:
    with hostile.write().open("rb") as raw:
        reader = ArchiveReader(hostile.path, raw)
        reader.read(512)
        with pytest.raises(IntegrityError, match="leads back"):
            reader.seek(0)


def test_chains_of_headers_end(hostile: Archive, fresh: DirectoryStore) -> None:
    link = info("././@LongLink", 0, type=tarfile.GNUTYPE_LONGNAME).tobuf(tarfile.GNU_FORMAT)
    hostile.path.write_bytes(link * 100_000)
    with pytest.raises(NeffbuildError) as caught:
        bring(hostile.path, fresh)
    assert caught.value.exit_status == 4
    assert untouched(fresh)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_bomb_in_place_of_a_document_is_refused_by_its_size(
    hostile: Archive, fresh: DirectoryStore, suffix: str
) -> None:
    size = LARGEST_DOCUMENT + 1
    path = bomb(hostile, suffix, info(ENTRY, size), size)
    assert path.stat().st_size < 2 * MEBIBYTE
    with pytest.raises(IntegrityError, match="too many for a document") as caught:
        bring(path, fresh)
    assert ENTRY in caught.value.message
    assert untouched(fresh)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_bomb_in_place_of_a_blob_takes_no_room(
    hostile: Archive, fresh: DirectoryStore, suffix: str
) -> None:
    """Its name may even be the digest of its bytes; no entry declares so many."""
    size = 64 * MEBIBYTE
    honest = hostile.entries[0].files["model.so"]
    name = f"v1/blobs/sha256/{honest.digest[:2]}/{honest.digest}"
    hostile.store.blob_path(honest.digest).unlink()
    zeros = digest_bytes(bytes(size))
    for member in (info(name, size), info(f"v1/blobs/sha256/{zeros[:2]}/{zeros}", size)):
        local = DirectoryStore(fresh.root / member.name[-8:])
        path = bomb(hostile, suffix, member, size)
        imported = bring(path, local)
        assert imported.entries.imported == 1
        [problem] = imported.problems
        assert problem.key == hostile.entries[0].key
        assert honest.digest in problem.detail
        if member.name == name:
            assert problem.kind is ProblemKind.BAD_SIZE
            assert f"member '{name}' has {size}" in problem.detail
        assert sum(one.size for one in local.list_blobs()) < 10_000
        assert list(local.list_leftovers()) == []


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_an_archive_that_unpacks_without_end_is_given_up(
    hostile: Archive, fresh: DirectoryStore, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from neffbuild.cache import archive_reader

    monkeypatch.setattr(archive_reader, "SLACK", MEBIBYTE)
    monkeypatch.setattr(archive_reader, "MOST_EXPANSION", 50)
    path = bomb(hostile, suffix, info(BLOB, 64 * MEBIBYTE), 64 * MEBIBYTE)
    with pytest.raises(IntegrityError, match="unpacks to more than 50 times") as caught:
        bring(path, fresh)
    assert BLOB in caught.value.message
    assert untouched(fresh)


def test_members_are_counted(
    hostile: Archive, fresh: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "MOST_MEMBERS", 30)
    path = hostile.write(*((info(f"v1/tmp/{number}"), b"") for number in range(30)))
    with pytest.raises(IntegrityError, match="one more than the 30 that are read"):
        bring(path, fresh)
    assert untouched(fresh)


def test_blobs_that_are_not_what_they_are_called_never_get_their_name(
    hostile: Archive, fresh: DirectoryStore
) -> None:
    """Digest for digest of the right size, and swapped."""
    first, second = (one.files["model.so"].digest for one in hostile.entries)
    paths = [hostile.store.blob_path(one) for one in (first, second)]
    contents = [path.read_bytes() for path in paths]
    for path, content in zip(paths, reversed(contents), strict=True):
        path.write_bytes(content)
    imported = bring(hostile.write(), fresh)
    assert {one.kind for one in imported.problems} == {ProblemKind.BAD_DIGEST}
    assert imported.entries.imported == 0
    assert not {one.name for one in fresh.list_blobs()} & {first, second}


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_a_cut_archive_is_told_and_what_was_whole_is_imported(
    hostile: Archive, tmp_path: Path, mode: str
) -> None:
    whole = hostile.write(mode=mode).read_bytes()
    statuses = set()
    for number, length in enumerate(range(1, len(whole) - 1, max(1, len(whole) // 12))):
        hostile.path.write_bytes(whole[:length])
        local = DirectoryStore(tmp_path / f"local{number}")
        status, problems = outcome(hostile.path, local)
        statuses.add(status)
        # Less than a header, it may be anything; and padding behind the end mark says nothing.
        assert status == 4 or length < 512 or (mode == "w" and length > 10_000)
        if problems:
            assert any("cut short" in one for one in problems)
        assert verify_store(local, ANYONE).problems == ()
        assert list(local.list_leftovers()) == []
        hostile.path.write_bytes(whole)
        assert bring(hostile.path, local).problems == ()
        assert verify_store(local, ANYONE).entries_checked == 2
    assert 4 in statuses


def test_something_behind_the_end_is_told(hostile: Archive, fresh: DirectoryStore) -> None:
    path = hostile.write()
    with path.open("ab") as file:
        file.write(path.read_bytes())
    imported = bring(path, fresh)
    assert imported.entries.imported == 2
    assert "something follows its end mark" in imported.problems[0].detail


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_no_byte_of_an_archive_is_believed(hostile: Archive, tmp_path: Path, mode: str) -> None:
    """Whatever changes, what is visible is whole, and the end is one of ours."""
    whole = hostile.write(mode=mode).read_bytes()
    chosen = random.Random(7)
    for number in range(30):
        data = bytearray(whole)
        for _ in range(chosen.choice((1, 1, 8))):
            data[chosen.randrange(len(data))] = chosen.randrange(256)
        hostile.path.write_bytes(data)
        local = DirectoryStore(tmp_path / f"local{number}")
        assert outcome(hostile.path, local)[0] in (0, 2, 4)
        found = verify_store(local, ANYONE)
        assert [one for one in found.problems if one.kind is not ProblemKind.MISSING_UNIT] == []
        assert list(local.list_leftovers()) == []


def test_memory_stays_small_with_large_artifacts(hostile: Archive, fresh: DirectoryStore) -> None:
    contents = {"model.so": bytes(100 * MEBIBYTE)}
    entry, files = make_entry(hostile.path.parent / "big", 7, contents=contents)
    commit_entry(hostile.store, entry, files)
    path = hostile.write(mode="w:gz")
    assert in_little_memory(path, fresh) == 0


def outcome(path: Path, local: DirectoryStore) -> tuple[int, list[str]]:
    """The exit status of an import, and what was wrong where it came to an end."""
    try:
        problems = [one.detail for one in bring(path, local).problems]
    except NeffbuildError as error:
        return error.exit_status, []
    return 4 if problems else 0, problems


def in_little_memory(path: Path, local: DirectoryStore) -> int:
    """The exit status of an import that may take 64 MiB more than this process has."""

    def work() -> int:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        # Threads that copy have stacks of their own, which are reserved and not used.
        resource.setrlimit(resource.RLIMIT_AS, (used + 64 * MEBIBYTE,) * 2)
        try:
            return 4 if bring(path, local).problems else 0
        except NeffbuildError as error:
            return error.exit_status

    return wait_for(start_child(work))


def bomb(hostile: Archive, suffix: str, member: tarfile.TarInfo, size: int) -> Path:
    """A compressed archive of the good store and one member of so many zeros."""
    path = hostile.path.with_suffix(f".tar{suffix}")
    with contextlib.ExitStack() as stack:
        if suffix == ".gz":
            file = stack.enter_context(gzip.open(path, "wb", compresslevel=6))
        else:
            import zstandard

            file = stack.enter_context(zstandard.open(path, "wb"))
        tar = stack.enter_context(tarfile.open(fileobj=file, mode="w|"))
        tar.add(hostile.store.root / "v1", "v1")
        tar.addfile(member, _Zeros(size))
    return path


class _Zeros(io.RawIOBase):
    def __init__(self, size: int) -> None:
        self._left = size

    def read(self, size: int = -1) -> bytes:
        size = min(self._left, size)
        self._left -= size
        return bytes(size)


def test_an_entry_of_an_archive_names_no_file_that_escapes(
    hostile: Archive, fresh: DirectoryStore
) -> None:
    entry: Entry = hostile.entries[0]
    document = entry.to_json().replace(b'"model.so"', b'"../../x"')
    (hostile.store.root / "v1" / entry_name(entry.key)).write_bytes(document)
    [problem] = bring(hostile.write(), fresh).problems
    assert problem.kind is ProblemKind.BAD_ENTRY
