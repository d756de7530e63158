"""What every test runs under."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# A slow machine is not a failed test: how long an example takes says nothing about what it found.
settings.register_profile(
    "neffbuild", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("neffbuild")

_COMPILE_ONCE = frozenset({"models", "runtime", "speculation", "toolchain", "vllm"})
"""Folders whose tests share programs that are compiled once for each process of tests."""
_APART = frozenset({"kills"})
"""Folders whose tests take minutes each and share nothing that takes long."""


@pytest.fixture(scope="session", autouse=True)
def _nothing_shows_late() -> Iterator[None]:
    """What is not on a local disk stays away: it is looked for as often as ever, but not for most of a
    second each time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("neffbuild.cache.filesystem._LOOKS", (0.001, 0.002, 0.004, 0.008))
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest first, so that no process is left alone with it."""
    items.sort(key=lambda item: _folder(item.nodeid) not in _COMPILE_ONCE | _APART)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests that share a fixture stay together when they are spread over processes (`--dist loadscope`)."""
    from xdist.scheduler import LoadScopeScheduling

    class BySharedFixtures(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            folder = _folder(nodeid)
            if folder in _APART:
                return nodeid
            return folder if folder in _COMPILE_ONCE else nodeid.partition("::")[0]

    return BySharedFixtures(config, log)


def _folder(nodeid: str) -> str:
    return nodeid.partition("::")[0].split("/")[1]
