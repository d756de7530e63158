from __future__ import annotations

import sys
from pathlib import Path

import pytest

for room in ("cli", "grid", "neuronx"):
    folder = str(Path(__file__).parents[1] / room)
    if folder not in sys.path:
        sys.path.append(folder)


@pytest.fixture
def project(tmp_path: Path):
    from cli_samples import Project

    return Project(tmp_path)
