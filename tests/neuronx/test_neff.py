"""The NEFF reader: what it says of whole containers, and that nothing else gets past it."""

from __future__ import annotations

import gzip
import io
import json
import random
import struct
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import neffs
import pytest

from neffbuild.toolchain.neuronx.neff import NeffError, parse_neff, read_neff_file
from neffbuild.toolchain.neuronx.neff_payload import read_payload

# pkg_version, header_size, data_size, neff_version_major and the hash; nothing covers the rest.
COVERED = [range(0x20), range(0xAC, 0xCC)]
WHOLE = {version: neffs.make_neff(pkg_version=version) for version in (1, 2)}


@pytest.mark.parametrize("version", [1, 2])
def test_a_whole_container_is_read(version: int, tmp_path: Path) -> None:
    content = neffs.make_neff(
        {"info.json": b'{"name": "a"}', "sg00/pe.bin": b"x" * 700}, pkg_version=version, lnc=1
    )
    path = tmp_path / "graph.neff"
    path.write_bytes(content)
    neff = read_neff_file(path)
    assert neff == parse_neff(content)
    assert neff.info == {"name": "a"}
    assert {one.name: one.size for one in neff.members} == {"info.json": 13, "sg00/pe.bin": 700}
    assert neff.payload_bytes == 713
    header = neff.header
    assert (header.pkg_version, header.data_size) == (version, len(content) - 1024)
    assert (header.neff_version, header.build_version) == ((2, 0), "2.28.7631.0")
    assert (header.name, header.lnc_size, header.num_tpb) == ("module.neff", 1, 1)
    assert len(header.digest) == (32 if version == 2 else 64)
    assert header.uuid == bytes(range(16)).hex()


def test_what_the_tools_of_others_write_is_read() -> None:
    """Names beyond a header's length, folders, records of GNU and POSIX tar, gzip in several streams."""
    long_name = "sg00/" + "n" * 180
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=form) as archive:
            folder = tarfile.TarInfo("sg00")
            folder.type, folder.mtime = tarfile.DIRTYPE, 1.5  # type: ignore[assignment]
            archive.addfile(folder)
            member = tarfile.TarInfo(long_name)
            member.size = 3
            archive.addfile(member, io.BytesIO(b"abc"))
        tar = out.getvalue()
        payload = gzip.compress(tar[:700]) + gzip.compress(tar[700:])
        neff = parse_neff(neffs.make_header(payload, 2) + payload)
        assert [(one.name, one.size) for one in neff.members] == [(long_name, 3)]
        assert neff.info is None


def _tar_of(*members: tarfile.TarInfo) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for member in members:
            archive.addfile(member, io.BytesIO(b"x" * member.size))
    return out.getvalue()


def _member(name: str, kind: bytes = tarfile.REGTYPE, size: int = 0) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.size, member.linkname = kind, size, "/etc/passwd"
    return member


PAYLOADS: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "cannot be read"),
    "no tar": (b"not a tar" * 200, "cannot be read"),
    "zeros": (bytes(10240), "holds no file"),
    "a symbolic link": (_tar_of(_member("a", tarfile.SYMTYPE)), "'a' is no plain file"),
    "a hard link": (_tar_of(_member("a", tarfile.LNKTYPE)), "'a' is no plain file"),
    "a device": (_tar_of(_member("a", tarfile.CHRTYPE)), "'a' is no plain file"),
    "a pipe": (_tar_of(_member("a", tarfile.FIFOTYPE)), "'a' is no plain file"),
    "an absolute name": (_tar_of(_member("/etc/x")), "'/etc/x' is named outside"),
    "a way out": (_tar_of(_member("sg00/../../x")), "is named outside"),
    "a name twice": (_tar_of(_member("a"), _member("a")), "'a' is there twice"),
    "a file twice, spelled otherwise": (
        _tar_of(_member("sg00/a"), _member("./sg00//a")),
        "'./sg00//a' is there twice",
    ),
    "a file for the folder": (_tar_of(_member("./.")), "is named as the archive's folder"),
    "cut in a member": (_tar_of(_member("a", size=4000))[:2000], "unexpected end of data"),
    "cut after a header": (_tar_of(_member("a", size=400))[:512], "unexpected end of data"),
    "junk after it": (_tar_of(_member("a")) + b"junk" * 300, "goes on after its last member"),
    "junk for a header": (
        _tar_of(_member("a"))[:512] + b"\1" * 512 + _tar_of(_member("b")),
        "goes on after its last member",
    ),
    "info that is no JSON": (neffs.make_tar({"info.json": b"{"}), "info.json is not JSON"),
    "info that is a list": (neffs.make_tar({"info.json": b"[]"}), "a list, not an object"),
    "info without an end": (neffs.make_tar({"info.json": b"[" * 100_000}), "is not JSON"),
    "info too large": (neffs.make_tar({"info.json": b" " * ((16 << 20) + 1)}), "more than"),
}


@pytest.mark.parametrize("name", PAYLOADS)
@pytest.mark.parametrize("version", [1, 2])
def test_archives_that_are_none_are_refused_though_their_digest_is_right(
    name: str, version: int
) -> None:
    tar, reason = PAYLOADS[name]
    payload = gzip.compress(tar, 1) if version == 2 else tar
    with pytest.raises(NeffError, match=reason) as refused:
        parse_neff(neffs.make_header(payload, version) + payload)
    assert refused.value.field == "payload"


def test_a_header_of_a_member_is_not_taken_into_memory_whatever_its_size() -> None:
    member = _member("././@LongLink", tarfile.GNUTYPE_LONGNAME)
    member.size = 2 << 20
    payload = member.tobuf(tarfile.GNU_FORMAT) + bytes(3 << 20)
    with pytest.raises(NeffError, match="a header of 2097152 bytes"):
        parse_neff(neffs.make_header(payload, 1) + payload)


@pytest.mark.parametrize("way", ["pax", "base-256"])
def test_a_size_beyond_all_bounds_is_refused_at_once(way: str) -> None:
    member = _member("a")
    if way == "pax":
        member.pax_headers = {"size": "99999999999999999"}
        payload = member.tobuf(tarfile.PAX_FORMAT) + bytes(1024)
    else:
        member.size = 1 << 60
        payload = member.tobuf(tarfile.GNU_FORMAT) + bytes(1024)
    with pytest.raises(NeffError, match=r"'a' has the size \d+"):
        parse_neff(neffs.make_header(payload, 1) + payload)


def test_what_unpacks_to_more_than_the_bound_is_refused() -> None:
    bomb = gzip.compress(_tar_of(_member("a", size=0)) + bytes(64 << 20))
    assert len(bomb) < 100_000
    with pytest.raises(NeffError, match="unpacks to more than 1048576 bytes"):
        read_payload(iter([bomb]), True, most_bytes=1 << 20)


def test_gzip_that_is_cut_off_is_refused_though_its_digest_is_right() -> None:
    payload = gzip.compress(neffs.make_tar())[:-6]
    with pytest.raises(NeffError, match="cut off"):
        parse_neff(neffs.make_header(payload, 2) + payload)


REFUSED: dict[str, tuple[Callable[[bytearray], object], str, int, str]] = {
    "an empty file": (lambda data: data.clear(), "header", 0, "header of 1024 bytes"),
    "a short header": (lambda data: data.__delitem__(slice(1023, None)), "header", 1023, "has 1023"),
    "another version": (lambda data: struct.pack_into("<Q", data, 0, 3), "pkg_version", 0, "is 3"),
    "another header": (lambda data: struct.pack_into("<Q", data, 8, 512), "header_size", 8, "512"),
    "half a file": (lambda data: data.__delitem__(slice(-100, None)), "data_size", 16, "what the"),
    "a longer file": (lambda data: data.extend(b"0"), "data_size", 16, "what the file has"),
    "a later format": (
        lambda data: struct.pack_into("<Q", data, 24, 3), "neff_version_major", 24, "at most 2",
    ),
    "another payload": (lambda data: data.__setitem__(1500, data[1500] ^ 1), "hash", 0xAC, "MD5"),
    "no gzip": (lambda data: data.__setitem__(1024, 0), "payload", 1024, "starts with 008b"),
    "no padding": (lambda data: data.__setitem__(0xBD, 65), "hash", 0xBC, "zeros after the MD5"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_field_offset_and_value(name: str) -> None:
    change, field, offset, text = REFUSED[name]
    data = bytearray(WHOLE[2])
    change(data)
    with pytest.raises(NeffError, match=text) as refused:
        parse_neff(bytes(data))
    assert (refused.value.field, refused.value.offset) == (field, offset)
    assert refused.value.exit_status == 4


def test_every_bit_the_format_covers_is_covered() -> None:
    """Each bit of the payload and of the header's fields that say something of it; and no bit of the
    rest, which nothing protects: loaders take such a file, and so does the reader."""
    for whole in WHOLE.values():
        for offset in [*range(0x20), *range(0xAC, 0xCC), *range(1024, len(whole), 13)]:
            for bit in range(8):
                data = bytearray(whole)
                data[offset] ^= 1 << bit
                if offset == 0x18 and data[offset] <= 2:
                    continue  # an earlier format is a valid one
                with pytest.raises(NeffError):
                    parse_neff(bytes(data))
        for offset in [*range(0x20, 0xAC), *range(0xCC, 1024)]:
            data = bytearray(whole)
            data[offset] ^= 0xFF
            assert parse_neff(bytes(data)).members == parse_neff(whole).members


def _mutants(count: int) -> Iterator[tuple[bytes, bytes]]:
    """(what it was made of, mutant); every third has a digest and size that are right for it, so that
    what comes after them is reached."""
    source = random.Random(20261129)
    tars = [neffs.make_tar(), *(tar for tar, _ in PAYLOADS.values() if len(tar) < 20_000)]
    for number in range(count):
        whole = WHOLE[source.choice((1, 2))]
        if number % 3:
            yield whole, _mutated(whole, source)
            continue
        tar = _mutated(source.choice(tars), source)
        version = source.choice((1, 2))
        payload = gzip.compress(tar, 1, mtime=0) if version == 2 else tar
        if version == 2 and source.random() < 0.3:
            payload = _mutated(payload, source)
        yield b"", neffs.make_header(payload, version) + payload


def _mutated(whole: bytes, source: random.Random) -> bytes:
    data = bytearray(whole)
    for _ in range(source.randint(1, 3)):
        place = source.randrange(len(data) or 1)
        match source.randrange(7):
            case 0 if data:
                data[place] ^= 1 << source.randrange(8)
            case 1:
                del data[place:]
            case 2:
                data[place:place] = source.randbytes(source.randint(1, 600))
            case 3:
                width = source.choice((1, 4, 8, 12, 512))
                data[place : place + width] = source.randbytes(width)
            case 4:  # the fields of a header: sizes, types, check sums
                field = source.choice((0, 8, 16, 0xAC, 0x220, 124, 148, 156, 257, 345))
                value = source.choice((b"\xff" * 8, b"7" * 8, bytes(8), b"\x80" + bytes(7)))
                data[field : field + 8] = value
            case 5:
                other = source.randrange(len(data) or 1)
                data[place : place + 512] = data[other : other + 512]
            case _:
                data += source.randbytes(source.randint(1, 600))
    return bytes(data)


def _fuzz(count: int) -> None:
    accepted = refused = 0
    for whole, mutant in _mutants(count):
        try:
            neff = parse_neff(mutant)
        except NeffError:
            refused += 1
            continue
        accepted += 1
        assert all(0 <= one.size <= 1 << 30 for one in neff.members)
        assert json.dumps(neff.header.document())
        if whole:
            # Whatever was changed lies where nothing covers it.
            assert mutant[1024:] == whole[1024:]
            for covered in COVERED:
                part = slice(covered.start, covered.stop)
                before, after = bytearray(whole[part]), bytearray(mutant[part])
                if covered.start == 0 and after[0x18] <= 2:
                    before[0x18] = after[0x18] = 0
                assert before == after
    assert refused > count // 2
    assert accepted > count // 100


def test_no_mutant_crashes_the_reader_or_is_falsely_accepted() -> None:
    _fuzz(6_000)


@pytest.mark.slow
def test_no_mutant_of_120_000_crashes_the_reader_or_is_falsely_accepted() -> None:
    _fuzz(120_000)
