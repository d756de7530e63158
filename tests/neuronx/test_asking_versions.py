"""Asking a neuronx-cc for its version."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from neffbuild.toolchain.neuronx import versions

SAYS = "echo 'NeuronX Compiler version 2.28.7631.0+5b7a0f21'"


@pytest.mark.parametrize(
    ("script", "version"),
    [
        (SAYS, "2.28.7631.0+5b7a0f21"),
        (f"{SAYS} >&2", "2.28.7631.0+5b7a0f21"),
        (f"printf '\\377 '; {SAYS}", "2.28.7631.0+5b7a0f21"),
        (f"{SAYS}; exit 1", None),
        (f"{SAYS}; kill -9 $$", None),
        ("echo hello", None),
        ("echo 'NeuronX Compiler version 2.28.7631.0'", "2.28.7631.0"),
        ("echo 'NeuronX Compiler version 2.28.7631.0+dev.7, of today'", "2.28.7631.0+dev.7"),
        # What it started goes on, and holds its output open.
        (f"setsid sleep 30 & {SAYS}", "2.28.7631.0+5b7a0f21"),
        (f"{SAYS}; sleep 60; exit 0", None),
        ("exec yes", None),
    ],
)
def test_what_is_heard_in_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, version: str | None
) -> None:
    program = tmp_path / "neuronx-cc"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(versions, "_SECONDS", 2)
    monkeypatch.setattr(versions, "_LAST_WORDS_SECONDS", 0.2)
    started = time.monotonic()
    assert versions.compiler_version() == version
    assert time.monotonic() - started < 20


@pytest.mark.parametrize(
    ("planned", "found", "may_be"),
    [
        ("2.28.7631.0", "2.28.7631.0", True),
        ("2.28.7631.0+5b7a0f21", "2.28.7631.0+5b7a0f21", True),
        ("2.28.7631.0+5B7A0F21", " 2.28.7631.0+5b7a0f21", True),
        ("2.28.7631.0+5b7a0f21", "2.28.7631.0+0123abcd", False),
        # Of any build: who says none, and what does not say its own.
        ("2.28.7631.0", "2.28.7631.0+5b7a0f21", True),
        ("2.28.7631.0+5b7a0f21", "2.28.7631.0", True),
        ("2.28.7631.0+5b7a0f21", "2.28.7632.0+5b7a0f21", False),
        ("2.28.7631.0", "", False),
        ("2.13.0+cpu", "2.13.0+cu130", True),
        ("2.13.0a0+git1", "2.13.0a0+git2", False),
    ],
)
def test_which_version_may_be_the_planned_one(planned: str, found: str, may_be: bool) -> None:
    assert versions.may_be(planned, found) is may_be
