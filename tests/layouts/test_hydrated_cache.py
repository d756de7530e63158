"""An engine's start writes what was pulled into its own compile cache, where it looks by its own rule."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import foreign_trees as foreign
import pytest
from cli_samples import UNITS, Project
from foreign_trees import content, key_of


def hydrate(project: Project, **environment: str) -> dict[str, Any]:
    """What the plugin of an engine starts, and its one line of answer."""
    runtime = project.root / "runtime"
    runtime.mkdir(mode=0o700, exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "neffbuild.runtime.hydrate"],
        env={
            **project.environment,
            "NEFFBUILD_CACHE": str(project.root / "node"),
            "NEFFBUILD_MANIFEST": f"{project.root}/remote#llama:t",
            "XDG_RUNTIME_DIR": str(runtime),
            **environment,
        },
        stdout=subprocess.PIPE,
        check=True,
        timeout=60,
    )
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.fixture
def pushed(project: Project, tmp_path: Path) -> Project:
    for number in range(2):
        foreign.vllm_entry(tmp_path / "fleet", number)
    for words in (
        ("import", str(tmp_path / "fleet"), "--layout", "vllm-neuron", "--config", "config.yaml"),
        ("push", "config.yaml", "--to", "remote", "--tag", "t", "--allow-partial"),
    ):
        ran = project.call(*words)
        assert ran.status == 0, ran
    return project


def test_where_the_engine_looks(pushed: Project, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    answer = hydrate(
        pushed, VLLM_CACHE_ROOT=str(tmp_path / "vllm"), NEFFBUILD_READY_FILE=str(ready)
    )
    assert answer["missing"] == UNITS
    root = tmp_path / "vllm/neuron/compile_cache"
    assert all(foreign.vllm_hit(root, key_of(number)) for number in range(2))
    assert ready.exists()
    hydrate(pushed)
    in_home = Path(pushed.environment["HOME"]) / ".cache/vllm/neuron/compile_cache"
    assert content(in_home) == content(root)


def test_what_is_no_hit_there_counts_as_missing(pushed: Project, tmp_path: Path) -> None:
    """So a strict engine does not start, and says which entry and why."""
    root, ready = tmp_path / "vllm/neuron/compile_cache", tmp_path / "ready"
    foreign.vllm_entry(root, 0, sentinel=None)
    name = Path("/proc/self/comm").read_text().strip()
    command = Path("/proc/self/cmdline").read_text().replace("\0", " ").strip()
    foreign.vllm_metadata(root, 0, pid=os.getpid(), name=name, command=command)
    answer = hydrate(
        pushed, VLLM_CACHE_ROOT=str(tmp_path / "vllm"), NEFFBUILD_READY_FILE=str(ready)
    )
    [missing] = answer["missing"][len(UNITS) :]
    assert missing.startswith(f"{key_of(0)} (locked: process {os.getpid()}")
    assert foreign.vllm_hit(root, key_of(1))
    assert not ready.exists()


def test_a_cache_that_cannot_be_written_is_an_error(pushed: Project, tmp_path: Path) -> None:
    (tmp_path / "vllm").write_text("a file in the way")
    answer = hydrate(pushed, VLLM_CACHE_ROOT=str(tmp_path / "vllm"))
    assert answer["error"]["kind"] == "store"
    assert str(tmp_path / "vllm") in answer["error"]["message"]
