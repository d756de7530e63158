from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ray_place import Farm, Place

for _folder in ("farm", "farm/plugin", "s3", "cli", "cluster/plugin"):
    sys.path.append(str(Path(__file__).parents[1] / _folder))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Place]:
    from ray_place import running_place

    with running_place() as place:
        yield place


@pytest.fixture
def place(cluster: Place) -> Iterator[Place]:
    """The cluster with both nodes; no farm may have left anything at the end."""
    import farmtools

    if cluster.node is None:
        cluster.add_second()
    yield cluster
    assert farmtools.becomes_empty(farmtools.left_processes, 30)
    assert farmtools.becomes_empty(farmtools.left_folders, 30)


@pytest.fixture
def farm(place: Place, tmp_path: Path) -> Farm:
    from ray_place import Farm

    return Farm(place, tmp_path, place.new_store())
