"""push, pull and verify from end to end, each command in a process of its own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from cli_samples import UNITS, Project


@pytest.fixture
def builder(compiled: Project, project: Project) -> Project:
    """A project with a full cache of its own."""
    project.write(sections={"cache": {"name": "llama"}})
    shutil.copytree(compiled.cache, project.cache)
    return project


def test_push_and_pull_make_an_empty_cache_complete(builder: Project) -> None:
    pushed = builder.run("push", "config.yaml", "--to", "remote", "--tag", "v1", "--json").document
    assert pushed["name"] == "llama"
    assert pushed["tag"] == "v1"
    assert pushed["units"] == 6
    shown = builder.run("push", "config.yaml", "--to", "remote", "--tag", "v1")
    assert "pushed 6 units to remote as llama:v1 (0 blobs, 0 B copied)" in shown.out
    assert f"index {pushed['index']}" in shown.out
    assert "fetch with: neffbuild pull remote --tag llama:v1" in shown.out

    server = {"NEFFBUILD_CACHE": str(builder.root / "server")}
    assert builder.run("plan", "config.yaml", "--check", env=server).status == 1
    pulled = builder.run("pull", "remote", "--tag", "llama:v1", "--json", env=server).document
    assert (pulled["units"], pulled["manifest"]) == (6, pushed["manifest"])
    assert pulled["bytes_copied"] > 0
    assert builder.run("plan", "config.yaml", "--check", env=server).status == 0
    verified = builder.run("verify", "config.yaml", "--json", env=server).document
    assert verified["ok"]
    assert verified["entries_checked"] == 6
    assert verified["uncovered_states"] == []
    again = builder.run("pull", "remote", "--tag", "llama:v1", "--json", env=server).document
    assert (again["blobs_copied"], again["bytes_copied"]) == (0, 0)


@pytest.mark.parametrize("url", ["remote", "{root}/remote", "file://{root}/remote"])
def test_a_directory_store_has_three_spellings(builder: Project, url: str) -> None:
    place = url.format(root=builder.root)
    assert builder.call("push", "config.yaml", "--to", place, "--tag", "t").status == 0
    assert (builder.root / "remote/v1/tags/llama/t.json").is_file()
    assert builder.call("pull", place, "--tag", "llama:t", "--cache", "c").status == 0
    assert builder.call("verify", place).status == 0


def test_what_was_pushed_is_found_by_its_digest(builder: Project) -> None:
    pushed = builder.call("push", "config.yaml", "--to", "remote", "--json").document
    assert pushed["tag"] is None
    assert (
        "--digest " + pushed["index"] in builder.call("push", "config.yaml", "--to", "remote").out
    )
    for name in ("index", "manifest"):
        ran = builder.call("pull", "remote", "--digest", pushed[name], "--cache", name)
        assert ran.status == 0
        assert builder.call("plan", "config.yaml", "--check", "--cache", name).status == 0


def test_a_remote_of_the_config_is_where_to_push(builder: Project) -> None:
    remotes = [{"url": "readable", "mode": "ro"}, {"url": "writable"}]
    builder.write(sections={"cache": {"name": "llama", "remotes": remotes}})
    assert builder.call("push", "config.yaml", "--tag", "t").status == 0
    assert (builder.root / "writable/v1").is_dir()
    assert not (builder.root / "readable").exists()


def test_an_interrupted_push_names_nothing(builder: Project) -> None:
    """The tag comes last: until it is there, nobody pulls half of anything."""
    blobs = builder.root / "remote/v1/blobs"
    blobs.parent.mkdir(parents=True)
    blobs.write_text("in the way")
    assert builder.call("push", "config.yaml", "--to", "remote", "--tag", "t").status == 3
    assert not (builder.root / "remote/v1/tags").exists()
    blobs.unlink()
    assert builder.call("push", "config.yaml", "--to", "remote", "--tag", "t").status == 0
    assert builder.call("verify", "remote").status == 0


def test_verify_names_missing_units_and_the_states_they_leave_uncovered(builder: Project) -> None:
    plan = builder.call("plan", "config.yaml", "--json").document
    [gone] = [one for one in plan["units"] if one["bucket_name"] == "decode_b4_ctx1024"]
    (builder.cache / f"v1/entries/{gone['key'][:2]}/{gone['key']}.json").unlink()
    ran = builder.call("verify", "config.yaml", "--json")
    assert ran.status == 1
    [problem] = ran.document["problems"]
    assert problem["kind"] == "missing_unit"
    assert problem["key"] == gone["key"]
    assert problem["unit"] == "decode_b4_ctx1024"
    [state] = ran.document["uncovered_states"]
    assert state == {
        "family": "target",
        "num_seqs": [3, 4],
        "context_need": [2, 1024],
        "reason": "decode_b4_ctx1024 is missing",
    }
    shown = builder.call("verify", "config.yaml").out
    assert "missing_unit decode_b4_ctx1024: " in shown
    assert (
        "uncovered: target with 3 to 4 sequences needing 2 to 1024 positions: "
        "decode_b4_ctx1024 is missing" in shown
    )
    assert "NOT ok: 5 entries" in shown
    assert "next: neffbuild compile config.yaml" in shown


def test_verify_of_an_empty_cache_is_short(project: Project) -> None:
    buckets = {"neuron_config": {"decode_context_length_buckets": list(range(128, 4096, 128))}}
    config = project.write(additional_config=buckets)
    lines = project.call("verify", config).out.splitlines()
    assert len(lines) < 60
    assert any(line.startswith("… and ") for line in lines)


def test_verify_of_a_store_follows_what_its_tags_name(builder: Project) -> None:
    assert builder.call("push", "config.yaml", "--to", "remote", "--tag", "t").status == 0
    assert builder.call("verify", "remote", "--tag", "llama:t").status == 0
    manifest = next((builder.root / "remote/v1/manifests").iterdir())
    manifest.unlink()
    ran = builder.call("verify", "remote", "--json")
    assert ran.status == 4
    assert {one["kind"] for one in ran.document["problems"]} == {"missing_blob"}
    assert ran.document["problems"][0]["key"] == manifest.stem


def _flip_a_byte_of_a_program(builder: Project, root: Path) -> None:
    """Damage of the right size, which a look at sizes cannot see."""
    entry = json.loads(next((builder.cache / "v1/entries").rglob("*.json")).read_text())
    digest = entry["files"]["program.bin"]["digest"]
    blob = root / f"v1/blobs/sha256/{digest[:2]}/{digest}"
    content = bytearray(blob.read_bytes())
    content[-1] ^= 1
    blob.chmod(0o644)
    blob.write_bytes(content)


def test_a_damaged_store_is_repaired_by_what_verify_says(builder: Project) -> None:
    push = ("push", "config.yaml", "--to", "remote", "--tag", "t")
    assert builder.call(*push).status == 0
    _flip_a_byte_of_a_program(builder, builder.root / "remote")
    found = builder.call("verify", "remote")
    assert found.status == 4
    assert "neffbuild verify remote --repair" in found.out
    assert builder.call("verify", "remote", "--repair").status == 4
    assert builder.call(*push).status == 0
    assert builder.call("verify", "remote").status == 0
    assert builder.call("pull", "remote", "--tag", "llama:t", "--cache", "c").status == 0


@pytest.mark.parametrize("damaged", ["configs", "manifests"])
def test_verify_reads_the_manifest_that_serving_would_take(builder: Project, damaged: str) -> None:
    [document] = (builder.cache / "v1" / damaged).iterdir()
    document.chmod(0o644)
    document.write_text("{}")
    ran = builder.call("verify", "config.yaml", "--json")
    assert ran.status == 4
    assert [one["kind"] for one in ran.document["problems"]] in (["bad_entry"], ["bad_digest"])
    assert builder.call("compile", "config.yaml").status == 0
    assert builder.call("verify", "config.yaml").status == 0


@pytest.mark.parametrize("damaged", ["configs", "manifests", "entries/??"])
def test_a_compile_heals_a_folder_in_a_documents_place(builder: Project, damaged: str) -> None:
    document = next((builder.cache / "v1").glob(f"{damaged}/*.json"))
    document.unlink()
    document.mkdir()
    assert builder.call("verify", "config.yaml").status in (1, 4)
    assert builder.run("compile", "config.yaml").status == 0
    assert document.is_file()
    assert builder.call("verify", "config.yaml").status == 0


def test_a_pull_replaces_what_is_damaged_locally(builder: Project) -> None:
    assert builder.call("push", "config.yaml", "--to", "remote", "--tag", "t").status == 0
    pull = ("pull", "remote", "--tag", "llama:t", "--cache", "c", "--json")
    assert builder.call(*pull).status == 0
    _flip_a_byte_of_a_program(builder, builder.root / "c")
    assert builder.call(*pull).document["blobs_copied"] == 1
    assert builder.call("verify", "config.yaml", "--cache", "c").status == 0


def test_a_cut_off_artifact_is_bad_size_and_compiled_again(builder: Project) -> None:
    entry = json.loads(next((builder.cache / "v1/entries").rglob("*.json")).read_text())
    digest = entry["files"]["program.bin"]["digest"]
    blob = builder.cache / f"v1/blobs/sha256/{digest[:2]}/{digest}"
    blob.chmod(0o644)
    blob.write_bytes(blob.read_bytes()[:100])
    plan = builder.call("plan", "config.yaml", "--json").document
    assert plan["counts"]["missing"] == 1
    ran = builder.call("verify", "config.yaml", "--json")
    assert ran.status == 4
    assert {one["kind"] for one in ran.document["problems"]} == {"bad_size"}
    assert builder.run("compile", "config.yaml", "--json").document["counts"]["built"] == 1
    assert builder.call("verify", "config.yaml").status == 0


def test_replay_counts_what_is_not_there(builder: Project) -> None:
    full = builder.call("replay", "config.yaml", "--steps", "50", "--json").document
    assert (full["steps"], full["misses"], full["compiles"]) == (50, 0, 0)
    assert {unit["bucket_name"] for unit in full["units"]} <= set(UNITS)
    assert full["transitions"]
    empty = builder.call("replay", "config.yaml", "--steps", "50", "--cache", "none", "--json")
    assert empty.document["misses"] == 50
    assert Path(builder.root / "none").exists() is False
