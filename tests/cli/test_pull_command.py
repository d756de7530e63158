"""`neffbuild pull` on the hosts of a fleet: platforms, partial manifests, the ready file, going on."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest
from cli_samples import Project


@pytest.fixture
def builder(compiled: Project, project: Project) -> Project:
    """A project with a full cache, pushed to `remote` as llama:t."""
    project.write(sections={"cache": {"name": "llama"}})
    shutil.copytree(compiled.cache, project.cache)
    assert project.call("push", "config.yaml", "--to", "remote", "--tag", "t").status == 0
    return project


@pytest.fixture
def mixed(builder: Project) -> Project:
    """Its tag has artifacts for a second platform too."""
    config = {"name": "hostile", "target": "other"}
    builder.write("other.yaml", toolchain=config, sections={"cache": {"name": "llama"}})
    assert builder.run("compile", "other.yaml").status == 0
    assert builder.call("push", "other.yaml", "--to", "remote", "--tag", "t").status == 0
    return builder


def test_the_host_says_which_platform_suits_it(mixed: Project) -> None:
    for target in ("any", "other"):
        ran = mixed.call(
            "pull", "remote", "--tag", "llama:t", "--cache", target, "--json",
            env={"HOSTILE_RUNS": target},
        )  # fmt: skip
        assert ran.status == 0
        assert ran.document["platform"]["target"] == target


def test_a_config_and_an_option_say_it_too(mixed: Project) -> None:
    for number, (words, target) in enumerate(
        [
            (("--config", "config.yaml"), "any"),
            (("--config", "other.yaml"), "other"),
            (("--platform", "target=other"), "other"),
            (("--platform", "toolchain=hostile", "--platform", "target=any"), "any"),
        ]
    ):
        # What is named is pulled whether it runs here or not: this may be a mirror.
        ran = mixed.call(
            "pull", "remote", "--tag", "llama:t", *words, "--cache", f"c{number}", "--json",
            env={"HOSTILE_RUNS": target if "--config" in words else "neither"},
        )  # fmt: skip
        assert ran.status == 0, ran
        assert ran.document["platform"]["target"] == target
    assert mixed.call("plan", "config.yaml", "--check", "--cache", "c0").status == 0
    assert mixed.call("plan", "other.yaml", "--check", "--cache", "c1").status == 0


def test_where_none_or_several_suit_the_message_lists_what_is_there(mixed: Project) -> None:
    pull = ("pull", "remote", "--tag", "llama:t", "--cache", "c", "--json")
    several = mixed.call(*pull)
    assert several.status == 3
    assert "several platforms that suit this host" in several.error["message"]
    none = mixed.call(*pull, env={"HOSTILE_RUNS": "neither"})
    assert none.status == 3
    for target in ("any", "other"):
        assert f"hostile, native, {target}, hostile 1.0" in several.error["message"]
        assert f"{target}, hostile 1.0 (this host runs neither)" in none.error["message"]
    assert "--platform" in none.error["hint"]
    gone = mixed.call(*pull, "--platform", "target=trn2")
    assert "its target is any" in gone.error["message"]
    unknown = mixed.run(*pull, env={"PYTHONPATH": ""})
    assert unknown.status == 3
    assert "no toolchain named 'hostile' is installed" in unknown.error["message"]
    assert mixed.call(*pull, "--platform", "target").status == 2
    assert not (mixed.root / "c/v1").exists()


def test_a_partial_manifest_is_refused_unless_allowed(builder: Project) -> None:
    # As many KV blocks as the compiled config has by default: its units are units of this one too.
    blocks = 4 * 4096 // 32 + 1
    builder.write(
        "more.yaml",
        max_num_seqs=8,
        num_gpu_blocks_override=blocks,
        sections={"cache": {"name": "llama"}},
    )
    push = ("push", "more.yaml", "--to", "remote", "--tag", "partial")
    assert builder.call(*push, "--allow-partial").status == 0
    pull = ("pull", "remote", "--tag", "llama:partial", "--cache", "c", "--json")
    refused = builder.call(*pull, "--ready-file", "ready")
    assert refused.status == 1
    assert (
        "lacks 2 of its plan's units: decode_b8_ctx1024, decode_b8_ctx4096"
        in refused.err + (refused.error["message"])
    )
    assert not (builder.root / "ready").exists()
    pulled = builder.call(*pull, "--allow-partial")
    assert (pulled.status, pulled.document["missing"]) == (0, 2)


def test_the_ready_file_comes_last_and_never_speaks_of_an_earlier_pull(builder: Project) -> None:
    ready = builder.root / "ready"
    pull = ("pull", "remote", "--tag", "llama:t", "--cache", "c", "--ready-file", "ready", "--json")
    ran = builder.call(*pull)
    assert ran.status == 0
    assert json.loads(ready.read_text()) == ran.document

    blob = next(path for path in (builder.root / "remote/v1/blobs").rglob("*") if path.is_file())
    content = blob.read_bytes()
    blob.write_bytes(bytes(len(content)))
    shutil.rmtree(builder.root / "c")
    assert builder.call(*pull).status == 4
    assert not ready.exists()
    assert list((builder.root / "c/v1").glob("entries/*")) == []

    # Going on: only what is still missing is fetched.
    blob.write_bytes(content)
    again = builder.call(*pull).document
    assert again["blobs_copied"] < ran.document["blobs_copied"]
    assert ready.exists()
    assert builder.call(*pull[:-2], "no/such/folder/ready", "--json").status == 3


def test_a_fleet_starts_spread_out(builder: Project) -> None:
    began = time.monotonic()
    ran = builder.run("pull", "remote", "--tag", "llama:t", "--cache", "c", "--jitter", "1s")
    assert ran.status == 0
    assert "waiting before the pull seconds=" in ran.err
    assert time.monotonic() - began < 60
    assert builder.run("pull", "remote", "--tag", "llama:t", "--jitter", "x").status == 2


def test_doctor_tells_how_remotes_are_reached(builder: Project) -> None:
    (builder.root / "file").write_text("in the way")
    remotes = [{"url": "remote", "mode": "ro"}, {"url": "file"}]
    builder.write("remotes.yaml", sections={"cache": {"remotes": remotes}})
    ran = builder.run("doctor", "remotes.yaml", "--json")
    assert ran.status == 3
    found = ran.document["remotes"]
    assert [one["ok"] for one in found] == [True, False]
    assert found[0]["mode"] == "ro"
    assert found[0]["settings"]["path"] == str(builder.root / "remote")
    assert found[0]["settings"]["writable"] is True
    assert found[0]["tags"] == ["llama:t"]
    assert "cannot list" in found[1]["detail"]
    assert (
        f"remote {Path(builder.root, 'remote')} (ro): ok"
        in builder.run("doctor", "remotes.yaml").out
    )
    assert builder.run("doctor", "--remote", "remote").status == 0
    bucket = "s3://bucket/prefix?endpoint=http://127.0.0.1:9&retry_seconds=0&region=eu-west-1"
    environment = {"AWS_ACCESS_KEY_ID": "ci", "AWS_SECRET_ACCESS_KEY": "ci-secret"}
    [one] = builder.run("doctor", "--remote", bucket, "--json", env=environment).document["remotes"]
    assert one["ok"] is False
    assert one["settings"]["endpoint"] == "http://127.0.0.1:9"
    assert one["settings"]["region"] == "eu-west-1"
    assert one["settings"]["path_style"] is True
    assert "ci-secret" not in json.dumps(one)


def test_a_ready_file_replaces_no_device_and_no_folder(builder: Project) -> None:
    pipe = builder.root / "pipe"
    os.mkfifo(pipe)
    (builder.root / "folder").mkdir()
    for name in ("pipe", "folder"):
        ran = builder.call(
            "pull", "remote", "--tag", "llama:t", "--cache", "c", "--ready-file", name
        )
        assert ran.status in (2, 3)
        assert name in ran.err
    assert pipe.is_fifo()
