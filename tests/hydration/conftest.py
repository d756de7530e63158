from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
# For cli_samples, the S3 servers, and a toolchain that builds in milliseconds without torch.
for folder in ("cli", "s3", "farm/plugin"):
    if str(TESTS / folder) not in sys.path:
        sys.path.append(str(TESTS / folder))

from cli_samples import Project  # noqa: E402
from fault_proxy import FaultProxy, fault_proxy  # noqa: E402
from hydration_samples import Fleet  # noqa: E402
from s3_servers import ENVIRONMENT, moto_server  # noqa: E402


@pytest.fixture(scope="session")
def _compiled(tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = Project(tmp_path_factory.mktemp("compiled"))
    config = project.write(sections={"cache": {"name": "llama"}})
    assert project.run("compile", config).status == 0
    return project


@pytest.fixture(scope="session")
def _pushed(_compiled: Project, tmp_path_factory: pytest.TempPathFactory) -> Path:
    remote = tmp_path_factory.mktemp("pushed") / "remote"
    words = ["push", "config.yaml", "--to", str(remote), "--tag", "prod"]
    assert _compiled.run(*words).status == 0
    return remote


@pytest.fixture
def fleet(_compiled: Project, _pushed: Path, tmp_path: Path) -> Fleet:
    """A store that holds llama:prod, and a host with an empty cache."""
    shutil.copytree(_pushed, tmp_path / "remote")
    return Fleet(_compiled, tmp_path)


@pytest.fixture(scope="session")
def _aws() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL"):
            patch.delenv(name, raising=False)
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield


@pytest.fixture
def proxy(_aws: None) -> Iterator[FaultProxy]:
    """A proxy before an S3 server with the bucket `fleet`."""
    with moto_server() as server:
        server.client().create_bucket(Bucket="fleet")
        with fault_proxy(server) as proxy:
            yield proxy
