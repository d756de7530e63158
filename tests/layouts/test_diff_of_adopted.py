"""`neffbuild diff` of two tags and what was adopted: added, removed, changed, beside the units."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import foreign_trees as foreign
import pytest
from cli_samples import Project
from foreign_trees import key_of


def release(project: Project, tree: Path, tag: str, layout: str = "vllm-neuron") -> None:
    """Push, from a cache of its own, the config with what a tree holds."""
    cache = ("--cache", f"cache-{tag}")
    line = ("import", str(tree), "--layout", layout, "--config", "config.yaml")
    assert project.call(*line, *cache).status == 0
    line = ("push", "config.yaml", "--to", "remote", "--tag", f"llama:{tag}", "--allow-partial")
    assert project.call(*line, *cache).status == 0


def diff(project: Project, *words: str) -> dict[str, Any]:
    line = ("diff", "remote", "--from", "llama:old", "--to", "llama:new", "--json")
    return project.call(*line, *words).document


@pytest.fixture
def released(project: Project, tmp_path: Path) -> Project:
    """Of two tags: entry 0 stays, 1 is gone, 2 has come, 3 has another NEFF."""
    for number in (0, 1, 3):
        foreign.vllm_entry(tmp_path / "old", number)
    for number in (0, 2, 3):
        foreign.vllm_entry(tmp_path / "new", number)
    again = foreign.neff(33, build="2.28.7631.0")
    sentinel = b"completed:1790000000\nneff_size:%d\n" % len(again)
    foreign.vllm_entry(tmp_path / "new", 3, neff=again, sentinel=sentinel)
    for tag in ("old", "new"):
        release(project, tmp_path / tag, tag)
    return project


def test_added_removed_and_changed(released: Project) -> None:
    document = diff(released)
    assert document["different"]
    assert document["counts"]["adopted"] == {
        "added": 1,
        "removed": 1,
        "changed": 1,
        "unchanged": 1,
    }
    [platform] = document["platforms"]
    assert platform["units"] == []
    assert platform["adopted_unchanged"] == 1
    found = {one["name"]: one for one in platform["adopted"]}
    assert {name: one["change"] for name, one in found.items()} == {
        f"vllm-neuron {key_of(1)}": "removed",
        f"vllm-neuron {key_of(2)}": "added",
        f"vllm-neuron {key_of(3)}": "changed",
    }
    assert found[f"vllm-neuron {key_of(1)}"]["to"] is None
    assert found[f"vllm-neuron {key_of(2)}"]["from"] is None
    changed = found[f"vllm-neuron {key_of(3)}"]
    assert changed["ingredients"] == ["compiler.version"]
    assert changed["from"]["key"] != changed["to"]["key"]
    shown = released.call("diff", "remote", "--from", "llama:old", "--to", "llama:new").out
    assert f"  - vllm-neuron {key_of(1)} (adopted)\n" in shown
    assert f"  + vllm-neuron {key_of(2)} (adopted)\n" in shown
    assert f"  ~ vllm-neuron {key_of(3)} (adopted)  compiler.version\n" in shown
    assert shown.endswith("; adopted: 1 added, 1 removed, 1 changed, 1 unchanged\n")


def test_a_difference_in_them_alone_fails_a_check(released: Project) -> None:
    line = ("diff", "remote", "--from", "llama:old", "--check", "--to")
    assert released.call(*line, "llama:new").status == 1
    same = released.call(*line, "llama:old")
    assert same.status == 0
    assert same.out.endswith("; adopted: 0 added, 0 removed, 0 changed, 3 unchanged\n")


def test_without_any_nothing_is_said_of_them(project: Project) -> None:
    for tag in ("old", "new"):
        line = ("push", "config.yaml", "--to", "remote", "--tag", f"llama:{tag}", "--allow-partial")
        assert project.call(*line).status == 0
    shown = project.call("diff", "remote", "--from", "llama:old", "--to", "llama:new").out
    assert "adopted" not in shown
    assert diff(project)["counts"]["adopted"]["unchanged"] == 0


def test_files_of_one_name_that_two_compilers_made_are_not_matched(
    project: Project, tmp_path: Path
) -> None:
    foreign.torch_entry(tmp_path / "a", 0, build="2.27.5334.0")
    release(project, tmp_path / "a", "old", "torch-neuronx")
    for build in ("2.28.1.0", "2.28.2.0"):
        shutil.rmtree(tmp_path / "a")
        foreign.torch_entry(tmp_path / "a", 0, build=build)
        release(project, tmp_path / "a", "new", "torch-neuronx")
    [platform] = diff(project)["platforms"]
    assert [(one["name"], one["change"]) for one in platform["adopted"]] == [
        (f"torch-neuronx {key_of(0)}", change) for change in ("removed", "added", "added")
    ]
