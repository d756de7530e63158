"""keygen, push, pull, verify, promote and diff as a user types them."""

from __future__ import annotations

import json
import shutil
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cli_samples import Project

TAG = "remote/v1/tags/llama/prod.json"


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A compiled config, and the keys `release` and `stranger`. Tests work on copies."""
    project = Project(tmp_path_factory.mktemp("compiled"))
    assert project.run("compile", project.write()).status == 0
    for name in ("release", "stranger"):
        assert project.call("keygen", "--out", name).status == 0
    return project


@pytest.fixture
def project(tmp_path: Path, compiled: Project) -> Project:
    """`config.yaml` signs and believes nothing; `consumer.yaml` believes the release key."""
    project = Project(tmp_path)
    shutil.copytree(compiled.cache, project.cache)
    for path in compiled.root.glob("*.[kp][eu][yb]"):
        shutil.copy(path, project.root)
    project.write(sections={"cache": {"name": "llama"}})
    consumer(project)
    return project


def consumer(project: Project, **cache: Any) -> None:
    section = {"name": "llama", "local": "served", "keys": ["release.pub"], **cache}
    project.write("consumer.yaml", sections={"cache": section})


def push(project: Project, tag: str = "prod", *words: str, key: str = "release.key") -> Any:
    ran = project.call(
        "push", "config.yaml", "--to", "remote", "--tag", tag, "--key", key, "--json", *words
    )
    assert ran.status == 0, ran
    return ran.document


def pull(project: Project, *words: str) -> Any:
    return project.call("pull", "remote", "--tag", "prod", "--config", "consumer.yaml", *words)


class TestKeygen:
    def test_two_files_the_private_one_for_its_owner(self, project: Project) -> None:
        document = project.call("keygen", "--out", "keys-of-mine", "--json").document
        assert document["private_key"] == "keys-of-mine.key"
        assert document["algorithm"] == "ed25519"
        private = project.root / document["private_key"]
        assert stat.S_IMODE(private.stat().st_mode) == 0o600
        assert (project.root / document["public_key"]).read_text().startswith("-----BEGIN PUBLIC")
        shown = project.call("keygen", "--out", "a.b", "--algorithm", "ecdsa").out
        assert "private key a.b.key" in shown
        assert "PRIVATE KEY" not in shown

    def test_nothing_is_overwritten(self, project: Project) -> None:
        before = (project.root / "release.key").read_bytes()
        ran = project.call("keygen", "--out", "release", "--json")
        assert ran.status == 2
        assert ran.error["field"] == "--out"
        assert (project.root / "release.key").read_bytes() == before

    def test_a_folder_that_is_not_there(self, project: Project) -> None:
        assert "No such file" in project.call("keygen", "--out", "none/it").err


class TestPushAndPull:
    def test_from_key_to_cache(self, project: Project) -> None:
        pushed = push(project, "prod", "--expires", "30d")
        assert pushed["sequence"] == 1
        left = datetime.fromisoformat(pushed["expires"]) - datetime.now(UTC)
        assert timedelta(days=29, hours=23) < left <= timedelta(days=30)
        tag = json.loads((project.root / TAG).read_text())
        assert [one["keyid"] for one in tag["signatures"]] == [pushed["signed_by"]]
        assert (project.root / f"remote/v1/attestations/{pushed['manifest']}.json").is_file()

        pulled = pull(project, "--json")
        assert pulled.status == 0, pulled
        assert pulled.document["sequence"] == 1
        assert (project.root / "served/v1").is_dir()  # as the config says
        words = ["pull", "remote", "--tag", "llama:prod", "--key", "release.pub", "--cache", "c"]
        assert project.call(*words).status == 0
        shown = project.call("push", "config.yaml", "--to", "remote", "--key", "release.key").out
        assert f"signed by {pushed['signed_by']}" in shown

    @pytest.mark.parametrize(
        "words",
        [
            ["--config", "consumer.yaml"],
            ["--key", "release.pub"],
            ["--key", "release.pub", "--require-signature"],
            ["--config", "lenient.yaml", "--key", "release.pub"],
            ["--config", "lenient.yaml", "--require-signature"],
        ],
    )
    @pytest.mark.parametrize("what", ["unsigned", "stranger"])
    def test_what_is_not_signed_by_a_believed_key_is_refused(
        self, project: Project, words: list[str], what: str
    ) -> None:
        lenient = {"name": "llama", "keys": ["release.pub"], "require_signature": False}
        project.write("lenient.yaml", sections={"cache": lenient})
        key = ["--key", "stranger.key"] if what == "stranger" else []
        target = ["push", "config.yaml", "--to", "remote", "--tag", "prod"]
        assert project.call(*target, *key).status == 0
        for command in (["pull"], ["verify"]):
            ran = project.call(*command, "remote", "--tag", "llama:prod", *words, "--cache", "c")
            assert ran.status == 4, (command, ran)
        ran = project.call("pull", "remote", "--tag", "llama:prod", *words, "--json")
        assert ran.error["kind"] == "integrity"

    def test_keys_without_requiring_take_what_is_unsigned(self, project: Project) -> None:
        consumer(project, require_signature=False)
        assert project.call("push", "config.yaml", "--to", "remote", "--tag", "prod").status == 0
        assert pull(project).status == 0

    def test_any_of_several_keys(self, project: Project) -> None:
        push(project, key="stranger.key")
        consumer(project, keys=["release.pub", "stranger.pub"])
        assert pull(project).status == 0

    def test_paths_of_keys_are_relative_to_the_config(self, project: Project) -> None:
        push(project)
        section = {"name": "llama", "local": "served", "keys": ["../release.pub"]}
        project.write("home/consumer.yaml", model="../model", sections={"cache": section})
        words = ["pull", "remote", "--tag", "prod", "--config", "home/consumer.yaml"]
        assert project.call(*words).status == 0
        assert (project.root / "home/served/v1").is_dir()

    def test_a_lowest_sequence(self, project: Project) -> None:
        push(project)
        assert pull(project, "--min-sequence", "2").status == 4
        consumer(project, min_sequence=2)
        assert pull(project).status == 4
        assert pull(project, "--min-sequence", "1").status == 0  # the command line wins
        verify = ["verify", "remote", "--config", "consumer.yaml"]
        assert project.call(*verify, "--tag", "prod").status == 4
        assert project.call(*verify).status == 0  # it is of one tag, not of all

    def test_an_older_tag_served_again(self, project: Project) -> None:
        push(project)
        old = (project.root / TAG).read_bytes()
        push(project)
        assert pull(project).status == 0
        (project.root / TAG).write_bytes(old)
        ran = pull(project, "--json")
        assert ran.status == 4
        assert "sequence 1; 2" in ran.error["message"]
        found = project.call(
            "verify", "remote", "--tag", "prod", "--config", "consumer.yaml", "--json"
        )
        assert [one["kind"] for one in found.document["problems"]] == ["rollback"]

    def test_a_damaged_tag_is_not_pushed_over_but_promoted_over(self, project: Project) -> None:
        index = push(project)["index"]
        (project.root / TAG).write_bytes(b"{half")
        words = ["--key", "release.key", "--json"]
        ran = project.call("push", "config.yaml", "--to", "remote", "--tag", "prod", *words)
        assert ran.status == 4
        assert "tags/llama/prod.json" in ran.error["message"]
        assert "neffbuild promote URL --from DIGEST" in ran.error["hint"]
        assert (project.root / TAG).read_bytes() == b"{half"
        ran = project.call("promote", "remote", "--from", index, "--to", "llama:prod", *words)
        assert ran.document["index"] == index
        assert pull(project).status == 0

    def test_a_damaged_memory_is_named_and_removing_it_goes_on(self, project: Project) -> None:
        push(project)
        assert pull(project).status == 0
        [record] = (project.root / "served/v1/seen").iterdir()
        record.write_bytes(b"{half")
        ran = pull(project, "--json")
        assert ran.status == 4
        assert str(record) in ran.error["message"]
        assert "remove this file" in ran.error["hint"]
        record.unlink()
        assert pull(project).status == 0

    def test_a_changed_artifact_is_never_visible(self, project: Project) -> None:
        push(project)
        blob = max((project.root / "remote/v1/blobs").rglob("*"), key=lambda p: p.is_file())
        blob.write_bytes(blob.read_bytes()[::-1] + b"x")
        assert pull(project).status == 4
        ran = project.call("replay", "consumer.yaml", "--steps", "5", "--json")
        assert ran.document["hits"] == 0

    def test_a_key_by_environment(self, project: Project) -> None:
        project.environment["NEFFBUILD_SIGNING_KEY"] = "release.key"
        ran = project.call("push", "config.yaml", "--to", "remote", "--tag", "prod", "--json")
        assert len(ran.document["signed_by"]) == 64
        assert pull(project).status == 0

    def test_whoever_believes_must_sign(self, project: Project) -> None:
        ran = project.call("push", "consumer.yaml", "--to", "remote", "--json")
        assert ran.status == 2
        assert ran.error["field"] == "--key"
        assert not (project.root / "remote").exists()

    def test_a_stranger_cannot_push_to_a_signed_tag(self, project: Project) -> None:
        push(project)
        before = (project.root / TAG).read_bytes()
        target = ["push", "config.yaml", "--to", "remote", "--tag", "prod"]
        assert project.call(*target, "--key", "stranger.key").status == 4
        assert project.call(*target).status == 2
        assert (project.root / TAG).read_bytes() == before


class TestPromoteAndDiff:
    def test_staging_becomes_prod_and_back(self, project: Project) -> None:
        first = push(project, "staging")
        words = ["promote", "remote", "--config", "consumer.yaml", "--key", "release.key"]
        moved = project.call(*words, "--from", "staging", "--to", "prod", "--json").document
        assert (moved["name"], moved["tag"], moved["sequence"]) == ("llama", "prod", 1)
        assert (moved["index"], moved["previous_index"]) == (first["index"], None)
        assert [one["units"] for one in moved["manifests"]] == [6]
        assert pull(project).status == 0

        project.write("config.yaml", sections={"cache": {"name": "llama"}}, dtype="float32")
        assert project.run("compile", "config.yaml").status == 0
        push(project, "staging")
        diff = ["diff", "remote", "--config", "consumer.yaml", "--from", "prod", "--to", "staging"]
        ran = project.call(*diff, "--json")
        assert ran.status == 0
        assert ran.document["different"]
        assert ran.document["counts"]["changed"] == 6
        [platform] = ran.document["platforms"]
        assert "serve.dtype" in platform["units"][0]["ingredients"]
        assert project.call(*diff, "--check").status == 1
        shown = project.call(*diff).out
        assert "  ~ decode_b1_ctx1024  " in shown
        assert shown.endswith("prod → staging: 0 added, 0 removed, 6 changed, 0 unchanged\n")

        shown = project.call(*words, "--from", "staging", "--to", "prod", "--expires", "1w").out
        assert "promoted staging to llama:prod, sequence 2" in shown
        assert "expires " in shown
        assert project.call(*diff, "--check").status == 0
        [back] = [line for line in shown.splitlines() if line.startswith("back with: ")]
        assert back.endswith(f"--from {first['index']} --to llama:prod --key release.key")
        ran = project.call(*back.removeprefix("back with: neffbuild ").split(), "--json")
        assert ran.document["sequence"] == 3
        assert ran.document["index"] == first["index"]
        assert pull(project).status == 0

    def test_without_a_config_keys_are_named(self, project: Project) -> None:
        push(project, "staging", key="stranger.key")
        words = ["promote", "remote", "--from", "llama:staging", "--to", "llama:prod"]
        words += ["--key", "release.key"]
        assert project.call(*words).status == 4
        assert project.call(*words, "--trusted-key", "stranger.pub").status == 0
        assert pull(project).status == 0
        diff = ["diff", "remote", "--from", "llama:staging", "--to", "llama:prod"]
        assert project.call(*diff, "--key", "release.pub").status == 4
        assert project.call(*diff, "--key", "release.pub", "--key", "stranger.pub").status == 0

    def test_a_broken_source_is_not_promoted(self, project: Project) -> None:
        push(project, "staging")
        blob = max((project.root / "remote/v1/blobs").rglob("*"), key=lambda p: p.is_file())
        blob.unlink()
        words = ["promote", "remote", "--from", "llama:staging", "--to", "llama:prod", "--json"]
        ran = project.call(*words, "--key", "release.key")
        assert ran.status == 4
        assert not (project.root / TAG).exists()

    def test_diff_is_of_old_tags_too(self, project: Project) -> None:
        push(project)
        consumer(project, min_sequence=9)
        words = ["diff", "remote", "--config", "consumer.yaml", "--from", "prod", "--to", "prod"]
        assert project.call(*words).status == 0


CASES = {
    "duration": (["push", "config.yaml", "--to", "r", "--expires", "soon"], "--expires"),
    "no time": (["push", "config.yaml", "--to", "r", "--expires", "0d"], "--expires"),
    "for ever": (["push", "config.yaml", "--to", "r", "--expires", "9999999w"], "--expires"),
    "no such key": (["push", "config.yaml", "--to", "r", "--key", "none.key"], "--key"),
    "no such service": (["push", "config.yaml", "--to", "r", "--key", "kms9:x"], "--key"),
    "which public key": (
        ["push", "config.yaml", "--to", "r", "--key", "awskms:alias/x"],
        "--public-key",
    ),
    "public for private": (["push", "config.yaml", "--to", "r", "--key", "release.pub"], "--key"),
    "private for public": (
        ["pull", "r", "--tag", "a:b", "--key", "release.key"],
        "cache.keys",
    ),
    "no keys": (["pull", "r", "--tag", "a:b", "--require-signature"], "cache.keys"),
    "below zero": (["pull", "r", "--tag", "a:b", "--min-sequence", "-1"], "--min-sequence"),
    "sequence of what": (["verify", ".", "--min-sequence", "2"], "--min-sequence"),
    "keys of a config": (["verify", "config.yaml", "--key", "release.pub"], "--key"),
    "config of a config": (["verify", "config.yaml", "--config", "consumer.yaml"], "--config"),
    "promote to a digest": (["promote", "r", "--from", "a:b", "--to", "0" * 64], "tag"),
    "a tag without a name": (["promote", "r", "--from", "staging", "--to", "a:b"], "tag"),
    "promote unsigned": (
        ["promote", "r", "--from", "a:b", "--to", "a:c", "--config", "consumer.yaml"],
        "--key",
    ),
    "promote from nothing": (["promote", "r", "--to", "a:b"], "--from"),
    "diff with nothing": (["diff", "r", "--from", "a:b"], "--to"),
    "unknown algorithm": (["keygen", "--algorithm", "md5"], "--algorithm"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_on_the_command_line_is_named(project: Project, case: str) -> None:
    words, field = CASES[case]
    ran = project.call(*words, "--json")
    assert ran.status == 2, ran
    assert ran.error["field"] == field, ran


def test_planning_a_config_with_keys_needs_no_signatures(project: Project) -> None:
    """Signatures are of what moves between stores; the local cache is one's own."""
    for command in ("plan", "verify"):
        assert project.call(command, "consumer.yaml", "--cache", "cache").status == 0
