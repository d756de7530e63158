"""A project whose PATH starts with the stand-in compiler, and the configs of both routes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import standin
from cli_samples import Project

XLA: Mapping[str, Any] = {
    "name": "neuronx",
    "route": "xla",
    "target": "trn2",
    "phases": "decode",
    "hlo_dir": "graphs",
    "versions": {
        "neuronx-cc": standin.VERSION,
        "nki": "0.7.0",
        "torch-neuronx": "2.9.0.2.15.32035",
        "vllm-neuron": "0.29.0.1.2.0",
    },
}
REFERENCE: Mapping[str, Any] = {
    "name": "neuronx",
    "engine": "reference",
    "target": "trn2",
    "phases": "decode",
    "versions": {"neuronx-cc": standin.VERSION, "torch": "2.13.0", "torch-mlir": "20261001"},
}
NATIVE: Mapping[str, Any] = {
    "name": "neuronx",
    "target": "trn2",
    "versions": {
        "neuronx-cc": standin.VERSION,
        "nki": "0.7.0",
        "libtorch-neuronx-lite": "2.13.0",
        "vllm-neuron": "0.29.0.1.2.0",
    },
}
BLOCKS = 600
UNITS = [f"decode_b{rows}_ctx{context}" for rows in (1, 2, 4) for context in (1024, 4096)]


class NeuronProject(Project):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.tools = root / "tools"
        standin.install(self.tools)
        self.environment["PATH"] = f"{self.tools}:{self.environment['PATH']}"

    def write_xla(self, name: str = "xla.yaml", flags: list[str] | None = None) -> str:
        """A config of the route xla, with a captured graph for each of its units."""
        for number, unit in enumerate(UNITS):
            folder = self.root / "graphs" / unit
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "graph.hlo").write_bytes(hlo(number))
        return self.write(
            name, toolchain={**XLA, "flags": flags or []}, num_gpu_blocks_override=BLOCKS
        )

    def received(self) -> list[dict[str, Any]]:
        return standin.received(self.tools)


def hlo(number: int) -> bytes:
    """The start of a serialised HloModuleProto: its name."""
    name = f"jit_step_{number}".encode()
    return b"\x0a" + bytes([len(name)]) + name + bytes(200)
