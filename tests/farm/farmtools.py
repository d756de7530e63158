"""What the farm's tests share: units of the hostile toolchain, farms in programs of their own, and
what is left on the host afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from neffbuild.cache.canonical import digest_file
from neffbuild.cache.catalog import Hit, entry_key, read_entry
from neffbuild.cache.directory import DirectoryStore
from neffbuild.cache.recipe import family_recipe, recipe_key, unit_recipe
from neffbuild.config.build import BuildConfig, FarmConfig
from neffbuild.config.model import ModelConfig
from neffbuild.config.serve import ServeConfig
from neffbuild.farm.outcomes import Event, RunResult
from neffbuild.farm.run import compile_units
from neffbuild.grid.shapes import DecodeShape, Family
from neffbuild.toolchain.base import Unit
from neffbuild.toolchain.registry import load_toolchain

# A folder with a module and its metadata, as an installed package has them.
PLUGIN = str(Path(__file__).parent / "plugin")
if PLUGIN not in sys.path:
    sys.path.append(PLUGIN)


def make_units(folder: Path, count: int, toolchain: str = "hostile") -> list[Unit]:
    """Units `decode_b1_ctx128`, `decode_b2_ctx128` … that obey `folder/control.json`."""
    serve = ServeConfig(
        model="none",
        max_model_len=4096,
        max_num_seqs=count,
        block_size=16,
        control=str(folder / "control.json"),
    )
    config = BuildConfig("tests", serve, ModelConfig("none", {"model_type": "none"}))
    identity = load_toolchain(toolchain).identity(config)
    shared = family_recipe(config, Family.TARGET, identity, num_kv_blocks=None)
    units = []
    for num_seqs in range(1, count + 1):
        shape = DecodeShape(Family.TARGET, num_seqs, 1, 128)
        recipe = unit_recipe(shared, shape)
        units.append(Unit(config, shape, recipe, recipe_key(recipe)))
    return units


def order(folder: Path, seconds: float = 0, **behaviour: str) -> None:
    """Tell the hostile toolchain what to do: `b3="hang"` is for `decode_b3_ctx128`."""
    named = {f"decode_{name}_ctx128": what for name, what in behaviour.items()}
    (folder / "control.json").write_text(json.dumps({"seconds": seconds, "behaviour": named}))


def journal(folder: Path) -> list[tuple[str, int]]:
    """(bucket name, worker) of every compile that began."""
    lines = (folder / "journal").read_text().splitlines()
    return [(name, int(pid)) for name, pid in map(str.split, lines)]


@dataclass(frozen=True)
class SmallHost:
    """A host with so many cores and bytes of memory, of which only what `eat_memory` and `hold_memory`
    take is missing."""

    cpus: int
    total_memory: int
    cpus_of = memory_of = "this host"

    def available_memory(self) -> int:
        return max(0, self.total_memory - eaten_bytes())

    def free_scratch(self, folder: Path) -> int:
        return 1 << 40


class RoomyHost:
    """A host on which as many workers run as a test asks for, whatever this machine has."""

    cpus = 64
    total_memory = 1 << 40
    cpus_of = memory_of = "this host"

    def available_memory(self) -> int:
        return 1 << 40

    def free_scratch(self, folder: Path) -> int:
        return 1 << 40


def eaten_bytes() -> int:
    """Resident bytes of the programs that hostile compiles have started to take memory."""
    total = 0
    for process in left_processes():
        with contextlib.suppress(psutil.Error):
            if any("bytearray(" in word for word in process.cmdline()):
                total += process.memory_info().rss
    return total


def run(
    folder: Path,
    count: int,
    *,
    toolchain: str = "hostile",
    host: SmallHost | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
    **farm: Any,
) -> RunResult:
    """One farm in this process, with its store and logs in `folder`; `farm` are fields of `FarmConfig`."""
    return compile_units(
        make_units(folder, count, toolchain),
        load_toolchain(toolchain),
        DirectoryStore(folder / "store"),
        FarmConfig(**{"workers": 2, "retries": 0, **farm}),
        logs=folder / "logs",
        on_event=on_event,
        host=host or RoomyHost(),
    )


def start(folder: Path, count: int, **options: Any) -> subprocess.Popen[str]:
    """The same farm in a program and process group of its own, as a shell would start it."""
    program = str(Path(__file__).parent / "drive.py")
    return subprocess.Popen(
        [sys.executable, program, str(folder), str(count), json.dumps(options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )


def check_store(folder: Path) -> int:
    """Every entry in the store is whole, every byte of it; returns how many there are."""
    store = DirectoryStore(folder / "store")
    found = 0
    for listed in store.list("entries/"):
        hit = read_entry(store, entry_key(listed.name))
        assert isinstance(hit, Hit), hit
        for record in hit.entry.files.values():
            assert digest_file(store.blob_path(record.digest)) == record.digest
        found += 1
    return found


def left_processes() -> list[psutil.Process]:
    """Living processes of farms whose TMPDIR is this process's: the mark is in their environment."""
    farms = f"{os.environ['TMPDIR']}/neffbuild-farms"
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TMPDIR", "").startswith(farms):
                found.append(process)
        except psutil.Error:
            continue
    return found


def left_folders() -> list[Path]:
    """What farms have left of their folders."""
    return list(Path(os.environ["TMPDIR"]).glob("neffbuild-farms-*/*/*"))


def becomes_empty(left: Callable[[], Sequence[object]], seconds: float = 10.0) -> bool:
    """Whether nothing is left within `seconds`."""
    deadline = time.monotonic() + seconds
    while left():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
