"""`neffbuild gc` as users start it."""

from __future__ import annotations

import os
import shutil
import time

import pytest
from cli_samples import UNITS, Project


@pytest.fixture
def builder(compiled: Project, project: Project) -> Project:
    """A project with a full cache of its own."""
    project.write(sections={"cache": {"name": "llama"}})
    shutil.copytree(compiled.cache, project.cache)
    return project


@pytest.fixture
def remote(builder: Project) -> str:
    """A store with a tag, and with units that no tag reaches; everything in it is a month old."""
    assert builder.call("push", "config.yaml", "--to", "remote", "--tag", "v1").status == 0
    builder.write("other.yaml", max_num_seqs=2, sections={"cache": {"name": "other"}})
    assert builder.run("compile", "other.yaml").status == 0
    assert builder.call("push", "other.yaml", "--to", "remote").status == 0
    then = time.time() - 30 * 86400
    for path in (builder.root / "remote").rglob("*"):
        os.utime(path, (then, then))
    return "remote"


def test_a_dry_run_says_what_would_go_and_delete_removes_it(builder: Project, remote: str) -> None:
    shown = builder.call("gc", remote, "--untagged", "--json").document
    assert shown["deleted"] is False
    kinds = {one["kind"] for one in shown["removed"]}
    assert {"index", "manifest"} <= kinds
    assert (
        builder.call("gc", remote, "--untagged", "--json").document["removed"] == shown["removed"]
    )
    said = builder.call("gc", remote, "--untagged").out
    assert "would be removed from" in said
    assert "add --delete to remove it" in said

    done = builder.call("gc", remote, "--untagged", "--delete", "--json").document
    assert done["deleted"] is True
    assert done["removed"] == shown["removed"]
    assert done["entries_kept"] == len(UNITS)
    assert builder.call("gc", remote, "--untagged", "--json").document["removed"] == []
    assert builder.call("verify", remote).status == 0


def test_what_a_tag_reaches_stays_above_any_size(builder: Project, remote: str) -> None:
    ran = builder.call(
        "gc", remote, "--max-size", "1KiB", "--older-than", "1d", "--delete", "--json"
    )
    assert ran.status == 0
    assert ran.document["bytes_over_max_size"] == ran.document["bytes_kept"] - 1024
    assert builder.call("pull", remote, "--tag", "llama:v1", "--cache", "fresh").status == 0
    assert builder.call("verify", remote).status == 0


@pytest.mark.parametrize(
    ("words", "status", "field"),
    [
        (("gc", "nowhere"), 3, None),
        (("gc", "remote", "--older-than", "soon"), 2, "--older-than"),
        (("gc", "remote", "--max-size", "big"), 2, "--max-size"),
        (("gc", "remote", "--max-size", "-1"), 2, "--max-size"),
        (("gc", "remote", "--grace", "0"), 2, "--grace"),
        (("gc", "remote", "--keep-tag", "nothing"), 2, "tag"),
        (("gc", "remote", "--keep-tag", "no:thing"), 2, "--keep-tag"),
        (("gc", "ftp://remote"), 2, "url"),
    ],
)
def test_bad_input_is_named(
    project: Project, words: tuple[str, ...], status: int, field: str | None
) -> None:
    (project.root / "remote/v1/runs").mkdir(parents=True)
    (project.root / "remote/v1/runs/1.json").write_text("{}")
    ran = project.call(*words, "--json")
    assert ran.status == status
    assert ran.error["field"] == field
