from __future__ import annotations

import sys
from pathlib import Path

import pytest

_TESTS = Path(__file__).parents[1]
# The command line as a user starts it.
if str(_TESTS / "cli") not in sys.path:
    sys.path.append(str(_TESTS / "cli"))

import neuron_project  # noqa: E402


@pytest.fixture
def project(tmp_path: Path) -> neuron_project.NeuronProject:
    return neuron_project.NeuronProject(tmp_path)
