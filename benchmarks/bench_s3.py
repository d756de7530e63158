"""Push and pull of many artifacts over S3 beside `aws s3 sync` and `rclone copy`.

The same files, the same SeaweedFS server on loopback, the same run; every tool in a process of its own,
its start-up included. `neffbuild` does more than the others: it hashes and compresses what it sends, and
checks, syncs to disk and commits what it fetches. Needs the `dev` extra; awscli is installed into a
virtual environment of its own for the run where `aws` is not on PATH (it pins another botocore).

Prints one line per run: MB/s of raw bytes, seconds, CPU seconds and peak resident memory of the process.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click

from neffbuild.cache.canonical import digest_document
from neffbuild.cache.catalog import commit_entry, record_files
from neffbuild.cache.directory import DirectoryStore
from neffbuild.cache.entry import Entry
from neffbuild.cache.manifest import Manifest, ManifestUnit
from neffbuild.cache.open import open_store
from neffbuild.cache.tag import TagRef, Trust
from neffbuild.cache.transfer import pull, push
from neffbuild.grid.expand import Need
from neffbuild.grid.shapes import DecodeShape, Family

sys.path.append(str(Path(__file__).parents[1] / "tests/s3"))
from s3_servers import ENVIRONMENT, S3Server, seaweed_server

PLATFORM = {"toolchain": "bench", "target": "none"}
TAG = TagRef("bench", "latest")
REGION = {"AWS_DEFAULT_REGION": "us-east-1"}


@dataclass(frozen=True)
class Run:
    """One tool moving all files one way."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=int, default=100)
    parser.add_argument("--total-mib", type=int, default=1024)
    parser.add_argument(
        "--rounds", type=int, default=2, help="runs of everything; the best is kept"
    )
    parser.add_argument("--job", nargs=2, metavar=("JOB", "ARGUMENTS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        job, arguments = options.job
        {"push": _push, "pull": _pull}[job](**json.loads(arguments))
        return
    with tempfile.TemporaryDirectory(prefix="neffbuild-bench-s3-") as folder:
        _compare(Path(folder), options.files, options.total_mib << 20, options.rounds)


def _compare(folder: Path, count: int, total: int, rounds: int) -> None:
    aws = _aws_command(folder)
    for kind in ("incompressible", "compressible"):
        source = folder / kind
        size = total // count
        make_files(source, count, size, kind)
        store = folder / f"{kind}-store"
        manifest = fill_store(DirectoryStore(store), source)
        best: dict[tuple[str, str], Run] = {}
        for _ in range(rounds):
            for tool, way, run in _round(folder, kind, source, store, manifest, aws):
                known = best.get((tool, way))
                best[tool, way] = run if known is None or run.seconds < known.seconds else known
        click.echo(f"{count} files of {size / 2**20:.1f} MiB, {kind}, best of {rounds}")
        for (tool, way), run in sorted(best.items(), key=lambda item: (item[0][1], item[0][0])):
            click.echo(
                f"  {way:8} {tool:12} {count * size / run.seconds / 1e6:7.0f} MB/s"
                f" {run.seconds:7.2f} s {run.cpu_seconds:7.2f} s CPU"
                f" {run.peak_bytes / 2**20:6.0f} MiB peak"
            )
        shutil.rmtree(source)
        shutil.rmtree(store)


def _round(
    folder: Path, kind: str, source: Path, store: Path, manifest: str, aws: Sequence[str]
) -> Iterator[tuple[str, str, Run]]:
    """Every tool up and down once, against a fresh server."""
    with seaweed_server() as server:
        server.client().create_bucket(Bucket="bench")
        url = server.url("bench", "neffbuild")
        yield "neffbuild", "upload", _job("push", local=str(store), url=url, manifest=manifest)
        with _destination(folder) as there:
            yield "neffbuild", "download", _job("pull", local=str(there), url=url)
        sync = [*aws, "s3", "sync", "--only-show-errors", "--endpoint-url", server.endpoint]
        yield "aws s3 sync", "upload", _timed([*sync, str(source), "s3://bench/aws"])
        with _destination(folder) as there:
            yield "aws s3 sync", "download", _timed([*sync, "s3://bench/aws", str(there)])
            _check_same(source, there)
        rclone = [_rclone(), "copy", "--transfers=8", f"--config={_rclone_config(folder, server)}"]
        yield "rclone", "upload", _timed([*rclone, str(source), "weed:bench/rclone"])
        with _destination(folder) as there:
            yield "rclone", "download", _timed([*rclone, "weed:bench/rclone", str(there)])
            _check_same(source, there)


def make_files(folder: Path, count: int, size: int, kind: str) -> None:
    """Files of random bytes, or of pieces that repeat as machine code does (zstd: less than a third)."""
    folder.mkdir()
    random.seed(kind)
    pieces = [random.randbytes(24) for _ in range(300)]
    for number in range(count):
        if kind == "incompressible":
            content = os.urandom(size)
        else:
            chosen = random.choices(pieces, k=size // 32 + 1)
            content = b"".join(piece + random.randbytes(8) for piece in chosen)[:size]
        (folder / f"graph-{number:03}.neff").write_bytes(content)


def fill_store(store: DirectoryStore, source: Path) -> str:
    """Commit an entry per file; returns the path of a manifest of them all."""
    entries, units = {}, []
    for number, path in enumerate(sorted(source.iterdir())):
        shape = DecodeShape(Family.TARGET, num_seqs=number + 1, query_len=1, context_len=4096)
        entry = Entry(
            recipe={"shape": shape.document(), "toolchain": PLATFORM},
            files=record_files({"graph.neff": path}),
            graph_digest=digest_document(number),
            graph_key=digest_document([number]),
        )
        commit_entry(store, entry, {"graph.neff": path})
        entries[entry.key] = entry
        units.append(ManifestUnit(shape, entry.key, Need.REQUIRED))
    manifest = Manifest(digest_document("bench"), {}, PLATFORM, tuple(units), entries)
    path = store.root / "manifest.json"
    path.write_bytes(manifest.to_json())
    return str(path)


def _push(local: str, url: str, manifest: str) -> None:
    parsed = Manifest.from_json(Path(manifest).read_bytes())
    push(DirectoryStore(Path(local)), open_store(url), parsed, TAG, trust=Trust())


def _pull(local: str, url: str) -> None:
    pull(open_store(url), DirectoryStore(Path(local)), TAG, trust=Trust())


def _job(job: str, **arguments: str) -> Run:
    return _timed([sys.executable, __file__, "--job", job, json.dumps(arguments)])


def _timed(command: Sequence[str]) -> Run:
    environment = {**os.environ, **ENVIRONMENT, **REGION}
    start = time.perf_counter()
    process = subprocess.Popen(command, env=environment)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command[0]} failed with {process.returncode}")
    return Run(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


@contextmanager
def _destination(folder: Path) -> Iterator[Path]:
    there = folder / "there"
    there.mkdir()
    yield there
    shutil.rmtree(there)


def _check_same(source: Path, there: Path) -> None:
    names = sorted(path.name for path in source.iterdir())
    assert names == sorted(path.name for path in there.iterdir())
    first = names[0]
    assert (source / first).read_bytes() == (there / first).read_bytes()


def _aws_command(folder: Path) -> Sequence[str]:
    found = shutil.which("aws")
    if found is not None:
        return [found]
    venv.create(folder / "awscli", with_pip=True)
    python = folder / "awscli/bin/python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "awscli"]
    subprocess.run(pip, check=True)
    return [str(python), str(folder / "awscli/bin/aws")]


def _rclone() -> str:
    beside = Path(sys.executable).parent / "rclone"
    return str(beside) if beside.exists() else "rclone"


def _rclone_config(folder: Path, server: S3Server) -> Path:
    said: Mapping[str, str] = {
        "type": "s3",
        "provider": "SeaweedFS",
        "access_key_id": ENVIRONMENT["AWS_ACCESS_KEY_ID"],
        "secret_access_key": ENVIRONMENT["AWS_SECRET_ACCESS_KEY"],
        "endpoint": server.endpoint,
    }
    path = folder / "rclone.conf"
    path.write_text("[weed]\n" + "".join(f"{name} = {value}\n" for name, value in said.items()))
    return path


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    main()
