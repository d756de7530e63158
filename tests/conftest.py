"""What every test runs under."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A slow machine is not a failed test: how long an example takes says nothing about what it found.
settings.register_profile(
    "neffbuild", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("neffbuild")

_TESTS = Path(__file__).parent
_COMPILE_ONCE = frozenset({"models", "runtime", "speculation", "toolchain", "vllm"})
"""Folders whose tests share programs that are compiled once for each process of tests."""
_APART = frozenset({"kills"})
"""Folders whose tests take minutes each and share nothing that takes long."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Which tests stay together when they are spread over processes: those that share a fixture."""
    for item in items:
        folder, *_ = item.path.relative_to(_TESTS).parts
        if folder in _APART:
            continue
        together = folder if folder in _COMPILE_ONCE else str(item.path)
        item.add_marker(pytest.mark.xdist_group(together))
