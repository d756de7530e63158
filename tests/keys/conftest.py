from __future__ import annotations

from pathlib import Path

import pytest
from key_samples import Workspace


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path)


@pytest.fixture(scope="module")
def shared_workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """For properties: one folder for all examples."""
    return Workspace(tmp_path_factory.mktemp("keys"))
