"""`cache.remotes`: plan and compile in front of other stores."""

from __future__ import annotations

import shutil
from pathlib import Path

from cli_samples import UNITS, Project


def with_remotes(project: Project, *remotes: dict[str, str]) -> str:
    return project.write(sections={"cache": {"remotes": list(remotes)}})


def test_hits_of_a_read_only_remote_are_fetched_and_the_rest_built_locally(
    compiled: Project, project: Project
) -> None:
    """Half of the units are in the remote; it is not written to."""
    remote = project.root / "remote"
    shutil.copytree(compiled.cache, remote)
    for entry in sorted((remote / "v1/entries").rglob("*.json"))[:3]:
        entry.unlink()
    before = set(remote.rglob("*"))
    config = with_remotes(project, {"url": "remote", "mode": "ro"})

    planned = project.call("plan", config, "--json").document
    assert (planned["counts"]["cached"], planned["counts"]["missing"]) == (3, 3)
    ran = project.run("compile", config, "--json")
    assert ran.status == 0
    assert ran.document["counts"] == {"built": 3, "cached": 3, "failed": 0}
    [counts] = ran.document["remotes"]
    assert (counts["mode"], counts["hits"], counts["published"]) == ("ro", 3, 0)
    assert (counts["faults"], counts["last_fault"]) == (0, None)
    assert set(remote.rglob("*")) == before
    assert project.call("verify", config).status == 0
    shown = project.call("plan", config).out
    assert f"remote: {remote} (ro): 0 hits" in shown


def test_what_is_built_goes_to_a_writable_remote_where_others_find_it(project: Project) -> None:
    config = with_remotes(project, {"url": "remote"})
    ran = project.run("compile", config, "--json")
    assert ran.document["counts"]["built"] == len(UNITS)
    assert ran.document["remotes"][0]["published"] == len(UNITS)
    assert project.call("verify", str(project.root / "remote")).status == 0

    other = project.run("compile", config, "--cache", "other", "--json")
    assert other.document["counts"] == {"built": 0, "cached": len(UNITS), "failed": 0}
    assert project.call("plan", config, "--cache", "other", "--check").status == 0


def test_a_remote_that_fails_does_not_stand_in_the_way(project: Project) -> None:
    (project.root / "remote").write_text("not a directory")
    config = with_remotes(project, {"url": "remote"})
    planned = project.call("plan", config, "--json")
    assert planned.status == 0
    assert planned.document["remotes"][0]["faults"] == 1
    ran = project.run("compile", config)
    assert ran.status == 0
    assert ran.err.count("a remote failed and is left alone") == 1
    assert "FAILED: cannot read" in ran.out
    assert project.call("verify", config).status == 0


def test_remote_option_stands_for_the_configs_remotes(compiled: Project, project: Project) -> None:
    config = with_remotes(project, {"url": "nowhere"})
    ran = project.call("plan", config, "--check", "--remote", str(compiled.cache))
    assert ran.status == 0
    assert "nowhere" not in ran.out
    assert not Path(project.root / "nowhere").exists()


def test_nothing_unsigned_is_taken_where_signatures_are_required(
    compiled: Project, project: Project
) -> None:
    remotes = [{"url": str(compiled.cache), "mode": "ro"}]
    config = project.write(sections={"cache": {"remotes": remotes, "require_signature": True}})
    planned = project.call("plan", config, "--json").document
    assert planned["counts"]["cached"] == 0
    assert planned["remotes"][0]["readable"] is False
    assert "not read" in project.call("plan", config).out
