from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from neffbuild.cache.directory import DirectoryStore


@pytest.fixture(autouse=True)
def _own_runtime_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("runtime")
    folder.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        yield


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "store")


@pytest.fixture
def remote(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "remote")


@pytest.fixture
def public_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder that other users can enter (pytest's own are private)."""
    import shutil
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="neffbuild-test-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)
