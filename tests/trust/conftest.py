from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
# For cache_samples, cli_samples, and a toolchain that builds in milliseconds without torch.
for folder in ("cache", "cli", "farm/plugin"):
    if str(TESTS / folder) not in sys.path:
        sys.path.append(str(TESTS / folder))

from trust_samples import Place, Signing, new_signing  # noqa: E402

from neffbuild.cache.directory import DirectoryStore  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def _own_runtime_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("runtime")
    folder.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        patch.delenv("NEFFBUILD_SIGNING_KEY", raising=False)
        yield


@pytest.fixture(scope="session")
def release(tmp_path_factory: pytest.TempPathFactory) -> Signing:
    """The key that is believed."""
    return new_signing(tmp_path_factory.mktemp("release"))


@pytest.fixture(scope="session")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Signing:
    """The key of somebody who can write to the store."""
    return new_signing(tmp_path_factory.mktemp("stranger"))


@pytest.fixture
def remote(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "remote")


@pytest.fixture
def place(tmp_path: Path, remote: DirectoryStore) -> Place:
    return Place(tmp_path, remote)
