"""`neffbuild import` from end to end, beside push, verify, replay and keys."""

from __future__ import annotations

import json
import shutil
import signal
import tarfile
import time
from pathlib import Path

import pytest
from cli_samples import UNITS, Project


@pytest.fixture
def builder(compiled: Project, project: Project) -> Project:
    """A project with a full cache of its own, and an empty cache `c` to import into."""
    project.write(sections={"cache": {"name": "llama"}})
    shutil.copytree(compiled.cache, project.cache)
    return project


@pytest.fixture
def packed(builder: Project) -> str:
    """The whole cache as a tar, as tar makes it."""
    (builder.cache / "logs").mkdir()
    (builder.cache / "logs/unit.log").write_text("where failed compiles leave their logs")
    with tarfile.open(builder.root / "cache.tar.gz", "w:gz") as tar:
        tar.add(builder.cache, "cache")
    return "cache.tar.gz"


@pytest.mark.parametrize("source", ["directory", "URL", "tar", "pushed"])
def test_an_imported_cache_serves(builder: Project, packed: str, source: str) -> None:
    assert builder.call("push", "config.yaml", "--to", "remote", "--tag", "t").status == 0
    name = {
        "directory": "cache",
        "URL": f"file://{builder.root}/cache",
        "tar": packed,
        "pushed": "remote",
    }[source]
    ran = builder.call("import", name, "--cache", "c", "--json")
    assert ran.status == 0
    document = ran.document
    assert document["source"] == name
    assert document["ok"] is True
    assert document["entries"] == {"whole": 6, "imported": 6}
    assert document["configs"]["imported"] == 1
    # Run records are of the machine that compiled; they are not pushed.
    assert document["runs"]["imported"] == (0 if source == "pushed" else 1)
    assert builder.call("plan", "config.yaml", "--check", "--cache", "c").status == 0
    assert builder.call("verify", "config.yaml", "--cache", "c").status == 0
    replayed = builder.call("replay", "config.yaml", "--steps", "20", "--cache", "c", "--json")
    assert replayed.document["misses"] == 0
    again = builder.call("import", name, "--cache", "c")
    assert again.status == 0
    assert f"imported 0 units from {name} (0 blobs, 0 B copied); 6 were here already" in again.out
    if source != "pushed":
        reported = builder.call("report", "config.yaml", "--cache", "c", "--json").document
        assert reported["wall_seconds"] > 0


def test_units_are_known_where_no_compiler_is(builder: Project, packed: str) -> None:
    """The config's pointer leads to the manifest, which says what the keys are."""
    assert builder.call("import", packed, "--cache", "c").status == 0
    [pointer] = (builder.root / "c/v1/configs").iterdir()
    digest = json.loads(pointer.read_text())["manifest"]
    manifest = json.loads((builder.root / f"c/v1/manifests/{digest}.json").read_text())
    assert len(manifest["entries"]) == len(UNITS)


def test_damage_is_named_and_the_rest_imported(builder: Project) -> None:
    plan = builder.call("plan", "config.yaml", "--json").document
    key = plan["units"][0]["key"]
    entry = json.loads((builder.cache / f"v1/entries/{key[:2]}/{key}.json").read_text())
    digest = entry["files"]["program.bin"]["digest"]
    blob = builder.cache / f"v1/blobs/sha256/{digest[:2]}/{digest}"
    blob.chmod(0o644)
    blob.write_bytes(bytes(blob.stat().st_size))
    ran = builder.call("import", "cache", "--cache", "c", "--json")
    assert ran.status == 4
    assert ran.document["ok"] is False
    assert {one["kind"] for one in ran.document["problems"]} == {"bad_digest"}
    assert key in {one["key"] for one in ran.document["problems"]}
    assert ran.document["entries"]["imported"] >= 1
    shown = builder.call("import", "cache", "--cache", "c")
    assert shown.status == 4
    assert f"bad_digest {key}: blob {digest}" in shown.out
    assert "next: import from another copy" in shown.out


def test_errors_say_what_was_expected(builder: Project) -> None:
    (builder.root / "empty").mkdir()
    (builder.root / "cache.txt").write_text("hello\n" * 200)
    for source, message in {
        "empty": "there is nothing to import",
        "cache.txt": "neither a directory nor a tar",
        "none": "there is no directory and no file",
        "cache": "the local cache itself",
        "s3://bucket/prefix": "not a directory or file",
        "http://host/x": "not supported",
    }.items():
        ran = builder.call("import", source, "--json")
        assert ran.status == 2, source
        assert message in ran.error["message"]
        assert ran.error["hint"]
    assert builder.call("import").status == 2
    inside = builder.call("import", "cache/v1", "--cache", "c", "--json")
    assert inside.status == 2
    assert "the folder that holds `v1/entries`" in inside.error["hint"]


def test_a_hostile_archive_is_refused(builder: Project) -> None:
    with tarfile.open(builder.root / "x.tar", "w") as tar:
        tar.add(builder.cache / "v1", "v1")
        link = tarfile.TarInfo("v1/entries/zz")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc"
        tar.addfile(link)
    ran = builder.call("import", "x.tar", "--cache", "c", "--json")
    assert ran.status == 4
    assert "member 'v1/entries/zz' is a symbolic link" in ran.error["message"]
    assert not (builder.root / "c/v1/entries").exists()


def test_a_cut_archive_is_told(builder: Project, packed: str) -> None:
    path = builder.root / packed
    path.write_bytes(path.read_bytes()[:-200])
    ran = builder.call("import", packed, "--cache", "c", "--json")
    assert ran.status == 4
    assert "cut short" in ran.out
    assert builder.call("import", "cache", "--cache", "c").status == 0


def test_killed_in_the_middle_a_second_import_completes(builder: Project) -> None:
    killed = 0
    for attempt in range(4):
        cache = f"c{attempt}"
        process = builder.start("import", "cache", "--cache", cache)
        until = time.monotonic() + 30
        while not (builder.root / cache / "v1").exists() and time.monotonic() < until:
            time.sleep(0.001)
        time.sleep(0.004 * attempt)
        process.kill()
        process.communicate()
        killed += process.returncode == -signal.SIGKILL
        assert builder.call("import", "cache", "--cache", cache).status == 0
        assert builder.call("verify", "config.yaml", "--cache", cache).status == 0
    assert killed


def test_required_signatures_let_only_signed_manifests_and_their_units_in(
    builder: Project,
) -> None:
    for name in ("release", "other"):
        assert builder.call("keygen", "--out", name).status == 0
    push = ("push", "config.yaml", "--to", "remote", "--tag", "t")
    assert builder.call(*push).status == 0
    bring = ("import", "remote", "--cache", "c", "--key", "release.pub", "--json")
    for source in ("remote", "cache"):
        refused = builder.call("import", source, *bring[2:])
        assert refused.status == 4
        assert "provenance is not signed" in refused.error["message"]
    assert not (builder.root / "c/v1/entries").exists()

    shutil.rmtree(builder.root / "remote")
    assert builder.call(*push, "--key", "release.key").status == 0
    entry = next((builder.cache / "v1/entries").rglob("*.json"))
    stranger = builder.root / f"remote/v1/entries/00/{'0' * 64}.json"
    stranger.parent.mkdir(exist_ok=True)
    shutil.copy(entry, stranger)
    signed = builder.call(*bring)
    assert signed.status == 0
    assert signed.document["entries"] == {"whole": 6, "imported": 6}
    assert signed.document["unsigned_entries"] == 1
    assert signed.document["runs"]["whole"] == 0
    assert "left out: 1 unit that no signed manifest names" in builder.call(*bring[:-1]).out
    assert builder.call("verify", "config.yaml", "--cache", "c").status == 0

    # The same by what the config says; and a key that is not believed.
    builder.write("signed.yaml", sections={"cache": {"local": "d", "keys": ["release.pub"]}})
    assert builder.call("import", "remote", "--config", "signed.yaml").status == 0
    assert (builder.root / "d/v1/entries").is_dir()
    other = builder.call("import", "remote", "--cache", "e", "--key", "other.pub", "--json")
    assert other.status == 4
    assert "bad_signature" in other.error["message"]
    assert builder.call("import", "remote", "--require-signature", "--json").status == 2
    assert not Path(builder.root / "e/v1/entries").exists()
