from __future__ import annotations

from pathlib import Path

import pytest
from cli_samples import Project


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project whose config is compiled; tests only read it, or work on a copy of its cache."""
    project = Project(tmp_path_factory.mktemp("compiled"))
    ran = project.run("compile", project.write())
    assert ran.status == 0, ran
    return project
