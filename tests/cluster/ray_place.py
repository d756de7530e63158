"""A Ray cluster of two nodes on this machine, an S3 server beside it, and farms that use both."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import farmtools
from s3_servers import ENVIRONMENT, S3Server, seaweed_server

from neffbuild.cache.catalog import Hit, entry_key, read_entry
from neffbuild.cache.directory import DirectoryStore
from neffbuild.cache.open import open_store
from neffbuild.cache.store import Store
from neffbuild.config.build import FarmConfig
from neffbuild.farm.outcomes import Event, RunResult
from neffbuild.farm.run import compile_units
from neffbuild.toolchain.base import Unit
from neffbuild.toolchain.registry import load_toolchain

TESTS = Path(__file__).parents[1]
PLUGINS = os.pathsep.join(str(TESTS / folder / "plugin") for folder in ("farm", "cluster"))


def why_not() -> str | None:
    """Why no cluster can be started here; None where one can."""
    if find_spec("ray") is None:
        return "ray is not installed: `make test-ray` installs it"
    if {name for _, name in socket.if_nameindex()} != {"lo"}:
        return "a cluster on one machine needs a network namespace with nothing but lo: `make test-ray`"
    return None


@dataclass
class Place:
    """The running cluster. Its head has one CPU; so has the second node, and a device. A node's HOME is
    called `head` or `second`."""

    root: Path
    server: S3Server
    cluster: Any
    node: Any = None

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add_second(self, **environment: str) -> None:
        self.node = self.cluster.add_node(
            num_cpus=1,
            resources={"neuron_cores": 1},
            object_store_memory=80 << 20,
            env_vars={"HOME": str(self.root / "second"), **environment},
        )

    def lose_second(self) -> None:
        """As a spot machine is lost: without a word."""
        node, self.node = self.node, None
        self.cluster.remove_node(node, allow_graceful=False)

    def end_second(self) -> None:
        """In good order: the cluster knows at once."""
        node, self.node = self.node, None
        self.cluster.remove_node(node, allow_graceful=True)

    def new_store(self) -> str:
        """The URL of an empty store in the S3 server."""
        prefix = f"farms/{time.monotonic_ns()}"
        return self.server.url("units", prefix)


@contextmanager
def running_place() -> Iterator[Place]:
    """Sets the environment that nodes inherit, then starts them. Short paths: Ray's sockets lie in
    them."""
    from ray.cluster_utils import Cluster

    root = Path(tempfile.mkdtemp(prefix="nbray-", dir="/tmp"))
    for name in ("head", "second", "tmp", "run", "tmp/ray"):
        (root / name).mkdir(mode=0o700)
    os.environ.update(
        ENVIRONMENT,
        HOME=str(root / "head"),
        TMPDIR=str(root / "tmp"),
        XDG_RUNTIME_DIR=str(root / "run"),
        PYTHONPATH=PLUGINS,
        RAY_USAGE_STATS_ENABLED="0",
    )
    tempfile.tempdir = None
    with seaweed_server() as server:
        server.client().create_bucket(Bucket="units")
        cluster = Cluster()
        cluster.add_node(num_cpus=1, include_dashboard=False, object_store_memory=80 << 20)
        try:
            yield Place(root, server, cluster)
        finally:
            cluster.shutdown()
    shutil.rmtree(root, ignore_errors=True)


@dataclass(frozen=True)
class Farm:
    """One farm's folder and store."""

    place: Place
    folder: Path
    url: str

    @property
    def store(self) -> Store:
        return open_store(self.url)

    def run(
        self,
        count: int,
        *,
        toolchain: str = "placed",
        on_event: Callable[[Event], None] = lambda event: None,
        units: list[Unit] | None = None,
        **fields: Any,
    ) -> RunResult:
        """A farm of this process on the cluster."""
        return compile_units(
            units or farmtools.make_units(self.folder, count, toolchain),
            load_toolchain(toolchain),
            DirectoryStore(self.folder / "store"),
            FarmConfig(executor="ray", address=self.place.address, **{"retries": 0, **fields}),
            logs=self.folder / "logs",
            on_event=on_event,
            shared=self.store,
        )

    def places(self) -> list[tuple[str, str, str]]:
        """(unit, node, cores it may use) of every compile that began."""
        listed = self.folder / "places"
        lines = listed.read_text().splitlines() if listed.exists() else []
        return [tuple(line.split(" ")) for line in lines]  # type: ignore[misc]

    def stored(self) -> set[str]:
        """The keys of the store's entries, each of them whole."""
        store = self.store
        keys = {entry_key(listed.name) for listed in store.list("entries/")}
        for key in keys:
            hit = read_entry(store, key)
            assert isinstance(hit, Hit), hit
            for record in hit.entry.files.values():
                assert store.check_blob(record.digest, record.size) is None
        return keys


def wait_until(true: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)
