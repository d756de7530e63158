from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "cli"))

from cli_samples import Project


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A config of a toolchain that is none of Neuron's: what is adopted does not depend on it."""
    project = Project(tmp_path)
    project.write(sections={"cache": {"name": "llama"}})
    return project
