"""The grid, captured once for all tests that ask for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from neffbuild.toolchain.base import Captured


@pytest.fixture(scope="session")
def captured() -> dict[str, Captured]:
    """Every shape of the EAGLE3 quickstart, by name."""
    from step_samples import grid, quickstart, unit

    from neffbuild.toolchain.neuronx.stablehlo import capture

    config = quickstart()
    return {name: capture(unit(config, shape)) for name, shape in grid(config).items()}
