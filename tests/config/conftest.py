from __future__ import annotations

from pathlib import Path

import pytest
from config_workspace import Workspace


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", raising=False)
    monkeypatch.delenv("NEFFBUILD_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return Workspace(tmp_path)


@pytest.fixture(scope="module")
def shared_workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """For properties: one folder for all examples, under the environment as it is."""
    return Workspace(tmp_path_factory.mktemp("workspace"))
