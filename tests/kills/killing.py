"""Commands that are killed, the stores they work on, and what must hold of these afterwards."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from cache_samples import ANYONE, fill, make_manifest
from cli_samples import UNITS, Project
from s3_servers import ENVIRONMENT, S3Server

from neffbuild.cache import gc_rules
from neffbuild.cache.catalog import entry_key, read_hits
from neffbuild.cache.directory import DirectoryStore
from neffbuild.cache.gc import collect
from neffbuild.cache.gc_rules import Policy
from neffbuild.cache.lease import read_claims
from neffbuild.cache.open import open_store
from neffbuild.cache.store import Store
from neffbuild.cache.transfer import push
from neffbuild.cache.verify import verify_store

PLUGIN = Path(__file__).parent / "plugin"
GARBAGE = 12
TAG = "llama:v1"
Process = subprocess.Popen[bytes]


@dataclass
class Place:
    """A project, and where its stores are made: folders, or prefixes of one bucket."""

    root: Path
    server: S3Server | None
    bucket: str = ""
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.project = Project(self.root / "project")
        self.project.environment |= {
            "PYTHONPATH": str(PLUGIN),
            "XDG_RUNTIME_DIR": os.environ["XDG_RUNTIME_DIR"],
            **ENVIRONMENT,
        }
        self.config = self.project.write(
            toolchain={"name": "bulky"}, sections={"cache": {"name": "llama"}}
        )

    def new_store(self) -> str:
        """The URL of a store that is not there yet."""
        number = next(self.numbers)
        if self.server is None:
            return str(self.root / f"store{number}")
        return self.server.url(self.bucket, f"store{number}")

    def new_cache(self) -> Path:
        return self.root / f"cache{next(self.numbers)}"

    def run(self, *words: str) -> None:
        """Run a command to its end, as whoever finds the last one killed does."""
        ran = self.project.run(*words)
        assert ran.status == 0, ran

    def start(self, words: Iterable[str]) -> Process:
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        return self.project.start(*words, process_group=0, **silent)

    def times(self, target: Target) -> tuple[float, float]:
        """Seconds until a command begins to write and until it ends."""
        start = time.monotonic()
        with self.start(target.words) as process:
            wait_for_work(process, target)
            began = time.monotonic() - start
            assert process.wait(timeout=120) == 0
        return began, time.monotonic() - start

    def left_processes(self) -> list[psutil.Process]:
        """Living processes of this project, by the mark in their environment."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                temporary = process.environ().get("TMPDIR", "")
                if temporary.startswith(self.project.environment["TMPDIR"]):
                    found.append(process)
        return found

    def left_folders(self) -> list[Path]:
        """What farms have left of their folders."""
        return list(Path(self.project.environment["TMPDIR"]).glob("neffbuild-farms-*/*/*"))


@dataclass(frozen=True)
class Target:
    """What one command line works on until it is complete: `stores` are those it writes to, `complete`
    checks that nothing is left to do."""

    words: tuple[str, ...]
    stores: tuple[str, ...]
    complete: Callable[[], None]


def pushing(place: Place) -> Callable[[], Target]:
    """Makes targets of `push`: empty stores."""
    place.run("compile", place.config)

    def target() -> Target:
        url = place.new_store()

        def complete() -> None:
            assert len(entries(url)) == len(UNITS)
            assert [one.name for one in open_store(url).list("tags/")] == ["tags/llama/v1.json"]

        return Target(("push", place.config, "--to", url, "--tag", TAG), (url,), complete)

    return target


def pulling(place: Place) -> Callable[[], Target]:
    """Makes targets of `pull`: empty caches."""
    place.run("compile", place.config)
    url = place.new_store()
    place.run("push", place.config, "--to", url, "--tag", TAG)

    def target() -> Target:
        cache = place.new_cache()
        ready = cache.with_suffix(".ready")

        def complete() -> None:
            assert ready.exists()
            assert len(entries(str(cache))) == len(UNITS)

        words = ("pull", url, "--tag", TAG, "--cache", str(cache), "--ready-file", str(ready))
        return Target(words, (str(cache),), complete)

    return target


def compiling(place: Place) -> Callable[[], Target]:
    """Makes targets of `compile`: an empty cache and an empty remote that units are published to."""

    def target() -> Target:
        cache, url = place.new_cache(), place.new_store()

        def complete() -> None:
            assert len(entries(str(cache))) == len(entries(url)) == len(UNITS)
            assert becomes_empty(place.left_processes)

        words = ("compile", place.config, "--cache", str(cache), "--remote", url, "--workers", "2")
        return Target(words, (str(cache), url), complete)

    return target


def collecting(place: Place) -> Callable[[], Target]:
    """Makes targets of `gc`: stores with a tag, and much that no tag leads to."""
    place.run("compile", place.config)
    source = DirectoryStore(place.root / "source")
    garbage = make_manifest(fill(source, place.root / "scratch", GARBAGE))

    def filled() -> str:
        url = place.new_store()
        place.run("push", place.config, "--to", url, "--tag", TAG)
        push(source, open_store(url), garbage, None, trust=ANYONE)
        return url

    ahead: list[str] = []

    def target() -> Target:
        if not ahead:
            ahead.extend(filled() for _ in range(4))
            time.sleep(2.1)  # older than the grace, by a clock of whole seconds
        url = ahead.pop()

        def complete() -> None:
            assert len(entries(url)) == len(UNITS)
            assert len(list(open_store(url).list("manifests/"))) == 1

        return Target(("gc", url, "--untagged", "--grace", "1s", "--delete"), (url,), complete)

    return target


def kill(process: Process, chance: random.Random) -> None:
    """End a command as it happens: the process alone (memory ran out), its group (a closed terminal), or
    all that it started (a container)."""
    match chance.randrange(3):
        case 0:
            process.kill()
        case 1:
            os.killpg(process.pid, signal.SIGKILL)
        case _:
            with contextlib.suppress(psutil.NoSuchProcess):
                tree = psutil.Process(process.pid).children(recursive=True)
                process.kill()
                for one in tree:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        one.kill()


def wait_for_work(process: Process, target: Target) -> None:
    """Until a command has written the first document, or has ended."""
    stores = [open_store(url) for url in target.stores]
    before = [names(store) for store in stores]
    while process.poll() is None and [names(store) for store in stores] == before:
        time.sleep(0.005)


def names(store: Store) -> set[str]:
    """Those of all documents."""
    return {one.name for one in store.list("")}


def entries(url: str) -> set[str]:
    """The keys of the whole entries of a store."""
    store = open_store(url)
    return set(read_hits(store, [entry_key(one.name) for one in store.list("entries/")]))


def check_visible(url: str) -> int:
    """Every byte that is visible in a store is right; how many documents and blobs there are."""
    store = open_store(url)
    found = verify_store(store, ANYONE)
    assert found.problems == ()
    return len(list(store.list(""))) + len(list(store.list_blobs()))


def check_nothing_left(url: str) -> None:
    """After a collector nothing is in a store but what a tag, a config or an entry leads to."""
    store = open_store(url)
    with pytest.MonkeyPatch.context() as patch:
        # As if hours had passed.
        patch.setattr(gc_rules, "BEING_WRITTEN", -60.0)
        collect(store, Policy(grace=-60.0), delete=True)
    claims = read_claims(store)
    assert not claims.writers
    assert not claims.ended
    assert [one for one in store.list_leftovers() if one.kind != "loaded"] == []
    held = {blob for entry in read_hits(store, entries(url)).values() for blob in entry.blobs}
    assert {one.name for one in store.list_blobs()} == held
    if isinstance(store, DirectoryStore):
        documents = {one.name for one in store.list("")}
        documents |= {f"blobs/sha256/{blob[:2]}/{blob}" for blob in held}
        base = store.root / "v1"
        there = {str(path.relative_to(base)) for path in base.rglob("*") if path.is_file()}
        assert there == documents


def becomes_empty(left: Callable[[], Sequence[object]], seconds: float = 15.0) -> bool:
    """Whether nothing is left within `seconds`."""
    deadline = time.monotonic() + seconds
    while left():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
