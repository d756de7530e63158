"""`--shard`, `merge-report` and pushing what shards compiled: a CI matrix from end to end."""

from __future__ import annotations

import json
import shutil
import subprocess
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from cli_samples import EAGLE3, INDUCTOR, UNITS, Project, order


def names(document: dict[str, Any]) -> list[str]:
    return [unit["bucket_name"] for unit in document["units"]]


def planned(project: Project, config: str, shard: str, *words: str) -> dict[str, Any]:
    ran = project.call("plan", config, "--shard", shard, "--json", *words)
    assert ran.status == 0, ran
    return ran.document


def without_measurements(document: dict[str, Any]) -> dict[str, Any]:
    """What two runs of one config have in common."""
    measured = {"compile_seconds", "peak_memory_bytes"}
    units = [{k: v for k, v in unit.items() if k not in measured} for unit in document["units"]]
    return {"units": units, "counts": document["counts"]}


@pytest.fixture
def spec(project: Project) -> str:
    return project.write(toolchain=INDUCTOR, speculative_config=EAGLE3)


def test_shards_of_a_plan_are_the_plan(project: Project, spec: str) -> None:
    whole = names(project.call("plan", spec, "--json").document)
    parts = [planned(project, spec, f"{index}/4") for index in range(1, 5)]
    assert sorted(chain.from_iterable(map(names, parts))) == sorted(whole)
    for index, part in enumerate(parts):
        assert part["shard"] == {"index": index + 1, "count": 4, "of_units": len(whole)}
        assert part["counts"]["units"] == len(part["units"])
        assert names(part) == [name for name in whole if name in names(part)]
    text = project.call("plan", spec, "--shard", "2/4").out
    assert f"shard 2/4: {len(parts[1]['units'])} of 18 units" in text
    assert f"next: neffbuild compile --shard 2/4 {spec}" in text


def test_what_a_cache_holds_and_hash_seeds_do_not_move_units(project: Project) -> None:
    config = project.write()
    before = [names(planned(project, config, f"{index}/3")) for index in (1, 2, 3)]
    assert project.run("compile", config, "--only", "*_ctx1024").status == 0
    for index, seed in enumerate(("0", "1", "12345")):
        words = ["--shard", f"{index + 1}/3", "--json"]
        ran = project.run("plan", config, *words, env={"PYTHONHASHSEED": seed})
        assert names(ran.document) == before[index]


def test_a_pattern_is_split_and_matches_for_every_shard(project: Project) -> None:
    config = project.write()
    for shard, expected in (("1/2", 1), ("2/2", 2)):
        ran = project.run("compile", config, "--only", "*_ctx4096", "--shard", shard, "--json")
        assert ran.status == 0
        assert len(ran.document["units"]) == expected
        assert ran.document["shard"]["of_units"] == 3


def test_more_shards_than_units_leave_some_with_nothing(project: Project) -> None:
    config = project.write()
    ran = project.run("compile", config, "--shard", "9/9")
    assert ran.status == 0
    assert ran.out == "shard 9/9: 0 of 6 units\nnothing to do: no unit is chosen\n"
    ran = project.run("compile", config, "--shard", "7/9", "--json")
    assert (ran.status, ran.document["units"]) == (0, [])
    assert project.call("plan", config, "--shard", "9/9", "--check").status == 0


@pytest.mark.parametrize("shard", ["0/8", "9/8", "garbage", "auto"])
def test_a_shard_there_is_not_is_refused(project: Project, shard: str) -> None:
    config = project.write()
    for command in ("compile", "plan"):
        ran = project.call(command, config, "--shard", shard, "--json")
        assert ran.status == 2
        assert ran.error["field"] == "--shard"
        assert "3/8" in ran.error["hint"]
    assert not project.cache.exists()


def test_a_scheduler_says_which_shard_it_is(project: Project) -> None:
    config = project.write()
    array = {"AWS_BATCH_JOB_ARRAY_INDEX": "1", "AWS_BATCH_JOB_ARRAY_SIZE": "3"}
    ran = project.run("compile", config, "--shard", "auto", "--json", env=array)
    assert ran.document["shard"] == {"index": 2, "count": 3, "of_units": 6}
    indexed = {"JOB_COMPLETION_INDEX": "1"}
    again = project.run("compile", config, "--shard", "auto/3", "--json", env=indexed)
    assert again.document["counts"] == {"built": 0, "cached": 2, "failed": 0}
    assert names(again.document) == names(ran.document)


class TestAMatrixOfThree:
    """Three machines with nothing in common but the config and one remote."""

    @pytest.fixture
    def remote(self, tmp_path: Path) -> str:
        return str(tmp_path / "remote")

    def compiled(self, project: Project, config: str, index: int, remote: str) -> str:
        """The file that a shard's report was written to."""
        words = ["--shard", f"{index}/3", "--cache", f"cache-{index}", "--remote", remote, "--json"]
        ran = project.run("compile", config, *words)
        assert ran.document["remotes"][0]["published"] == ran.document["counts"]["built"]
        name = f"shard-{index}.json"
        (project.root / name).write_text(ran.out, encoding="utf-8")
        return name

    def test_is_reported_as_one_and_pushed_from_a_fourth(
        self, project: Project, remote: str
    ) -> None:
        config = project.write()
        files = [self.compiled(project, config, index, remote) for index in (3, 1, 2)]
        merged = project.call("merge-report", *files, "--json")
        assert merged.status == 0
        assert names(merged.document) == UNITS
        alone = project.run("compile", config, "--cache", "alone", "--json")
        assert without_measurements(merged.document) == without_measurements(alone.document)
        assert merged.document["remotes"][0]["published"] == 6
        text = project.call("merge-report", *files).out
        assert "6 units: " in text
        assert "3 reports, the longest of " in text

        # Nothing may be compiled from here on.
        project.write(toolchain={"name": "hostile"})
        push = ["push", config, "--cache", "fourth", "--remote", remote, "--tag", "v1"]
        pushed = project.call(*push, "--json")
        assert pushed.status == 0
        assert pushed.document["units"] == pushed.document["units_fetched"] == 6
        assert pushed.document["blobs_copied"] == 0
        assert project.call("verify", remote, "--tag", "default:v1").status == 0
        # Each shard's own work is all that it fetched or built.
        for index in (1, 2, 3):
            assert len(list((project.root / f"cache-{index}/v1/entries").rglob("*.json"))) == 2
        pull = ["pull", remote, "--tag", "default:v1", "--cache", "serving"]
        assert project.call(*pull).status == 0
        assert project.call("plan", config, "--cache", "serving", "--check").status == 0

    def test_runs_again_and_finds_its_own_work(self, project: Project, remote: str) -> None:
        """A machine that is lost and replaced: its cache is gone, the remote is not."""
        config = project.write()
        self.compiled(project, config, 2, remote)
        shutil.rmtree(project.root / "cache-2")
        name = self.compiled(project, config, 2, remote)
        assert json.loads((project.root / name).read_text())["counts"]["cached"] == 2

    def test_lacks_a_shard(self, project: Project, remote: str) -> None:
        config = project.write()
        files = [self.compiled(project, config, index, remote) for index in (1, 3)]
        merged = project.call("merge-report", *files)
        assert merged.status == 1
        assert "2 more units are in none of the reports: no report of shard 2/3" in merged.out
        assert project.call("merge-report", *files, "--json").document["absent_units"] == 2
        push = ["push", config, "--cache", "fourth", "--remote", remote]
        refused = project.call(*push)
        assert refused.status == 1
        assert "2 of the plan's units are not stored" in refused.err
        assert "fetched 4 units" in project.call(*push, "--allow-partial", "--cache", "fifth").out

    def test_has_a_unit_that_fails(self, project: Project, remote: str) -> None:
        config = project.write(control=order(project.root, b2_ctx1024="exit_70"))
        files = [self.compiled(project, config, index, remote) for index in (1, 2, 3)]
        merged = project.call("merge-report", *files, "--json")
        assert merged.status == 1
        assert merged.document["counts"] == {"built": 5, "cached": 0, "failed": 1}
        assert "failed" in project.call("merge-report", *files).out
        # Built at a second try, which another report says.
        order(project.root)
        again = project.run(
            "compile", config, "--remote", remote, "--cache", "again", "--json", "--only", "*_b2_*"
        )
        (project.root / "again.json").write_text(again.out, encoding="utf-8")
        merged = project.call("merge-report", *files, "again.json", "--json")
        assert merged.status == 0
        assert merged.document["counts"] == {"built": 6, "cached": 0, "failed": 0}

    def test_shares_nothing_but_files(self, project: Project, tmp_path: Path) -> None:
        """Without a remote: each machine hands over its cache, as CI jobs do with artifacts."""
        config = project.write()
        for index in (1, 2, 3):
            words = ["--shard", f"{index}/3", "--cache", f"cache-{index}"]
            assert project.run("compile", config, *words).status == 0
            packed = ["tar", "-C", f"cache-{index}", "--exclude=v1/loaded", "-czf"]
            subprocess.run([*packed, f"cache-{index}.tar.gz", "v1"], check=True, cwd=project.root)
            imported = ["import", f"cache-{index}.tar.gz", "--cache", "fourth"]
            assert project.call(*imported).status == 0
        push = ["push", config, "--cache", "fourth", "--to", str(tmp_path / "store"), "--tag", "v1"]
        pushed = project.call(*push, "--json")
        assert (pushed.document["units"], pushed.document["units_fetched"]) == (6, 0)

    def test_is_not_believed_unsigned_where_signatures_are_required(
        self, project: Project, remote: str
    ) -> None:
        config = project.write()
        for index in (1, 2, 3):
            self.compiled(project, config, index, remote)
        assert project.call("keygen", "--out", "key").status == 0
        keys = {"keys": ["key.pub"]}
        push = ["--cache", "fourth", "--remote", remote, "--tag", "v1", "--key", "key.key"]
        signed = project.write("signed.yaml", sections={"cache": keys})
        refused = project.call("push", signed, *push)
        assert refused.status == 1
        assert "remotes are not read, as signatures are required" in refused.err
        trusting = project.write(
            "trusting.yaml", sections={"cache": {**keys, "require_signature": False}}
        )
        assert project.call("push", trusting, *push).status == 0
        # Whoever serves believes the tag, which is signed.
        verified = project.call("verify", remote, "--tag", "default:v1", "--key", "key.pub")
        assert verified.status == 0


def test_a_failed_shard_names_how_to_try_it_again(project: Project) -> None:
    config = project.write(control=order(project.root, b1_ctx1024="exit_70"))
    [index] = [
        index
        for index in (1, 2)
        if "decode_b1_ctx1024" in names(planned(project, config, f"{index}/2"))
    ]
    ran = project.run("compile", config, "--shard", f"{index}/2")
    assert ran.status == 1
    assert f"try again: neffbuild compile --shard {index}/2 {config}" in ran.out


def test_merge_report_moves_no_cursor(project: Project) -> None:
    """A report is what some other machine has written."""
    report = {
        "schema": "neffbuild.run/1",
        "wall_seconds": 1.0,
        "units": [
            {
                "bucket_name": "decode_b1\x1b[2J",
                "family": "target",
                "key": None,
                "outcome": "failed",
                "compile_seconds": None,
                "peak_memory_bytes": None,
                "artifact_bytes": None,
                "cause": "bad\r\x9b31m\u202e",
            }
        ],
    }
    (project.root / "odd\x07.json").write_text(json.dumps(report), encoding="utf-8")
    ran = project.run("merge-report", "odd\x07.json")
    assert ran.status == 1
    assert "decode_b1\\x1b[2J" in ran.out
    assert "bad\\r\\x9b31m\\u202e" in ran.out
    as_json = project.run("merge-report", "odd\x07.json", "--json")
    assert as_json.document["units"] == report["units"]
    missing = project.run("merge-report", "no\x07.json")
    for text in (ran.out, as_json.out, missing.err):
        assert all(line.isprintable() for line in text.splitlines())


def test_merge_report_refuses_what_is_no_report(project: Project) -> None:
    (project.root / "broken.json").write_text("{", encoding="utf-8")
    ran = project.call("merge-report", "broken.json", "--json")
    assert ran.status == 2
    assert "broken.json is not valid JSON" in ran.error["message"]
    ran = project.call("merge-report")
    assert ran.status == 2
