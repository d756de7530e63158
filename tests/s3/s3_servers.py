"""The S3 servers that the tests talk to: three programs that we did not write, on loopback."""

from __future__ import annotations

import functools
import json
import logging
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

ACCESS_KEY = "ci-access-key"
SECRET_KEY = "ci-secret-key"
READ_ONLY_KEY = "ci-read-only"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": ACCESS_KEY,
    "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
    "AWS_CONFIG_FILE": "/nonexistent",
    "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
    "AWS_EC2_METADATA_DISABLED": "true",
    "NO_PROXY": "127.0.0.1",
}
"""Credentials of these servers, and nothing of whoever runs the tests."""


@dataclass(frozen=True)
class S3Server:
    """A running server, or a proxy before one."""

    endpoint: str

    def url(self, bucket: str, prefix: str = "some/prefix", **options: object) -> str:
        """The store's URL; faults are not waited for long unless a test says so."""
        query = {"endpoint": self.endpoint, "retry_seconds": 5, **options}
        return f"s3://{bucket}/{prefix}?{urlencode(query)}"

    def client(self) -> Any:
        """A plain boto3 client, to look behind a store's back."""
        return _client(self.endpoint)

    def keys(self, bucket: str) -> set[str]:
        """Every key of a bucket."""
        pages = self.client().get_paginator("list_objects_v2").paginate(Bucket=bucket)
        return {item["Key"] for page in pages for item in page.get("Contents", ())}


@functools.cache
def _client(endpoint: str) -> Any:
    import boto3
    from botocore.config import Config

    return boto3.session.Session().client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        config=Config(s3={"addressing_style": "path"}),
    )


@contextmanager
def moto_server() -> Iterator[S3Server]:
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield S3Server(f"http://{host}:{port}")
    server.stop()


@contextmanager
def seaweed_server() -> Iterator[S3Server]:
    folder = Path(tempfile.mkdtemp(prefix="neffbuild-weed-"))
    identities = [
        _identity("ci", ACCESS_KEY, ["Admin", "Read", "Write", "List", "Tagging"]),
        _identity("reader", READ_ONLY_KEY, ["Read", "List"]),
        {"name": "anonymous", "actions": ["Read:public"]},
    ]
    (folder / "s3.json").write_text(json.dumps({"identities": identities}))
    # It listens on each port and on the one 10,000 above.
    s3, master, volume, filer = _free_ports(4, highest=45000)
    command = [
        _program("weed"),
        "mini",
        f"-dir={folder}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        f"-s3.config={folder}/s3.json",
        f"-s3.port={s3}",
        f"-master.port={master}",
        f"-volume.port={volume}",
        f"-filer.port={filer}",
        "-webdav=false",
        "-admin.ui=false",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-master.telemetry=false",
    ]
    endpoint = f"http://127.0.0.1:{s3}"
    with _running(command, folder, ready=lambda: _writes(endpoint)):
        yield S3Server(endpoint)
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def rclone_server() -> Iterator[S3Server]:
    """Ignores If-None-Match and If-Match."""
    folder = Path(tempfile.mkdtemp(prefix="neffbuild-rclone-"))
    (port,) = _free_ports(1)
    command = [
        _program("rclone"),
        "serve",
        "s3",
        f"--addr=127.0.0.1:{port}",
        f"--auth-key={ACCESS_KEY},{SECRET_KEY}",
        str(folder),
    ]
    endpoint = f"http://127.0.0.1:{port}"
    with _running(command, folder, ready=lambda: _answers(endpoint)):
        yield S3Server(endpoint)
    shutil.rmtree(folder, ignore_errors=True)


def _identity(name: str, access_key: str, actions: list[str]) -> Mapping[str, object]:
    credentials = [{"accessKey": access_key, "secretKey": SECRET_KEY}]
    return {"name": name, "credentials": credentials, "actions": actions}


def _program(name: str) -> str:
    """A program that a package of the `dev` extra brings along."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    assert found is not None, f"{name} is not installed"
    return found


def _free_ports(count: int, highest: int = 60000) -> list[int]:
    ports: list[int] = []
    # Anywhere: of two test processes that start at once, both would find the same ones free.
    for candidate in random.Random().sample(range(20000, highest), 1000):
        if _is_free(candidate) and _is_free(candidate + 10000 if highest < 50000 else candidate):
            ports.append(candidate)
        if len(ports) == count:
            return ports
    raise AssertionError("no ports are free")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


@contextmanager
def _running(command: list[str], folder: Path, ready: Any) -> Iterator[None]:
    environment = {**os.environ, **ENVIRONMENT, "HOME": str(folder), "TMPDIR": str(folder)}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 60
        while not ready():
            assert process.poll() is None, (folder / "log").read_text()[-2000:]
            assert time.monotonic() < deadline, (folder / "log").read_text()[-2000:]
            time.sleep(0.1)
        yield
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def _answers(endpoint: str) -> bool:
    try:
        urllib.request.urlopen(endpoint, timeout=5)
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


def _writes(endpoint: str) -> bool:
    """Whether a server takes a write: SeaweedFS answers earlier than it can."""
    from botocore.exceptions import BotoCoreError, ClientError

    if not _answers(endpoint):
        return False
    client = S3Server(endpoint).client()
    try:
        client.create_bucket(Bucket="ready")
        client.put_object(Bucket="ready", Key="ready", Body=b"ready")
    except (BotoCoreError, ClientError):
        return False
    return True
