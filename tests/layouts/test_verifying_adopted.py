"""`neffbuild verify CONFIG` and what was adopted for the config: checked, counted, named, set aside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import foreign_trees as foreign
import pytest
from cli_samples import Project
from foreign_trees import key_of

from neffbuild.cache.directory import DirectoryStore


@pytest.fixture
def fleet(project: Project, tmp_path: Path) -> Path:
    """An engine's cache of two entries, adopted for the project's config."""
    for number in range(2):
        foreign.vllm_entry(tmp_path / "fleet", number)
    take_over(project, tmp_path / "fleet")
    return tmp_path / "fleet"


def take_over(project: Project, fleet: Path, *words: str) -> None:
    line = ("import", str(fleet), "--layout", "vllm-neuron", "--config", "config.yaml", *words)
    assert project.call(*line).status == 0


def of_adopted(document: dict[str, Any]) -> dict[str, str]:
    """Name → kind, of its problems with what was adopted."""
    return {one["adopted"]: one["kind"] for one in document["problems"] if one["adopted"]}


def neff_blob(project: Project, number: int) -> Path:
    for path in (project.cache / "v1" / "entries").glob("*/*.json"):
        for name, record in json.loads(path.read_bytes())["files"].items():
            if name.endswith(f"graph_{key_of(number)}.neff"):
                return DirectoryStore(project.cache).blob_path(record["digest"])
    raise AssertionError(f"no entry has NEFF {number}")


def test_they_are_checked_and_counted(project: Project, fleet: Path) -> None:
    document = project.call("verify", "config.yaml", "--json").document
    assert (document["entries_checked"], document["adopted_checked"]) == (2, 2)
    assert document["blobs_checked"] > 2
    # The plan's own units were never compiled: these alone lack.
    assert {one["kind"] for one in document["problems"]} == {"missing_unit"}
    assert not of_adopted(document)
    assert all(one["unit"] for one in document["problems"])
    shown = project.call("verify", "config.yaml")
    assert "2 entries (2 adopted), " in shown.out
    assert "what was adopted" not in shown.out


def test_where_nothing_was_adopted_nothing_is_said(project: Project) -> None:
    document = project.call("verify", "config.yaml", "--json").document
    assert document["adopted_checked"] == 0
    assert "adopted" not in project.call("verify", "config.yaml").out


def test_a_damaged_one_is_named_and_set_aside_until_it_is_taken_over_again(
    project: Project, fleet: Path
) -> None:
    blob = neff_blob(project, 0)
    blob.write_bytes(blob.read_bytes()[:-1] + b"!")
    ran = project.call("verify", "config.yaml", "--json")
    assert ran.status == 4
    assert of_adopted(ran.document) == {f"vllm-neuron {key_of(0)}": "bad_digest"}
    # It is gone, and the manifest still names it.
    ran = project.call("verify", "config.yaml")
    assert ran.status == 1
    assert f"missing_unit vllm-neuron {key_of(0)}: no entry " in ran.out
    assert "next: neffbuild compile config.yaml" in ran.out
    assert "next: what was adopted: neffbuild import DIR --layout L" in ran.out
    take_over(project, fleet)
    document = project.call("verify", "config.yaml", "--json").document
    assert not of_adopted(document)
    assert document["adopted_checked"] == 2


def test_one_whose_file_is_gone_is_named(project: Project, fleet: Path) -> None:
    neff_blob(project, 1).unlink()
    ran = project.call("verify", "config.yaml", "--json")
    assert ran.status == 4
    assert of_adopted(ran.document) == {f"vllm-neuron {key_of(1)}": "missing_blob"}


def test_a_machine_that_pulled_checks_them_too_and_a_store_counts_no_difference(
    project: Project, fleet: Path
) -> None:
    line = ("--tag", "llama:t", "--allow-partial")
    assert project.call("push", "config.yaml", "--to", "remote", *line).status == 0
    assert project.call("pull", "remote", *line, "--cache", "node").status == 0
    document = project.call("verify", "config.yaml", "--cache", "node", "--json").document
    assert document["adopted_checked"] == 2
    document = project.call("verify", "remote", "--json").document
    assert document["entries_checked"] == 2
    assert document["adopted_checked"] is None
