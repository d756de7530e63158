"""What is here of Neuron decides which of these tests can run; the others say why they are skipped."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

_TESTS = Path(__file__).parents[1]
for _folder in (_TESTS / "cli", _TESTS / "neuronx"):
    if str(_folder) not in sys.path:
        sys.path.append(str(_folder))

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.neuron)


@pytest.fixture(scope="session")
def compiler() -> str:
    """The real neuronx-cc."""
    path = shutil.which("neuronx-cc")
    if path is None:
        pytest.skip("no neuronx-cc on PATH: run it in the environment of a Neuron SDK")
    return path


@pytest.fixture(scope="session")
def device() -> Path:
    path = Path("/dev/neuron0")
    if not path.exists():
        pytest.skip("no Neuron device (/dev/neuron0): run it on a Trainium or Inferentia instance")
    return path
