"""`neffbuild inspect`, and what `verify` makes of entries whose NEFFs were never whole."""

from __future__ import annotations

import json
from pathlib import Path

import neffs
import pytest
from neuron_project import NeuronProject

from neffbuild.cache.catalog import commit_entry, read_entry, record_files
from neffbuild.cache.directory import DirectoryStore
from neffbuild.cache.entry import Entry


@pytest.mark.parametrize("version", [1, 2])
def test_a_whole_neff_is_described(project: NeuronProject, version: int) -> None:
    info = {"name": "module.neff", "long": "x" * 5000, "list": [1, 2], "none": None, "n": 3}
    members = {"info.json": json.dumps(info).encode(), "sg00/pe.bin": bytes(3000)}
    whole = neffs.make_neff(members, pkg_version=version, lnc=1)
    (project.root / "a.neff").write_bytes(whole)
    ran = project.call("inspect", "a.neff", "--json")
    assert ran.status == 0
    document = ran.document
    assert document["members"] == [
        {"name": "info.json", "size": len(members["info.json"])},
        {"name": "sg00/pe.bin", "size": 3000},
    ]
    assert document["payload_bytes"] == sum(map(len, members.values()))
    assert document["header"]["pkg_version"] == version
    assert document["header"]["build_version"] == "2.28.7631.0"
    assert document["header"]["lnc_size"] == 1
    assert document["info"]["list"] == "(2 items)"
    assert len(document["info"]["long"]) == 200
    shown = project.call("inspect", "a.neff").out
    assert "a.neff: a whole NEFF" in shown
    assert f"{document['header']['digest']}: as the header says" in shown
    assert "2 members, 4.8 KiB unpacked" not in shown
    assert "sg00/pe.bin  2.9 KiB" in shown


def test_anything_else_is_refused_with_the_field(project: NeuronProject) -> None:
    whole = neffs.make_neff()
    path = project.root / "half.neff"
    for content, field, text in (
        (whole[:-7], "data_size", "data_size at offset 0x10 of the header is"),
        (b"", "header", "a NEFF starts with a header of 1024 bytes, this file has 0"),
        (whole[:1100] + b"!" + whole[1101:], "hash", "the payload's MD5 is"),
        (b"\x7fELF" + bytes(4000), "header_size", "header_size at offset 0x8"),
    ):
        path.write_bytes(content)
        ran = project.call("inspect", "half.neff", "--json")
        assert ran.status == 4
        assert ran.error["kind"] == "neff"
        assert ran.error["field"] == field
        assert ran.error["message"].startswith(f"half.neff is no whole NEFF: {text}")


def test_no_file_is_a_mistake_of_the_command_line(project: NeuronProject) -> None:
    for name in ("none.neff", "model"):
        assert project.call("inspect", name).status == 2


def test_hostile_names_do_not_reach_the_terminal(project: NeuronProject) -> None:
    whole = neffs.make_neff({"info.json": b'{"a\\u001b[2J": "\\u001b[31m"}', "x\x1b[2Jy": b""})
    (project.root / "a.neff").write_bytes(whole)
    ran = project.call("inspect", "a.neff")
    assert ran.status == 0
    assert "\x1b" not in ran.out
    assert r"x\x1b[2Jy" in ran.out


def test_numbers_that_json_has_not_are_texts(project: NeuronProject) -> None:
    info = b'{"a": NaN, "b": Infinity, "c": 1.5}'
    (project.root / "a.neff").write_bytes(neffs.make_neff({"info.json": info}))
    out = project.call("inspect", "a.neff", "--json").out
    assert '"a": "nan"' in out
    assert json.loads(out, parse_constant=pytest.fail)["info"] == {"a": "nan", "b": "inf", "c": 1.5}


@pytest.fixture
def stored(project: NeuronProject) -> tuple[NeuronProject, list[str]]:
    """A project whose cache has an entry for each unit; the NEFF of the second is half of one."""
    config = project.write_xla()
    store = DirectoryStore(project.cache)
    keys = []
    for number, unit in enumerate(project.call("plan", config, "--json").document["units"]):
        name = unit["bucket_name"]
        recipe = project.call("explain", config, name, "--json").document["recipe"]
        whole = neffs.make_neff({"sg00/pe.bin": name.encode()})
        path = project.root / "graph.neff"
        path.write_bytes(whole[: -50 if number == 1 else None])
        files = {"graph.neff": path}
        commit_entry(store, Entry(recipe, record_files(files), "0" * 64, "1" * 64), files)
        keys.append(unit["key"])
    return project, keys


def test_verify_refuses_an_entry_whose_neff_was_never_whole(
    stored: tuple[NeuronProject, list[str]],
) -> None:
    project, keys = stored
    assert project.call("plan", "xla.yaml", "--json").document["counts"]["cached"] == 6
    of_store = project.call("verify", str(project.cache), "--json")
    ran = project.call("verify", "xla.yaml", "--json")
    for one in (of_store, ran):
        assert one.status == 4
        (problem,) = one.document["problems"]
        assert (problem["kind"], problem["key"]) == ("bad_entry", keys[1])
        assert problem["detail"].startswith("graph.neff: no whole NEFF: data_size at offset 0x10")
        assert one.document["blobs_checked"] == 6
    assert ran.document["uncovered_states"]
    # It is set aside, so that the next compile builds it.
    counts = project.call("plan", "xla.yaml", "--json").document["counts"]
    assert (counts["cached"], counts["missing"]) == (5, 1)
    assert not Path(project.root / "cache/v1/entries" / keys[1][:2] / f"{keys[1]}.json").exists()
    assert read_entry(DirectoryStore(project.cache), keys[0])


def test_verify_reads_neffs_in_a_store_that_holds_them_compressed(
    stored: tuple[NeuronProject, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As S3 does: there is no file to read in place."""
    from neffbuild.cache.contents import check_contents
    from neffbuild.cache.verify import verify_keys
    from neffbuild.toolchain.registry import file_checks

    project, keys = stored
    store = DirectoryStore(project.cache)

    class Elsewhere:
        def __getattr__(self, name: str) -> object:
            assert name != "blob_path"
            return getattr(store, name)

    monkeypatch.setenv("TMPDIR", str(project.root / "tmp"))
    verified = verify_keys(store, keys)
    assert verified.ok
    checked = check_contents(Elsewhere(), verified, file_checks())  # type: ignore[arg-type]
    assert checked == check_contents(store, verified, file_checks())
    assert [problem.key for problem in checked.problems] == [keys[1]]
    assert check_contents(store, verified, {}).ok
    assert not list((project.root / "tmp").iterdir())
