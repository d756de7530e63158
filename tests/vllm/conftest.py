from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from neffbuild.toolchain.inductor.engines import installed_vllm

if installed_vllm() is None:
    # `make test-vllm` has an environment of its own.
    collect_ignore_glob = ["test_*.py"]

import engines


@dataclass(frozen=True)
class Release:
    """What `neffbuild compile` built and `neffbuild push` published."""

    config: Path
    url: str
    tag: str = "tiny:1"

    def pull(self, cache: Path) -> Path:
        """Into a new local cache, which is returned."""
        done = engines.neffbuild("pull", self.url, "--tag", self.tag, "--cache", cache)
        assert done.returncode == 0, done.stderr
        return cache


@dataclass(frozen=True)
class Served:
    """What an engine answered and counted, and how long it took to get there."""

    host: engines.Host
    answers: list[list[list[int]]]
    init_seconds: float
    ready_seconds: float

    @property
    def counted(self) -> dict[str, Any]:
        return self.host.counted()


@pytest.fixture(scope="session")
def place() -> Iterator[Path]:
    """A folder that another user may look into, which pytest's own are not."""
    folder = Path(tempfile.mkdtemp(prefix="neffbuild-vllm-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def short_path(place: Path) -> Path:
    """A folder of the test's own. vLLM's processes talk through sockets below it, whose paths may have 107
    characters."""
    return Path(tempfile.mkdtemp(dir=place))


@pytest.fixture(scope="session")
def model(place: Path) -> Path:
    return engines.write_model(place / "model")


@pytest.fixture(scope="session")
def release(place: Path, model: Path) -> Release:
    """Compiled by `neffbuild compile`, without vLLM serving anything."""
    config = engines.write_config(place / "build", model)
    done = engines.neffbuild("compile", config)
    assert done.returncode == 0, done.stdout + done.stderr
    release = Release(config, str(place / "remote"))
    done = engines.neffbuild("push", config, "--to", release.url, "--tag", release.tag)
    assert done.returncode == 0, done.stderr
    return release


@pytest.fixture(scope="session")
def cold(place: Path, model: Path) -> Served:
    """The first engine on a host on which nothing was ever compiled."""
    host = engines.Host(place / "cold")
    host.variables["NEFFBUILD_CACHE"] = str(host.folder / "cache")
    return serve(host, model)


@pytest.fixture(scope="session")
def model_infos(cold: Served) -> Path:
    """What vLLM found out about its model classes: seconds for every engine that does so again."""
    return cold.host.vllm_cache / "modelinfos"


def serve(host: engines.Host, model: Path, **options: Any) -> Served:
    """Start an engine, ask it, end it."""
    with engines.serving(host, model, **options) as engine:
        answers = engine.answers()
        return Served(host, answers, engine.init_seconds, engine.ready_seconds)
