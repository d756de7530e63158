from __future__ import annotations

from pathlib import Path

import pytest
import runtime_samples as samples


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> samples.Served:
    """A small config with all its units compiled by the farm. Compiled once: leave the store alone."""
    path = samples.write_config(tmp_path_factory.mktemp("served"))
    done = samples.neffbuild("compile", str(path))
    assert done.returncode == 0, done.stderr
    return samples.served(path)


@pytest.fixture
def own_served(served: samples.Served, tmp_path: Path) -> samples.Served:
    """The same in a folder of the test's own, to be damaged."""
    import shutil

    shutil.copytree(served.path.parent, tmp_path / "own")
    path = tmp_path / "own/serve.yaml"
    path.write_text(path.read_text().replace(str(served.path.parent), str(path.parent)))
    return samples.served(path)
