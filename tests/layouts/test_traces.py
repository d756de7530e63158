"""Traces of PyTorch's precompile cache are pickles: they travel only where that was asked for, and are handed
out only with a signature that is believed. None is ever read as a pickle."""

from __future__ import annotations

import hashlib
from pathlib import Path

import foreign_trees as foreign
import pytest
from cli_samples import Project
from foreign_trees import content

TRACE = f"dynamo/{hashlib.sha256(b'forward 12').hexdigest()}/entry"
PICKLE = b"cos\nsystem\n(S'touch /tmp/neffbuild-was-here'\ntR."
"""Runs a command wherever it is unpickled."""


@pytest.fixture
def release(project: Project, tmp_path: Path) -> Project:
    """A fleet's cache with its traces, taken over, signed and pushed."""
    pytest.importorskip("securesystemslib")
    foreign.vllm_entry(tmp_path / "fleet", 0)
    foreign.write(tmp_path / "traces", {TRACE: PICKLE, "dynamo/other/notes": b"x", "else": b"y"})
    assert project.call("keygen", "--out", "release").status == 0
    ran = project.call(
        "import", str(tmp_path / "fleet"), "--layout", "vllm-neuron", "--config", "config.yaml",
        "--with-traces", str(tmp_path / "traces"), "--json",
    )  # fmt: skip
    assert ran.status == 0, ran
    assert ran.document["layout"]["traces"]["complete"] == 1
    for tag, words in (("signed", ("--key", "release.key")), ("plain", ())):
        ran = project.call(
            "push", "config.yaml", "--to", tag, "--tag", tag, "--allow-partial", *words
        )
        assert ran.status == 0, ran
    return project


def pull(project: Project, tag: str, into: Path, *words: str) -> tuple[int, str]:
    ran = project.call(
        "pull", tag, "--tag", f"llama:{tag}", "--cache", f"node-{tag}", "--allow-partial",
        "--layout", "vllm-neuron", "--into", str(into), *words,
    )  # fmt: skip
    return ran.status, ran.out + ran.err


def test_off_by_default(release: Project, tmp_path: Path) -> None:
    status, _ = pull(release, "signed", tmp_path / "serving", "--key", "release.pub")
    assert status == 0
    assert not any("dynamo" in name for name in content(tmp_path / "serving"))
    ran = release.call(
        "import", str(tmp_path / "fleet"), "--layout", "vllm-neuron", "--cache", "c2"
    )
    assert ran.status == 0
    assert PICKLE not in content(release.root / "c2").values()


def test_with_a_believed_signature(release: Project, tmp_path: Path) -> None:
    traces = tmp_path / "out"
    words = ("--with-traces", str(traces), "--key", "release.pub")
    status, out = pull(release, "signed", tmp_path / "serving", *words)
    assert (status, content(traces)) == (0, {TRACE: PICKLE}), out
    assert "traces: 1 written, 0 were there" in out
    assert not Path("/tmp/neffbuild-was-here").exists()


def test_refused_before_anything_is_fetched_where_nobody_is_believed(
    release: Project, tmp_path: Path
) -> None:
    traces = tmp_path / "out"
    status, out = pull(release, "signed", tmp_path / "serving", "--with-traces", str(traces))
    assert status == 2
    assert "only with a believed signature" in out
    assert not (release.root / "node-signed").exists()


def test_refused_without_a_signature_and_with_another_key(release: Project, tmp_path: Path) -> None:
    traces = tmp_path / "out"
    words = ("--with-traces", str(traces))
    status, _ = pull(release, "plain", tmp_path / "serving", *words, "--key", "release.pub")
    assert status == 4
    assert release.call("keygen", "--out", "other").status == 0
    status, _ = pull(release, "signed", tmp_path / "serving", *words, "--key", "other.pub")
    assert status == 4
    assert not traces.exists()
    assert not (tmp_path / "serving").exists()


def test_two_traces_of_one_name_are_not_chosen_between(release: Project, tmp_path: Path) -> None:
    """A trace's name is of a function, and says nothing of model, shape or rank."""
    foreign.write(tmp_path / "traces2", {TRACE: PICKLE + b"\n"})
    ran = release.call(
        "import", str(tmp_path / "fleet"), "--layout", "vllm-neuron", "--config", "config.yaml",
        "--with-traces", str(tmp_path / "traces2"),
    )  # fmt: skip
    assert ran.status == 0
    ran = release.call(
        "push",
        "config.yaml",
        "--to",
        "signed",
        "--tag",
        "signed",
        "--allow-partial",
        "--key",
        "release.key",
    )
    assert ran.status == 0, ran
    traces = tmp_path / "out"
    words = ("--with-traces", str(traces), "--key", "release.pub")
    status, out = pull(release, "signed", tmp_path / "serving", *words)
    assert status == 1
    assert not content(traces)
    assert "2 different files are stored for it" in out


def test_a_link_among_traces_is_refused(project: Project, tmp_path: Path) -> None:
    foreign.vllm_entry(tmp_path / "fleet", 0)
    foreign.write(tmp_path / "traces", {"notes": b"x"})
    (tmp_path / "traces" / TRACE).parent.mkdir(parents=True)
    (tmp_path / "traces" / TRACE).symlink_to(tmp_path / "traces/notes")
    ran = project.call(
        "import", str(tmp_path / "fleet"), "--layout", "vllm-neuron",
        "--with-traces", str(tmp_path / "traces"), "--json",
    )  # fmt: skip
    assert ran.status == 4
    assert [one["key"] for one in ran.document["problems"]] == [TRACE]
