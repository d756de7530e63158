from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import farmtools
import pytest


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder that the farms of one test live in; nothing of them may be left at its end."""
    for name in ("tmp", "run"):
        (tmp_path / name).mkdir(mode=0o700)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield tmp_path
    assert farmtools.becomes_empty(farmtools.left_processes)
    assert farmtools.becomes_empty(farmtools.left_folders)
