from __future__ import annotations

import sys
from pathlib import Path

import pytest

_TESTS = Path(__file__).parents[1]
for folder in ("cli", "neuronx"):
    if str(_TESTS / folder) not in sys.path:
        sys.path.append(str(_TESTS / folder))

import engine_project  # noqa: E402


@pytest.fixture
def project(tmp_path: Path) -> engine_project.EngineProject:
    return engine_project.EngineProject(tmp_path)
