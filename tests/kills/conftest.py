from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from s3_servers import S3Server

for room in ("cache", "cli", "s3"):
    sys.path.append(str(Path(__file__).parents[1] / room))


@pytest.fixture(autouse=True)
def _environment(tmp_path: Path) -> Iterator[None]:
    """The environment that this process looks at stores in: locks of the commands' own, and credentials."""
    from s3_servers import ENVIRONMENT

    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL"):
            patch.delenv(name, raising=False)
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.setenv("XDG_RUNTIME_DIR", str(runtime))
        yield


@pytest.fixture(scope="session")
def seaweed() -> Iterator[S3Server]:
    from s3_servers import ENVIRONMENT, seaweed_server

    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        with seaweed_server() as server:
            yield server
