from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from botocore.exceptions import ClientError
from botocore.loaders import create_loader
from fault_proxy import FaultProxy, fault_proxy
from s3_servers import ENVIRONMENT, S3Server, moto_server, rclone_server, seaweed_server

from neffbuild.cache.directory import DirectoryStore

sys.path.append(str(Path(__file__).parents[1] / "cache"))  # for cache_samples

_numbers = itertools.count()


@pytest.fixture(scope="session", autouse=True)
def _aws_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    runtime = tmp_path_factory.mktemp("runtime")
    runtime.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL"):
            patch.delenv(name, raising=False)
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.setenv("XDG_RUNTIME_DIR", str(runtime))
        # Every test opens stores of its own, and each would parse the same service model again.
        patch.setattr("botocore.session.create_loader", functools.cache(create_loader))
        yield


@pytest.fixture(scope="session")
def moto(_aws_environment: None) -> Iterator[S3Server]:
    with moto_server() as server:
        yield server


@pytest.fixture(scope="session")
def seaweed(_aws_environment: None) -> Iterator[S3Server]:
    with seaweed_server() as server:
        yield server


@pytest.fixture(scope="session")
def rclone(_aws_environment: None) -> Iterator[S3Server]:
    with rclone_server() as server:
        yield server


@pytest.fixture(params=["moto", "seaweed", "rclone"])
def server(request: pytest.FixtureRequest) -> S3Server:
    """Each of the three in turn."""
    found: S3Server = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def new_bucket() -> Iterator[Callable[[S3Server], str]]:
    """Makes an empty bucket of the test's own."""
    made: list[tuple[S3Server, str]] = []

    def make(server: S3Server) -> str:
        bucket = f"bucket-{next(_numbers)}"
        server.client().create_bucket(Bucket=bucket)
        made.append((server, bucket))
        return bucket

    yield make
    for server, bucket in made:
        # SeaweedFS runs out of volumes after some seventy buckets; the others keep one with content.
        with contextlib.suppress(ClientError):
            server.client().delete_bucket(Bucket=bucket)


@pytest.fixture
def local(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "local")


@pytest.fixture
def proxy(moto: S3Server) -> Iterator[FaultProxy]:
    """A proxy before the moto server, which lets headers be changed on the way."""
    with fault_proxy(moto) as proxy:
        yield proxy
