"""Real engines that are told where to find what was compiled for them, and nothing else."""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import engines
import pytest
from conftest import Release, Served

sys.path.append(str(Path(__file__).parents[1] / "s3"))

from s3_servers import ENVIRONMENT, seaweed_server

MODEL_INFOS = "modelinfos/vllm-model_executor-models-llama-LlamaForCausalLM.json"


@pytest.fixture(scope="module")
def bucket(release: Release) -> Iterator[str]:
    """The URL of a store in a real S3 server that has the release."""
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as running:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        server = running.enter_context(seaweed_server())
        server.client().create_bucket(Bucket="fleet")
        url = server.url("fleet")
        done = engines.neffbuild("push", release.config, "--to", url, "--tag", release.tag)
        assert done.returncode == 0, done.stderr
        yield url


def told(folder: Path, reference: str, *, strict: bool) -> engines.Host:
    """A host with nothing on it whose engine is told where to look; every compiler is a trap in strict
    mode."""
    path = str(engines.path_without_compilers(folder / "bin")) if strict else None
    host = engines.Host(folder / "host", **({"path": path} if path else {}))
    host.variables |= {
        **ENVIRONMENT,
        "NEFFBUILD_CACHE": str(host.folder / "cache"),
        "NEFFBUILD_MANIFEST": reference,
        "NEFFBUILD_STRICT": str(int(strict)),
        "NEFFBUILD_READY_FILE": str(host.folder / "ready"),
    }
    return host


def metrics(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    pairs = (line.split(" ") for line in lines if line.startswith("neffbuild_hydrate_"))
    return {name.removeprefix("neffbuild_hydrate_"): float(value) for name, value in pairs}


def test_a_host_with_nothing_on_it_is_hydrated_from_s3(
    cold: Served, release: Release, bucket: str, model: Path, place: Path
) -> None:
    host = told(place / "hydrated", f"{bucket}#{release.tag}", strict=True)
    with engines.serving(host, model) as engine:
        assert engine.answers() == cold.answers
        shown = metrics(engine.port)
        said = engine.log.read_text()
    counted = host.counted()
    assert [counted[name] for name in ("hits", "misses", "compiles")] == [1, 0, 0]
    assert (place / "hydrated/compilers.log").read_text() == ""
    assert said.count("neffbuild: hydrated 1 units from") == 1
    assert (shown["success"], shown["hits"], shown["misses"]) == (1, 1, 0)
    assert shown["bytes"] > 0
    assert (host.folder / "ready").exists()
    there = (cold.host.vllm_cache / MODEL_INFOS).read_bytes()
    assert (host.vllm_cache / MODEL_INFOS).read_bytes() == there


def test_two_engines_that_start_at_once_hydrate_once(
    cold: Served, release: Release, bucket: str, model: Path, place: Path
) -> None:
    """Of one node: they share the local cache, and nothing else."""
    hosts = [
        told(place / "node" / name, f"{bucket}#{release.tag}", strict=True)
        for name in ("first", "second")
    ]
    for host in hosts:
        host.variables["NEFFBUILD_CACHE"] = str(place / "node" / "cache")
    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(lambda host: started(host, model, cold.answers), hosts))
    copied = [re.search(r"\((.*)[0-9]+ blobs and ([0-9]+) bytes copied", log) for log in said]
    assert all(copied), said
    # Whoever came second waited for the other's work, or found it done.
    assert sorted(int(found[2]) > 0 for found in copied if found) == [False, True]
    for host in hosts:
        counted = host.counted()
        assert [counted[name] for name in ("hits", "misses", "compiles")] == [1, 0, 0]
        assert (host.folder / "ready").exists()


def started(host: engines.Host, model: Path, answers: list[list[list[int]]]) -> str:
    """What an engine said that answered as it should."""
    with engines.serving(host, model) as engine:
        assert engine.answers() == answers
        return engine.log.read_text()


def test_strict_mode_refuses_before_vllm_starts(
    release: Release, model: Path, tmp_path: Path
) -> None:
    store = Path(shutil.copytree(release.url, tmp_path / "store"))
    blob = max((store / "v1/blobs").rglob("*"), key=lambda path: path.stat().st_size)
    blob.chmod(0o644)
    blob.write_bytes(bytes(blob.stat().st_size))
    host = told(tmp_path / "damaged", f"{store}#{release.tag}", strict=True)
    log = engines.refused(host, model)
    assert f"neffbuild: error: refusing to start: blob {blob.name} in {store} is damaged" in log
    assert "Traceback" not in log
    assert "EngineCore" not in log
    assert not (host.folder / "ready").exists()


def test_from_a_damaged_store_an_engine_compiles(
    cold: Served, release: Release, model: Path, place: Path
) -> None:
    """As a lenient one does: nothing of what is damaged is loaded."""
    store = Path(shutil.copytree(release.url, place / "damaged-store"))
    blob = max((store / "v1/blobs").rglob("*"), key=lambda path: path.stat().st_size)
    content = bytearray(blob.read_bytes())
    content[len(content) // 2] ^= 1
    blob.chmod(0o644)
    blob.write_bytes(content)
    host = told(place / "from-damaged", f"{store}#{release.tag}", strict=False)
    said = started(host, model, cold.answers)
    assert f"blob {blob.name} in {store} is damaged" in said
    assert host.counted()["compiles"] == 1
    assert not (host.folder / "ready").exists()


def test_without_its_store_an_engine_compiles(
    cold: Served, release: Release, model: Path, place: Path
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{free.getsockname()[1]}"
    reference = f"s3://fleet/p?endpoint={endpoint}&retry_seconds=1&region=eu-west-1#{release.tag}"
    host = told(place / "alone", reference, strict=False)
    with engines.serving(host, model) as engine:
        assert engine.answers() == cold.answers
        assert metrics(engine.port)["success"] == 0
        said = engine.log.read_text()
    assert host.counted()["compiles"] == 1
    assert said.count(f"neffbuild: warning: nothing was hydrated from {reference}: ") == 1
    assert not (host.folder / "ready").exists()
