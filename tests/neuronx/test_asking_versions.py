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
        (SAYS, "2.28.7631.0"),
        (f"{SAYS} >&2", "2.28.7631.0"),
        (f"printf '\\377 '; {SAYS}", "2.28.7631.0"),
        (f"{SAYS}; exit 1", None),
        (f"{SAYS}; kill -9 $$", None),
        ("echo hello", None),
        # What it started goes on, and holds its output open.
        (f"setsid sleep 30 & {SAYS}", "2.28.7631.0"),
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
