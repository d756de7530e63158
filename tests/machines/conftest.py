from __future__ import annotations

import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
for folder in ("tests/cli", "scripts/ec2"):
    sys.path.append(str(REPOSITORY / folder))


@pytest.fixture
def project(tmp_path: Path) -> object:
    from cli_samples import Project

    return Project(tmp_path)
