"""Neuron's runtime, as far as a start meets it: whose the cores are, and which NEFFs they take.

A device is a file `/dev/neuron<N>` that says of itself `{"chip": "trn2", "cores": 4}`; a core that is taken
is a locked byte of it.
"""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_taken: list[IO[bytes]] = []
"""Open as long as the process lives: that is how long its cores are its own."""


@dataclass(frozen=True)
class Device:
    """The cores of this process, all on chips of one kind."""

    chip: str

    def load(self, entry: Path) -> None:
        """Raises for a program that is not there, or of another chip."""
        command = (entry / "command.txt").read_text().split()
        if command[command.index("--target") + 1] != self.chip:
            raise RuntimeError(f"nrt_load of {entry.name} failed: NRT_INVALID on {self.chip}")
        (entry / f"graph_{entry.name}.neff").read_bytes()


def nrt_init(ranks: int) -> Device:
    """Takes every core that the process can see, as the runtime does; each rank needs one."""
    nodes = sorted(Path("/dev").glob("neuron[0-9]*"))
    if not nodes:
        raise RuntimeError("nrt_init failed: no Neuron device")
    cores, chips = [], set()
    for node in nodes:
        device = json.loads(node.read_text())
        chips.add(device["chip"])
        cores += [(node, core) for core in range(device["cores"])]
    wanted = [cores[number] for number in _visible(len(cores)) if number < len(cores)]
    for node, core in wanted:
        file = node.open("r+b")
        _taken.append(file)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, core)
        except OSError:
            raise _not_available(ranks, 0) from None
    if len(wanted) < ranks:
        raise _not_available(ranks, len(wanted))
    return Device(chips.pop())


def _visible(count: int) -> list[int]:
    if said := os.environ.get("NEURON_RT_VISIBLE_CORES"):
        parts = [part.partition("-") for part in said.split(",")]
        return [
            core for first, _, last in parts for core in range(int(first), int(last or first) + 1)
        ]
    return list(range(int(os.environ.get("NEURON_RT_NUM_CORES", "0")) or count))


def _not_available(wanted: int, free: int) -> RuntimeError:
    return RuntimeError(
        f"Logical Neuron Core(s) not available - Requested:{wanted} Available:{free}"
    )
