"""A project beside which a stand-in vLLM Neuron is installed, with a stand-in neuronx-cc on PATH."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import standin
from cli_samples import MODEL, Project, Ran
from device_host import DeviceHost

from neffbuild.cache.directory import DirectoryStore
from neffbuild.cache.layouts.layout import layout_file
from neffbuild.cache.layouts.vllm_neuron import NAME
from neffbuild.toolchain.neuronx.hlo_shapes import parameter_shapes

PLUGIN = Path(__file__).parent / "plugin"
XLA: Mapping[str, Any] = {
    "name": "neuronx",
    "route": "xla",
    "engine": "vllm-neuron",
    "target": "trn2",
    "phases": "decode",
}
BLOCKS = 600
ROWS, CONTEXTS, BLOCK = (1, 2, 4), (1024, 4096), 32
UNITS = [f"decode_b{rows}_ctx{context}" for rows in ROWS for context in CONTEXTS]


class EngineProject(Project):
    """Configs of it have units `UNITS`, and obey `control`."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.tools = root / "tools"
        standin.install(self.tools)
        self.environment["PATH"] = f"{self.tools}:{self.environment['PATH']}"
        self.environment["PYTHONPATH"] = str(PLUGIN)
        self.control = root / "control.json"
        self.host: DeviceHost | None = None

    def start(self, *words: str, **options: Any) -> subprocess.Popen[bytes]:
        if self.host is not None:
            options = {"prefix": self.host.prefix, **options}
        return super().start(*words, **options)

    def attach(self, name: str = "neuron0", *, chip: str = "trn2", cores: int = 4) -> Path:
        """From now on there is this device beside what is run; the file that it is. Checkpoints too, which
        a start beside a device reads."""
        if self.host is None:
            self.host = DeviceHost(self.root / "dev")
            for model in ("model", "draft"):
                (self.root / model / "model.safetensors").write_bytes(b"weights")
        return self.host.add(name, chip=chip, cores=cores)

    def configure(
        self,
        *,
        toolchain: Mapping[str, Any] | None = None,
        neuron: Mapping[str, Any] | None = None,
        farm: Mapping[str, Any] | None = None,
        **serve: Any,
    ) -> str:
        """Write a config; `neuron` are further options of `neuron_config`."""
        lists = {"decode_context_length_buckets": [1024], **(neuron or {})}
        additional = {
            "neuron_config": {name: value for name, value in lists.items() if value is not None},
            "control": str(self.control),
        }
        sections = {"farm": {"retries": 0, **(farm or {})}}
        return self.write(
            toolchain={**XLA, **(toolchain or {})},
            sections=sections,
            **{
                "num_gpu_blocks_override": BLOCKS,
                "max_num_batched_tokens": 2048,
                "additional_config": additional,
                **serve,
            },
        )

    def order(self, **faults: Any) -> None:
        """Tell the engine how to misbehave: see `vllm_neuron.compile.faults`."""
        self.control.write_text(json.dumps(faults), encoding="utf-8")

    def starts(self) -> list[dict[str, Any]]:
        """What each start of the engine was told, `options` and `environment`."""
        path = self.root / "starts.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def compiles(self) -> int:
        """How often the compiler has run."""
        return len(standin.received(self.tools))

    def entries(self) -> dict[str, dict[str, Any]]:
        """Key of a unit → its entry."""
        paths = (self.cache / "v1" / "entries").glob("*/*.json")
        return {path.stem: json.loads(path.read_text()) for path in paths}


def graph_name(rows: int, context: int) -> str:
    """What the stand-in calls the graph of a decode unit."""
    return f"decode_b{rows}_w{-(-context // BLOCK)}"


def outcomes(ran: Ran) -> dict[str, str]:
    return {unit["bucket_name"]: unit["outcome"] for unit in ran.document["units"]}


def causes(ran: Ran) -> dict[str, tuple[str, str]]:
    """Unit → kind and text of why it failed."""
    return {
        unit["bucket_name"]: (unit["cause_kind"], unit["cause"])
        for unit in ran.document["units"]
        if unit["outcome"] == "failed"
    }


def stored_tree(project: EngineProject, key: str, folder: Path) -> dict[str, Path]:
    """The engine's files of an entry, under the names they have in its cache."""
    store = DirectoryStore(project.cache)
    files = {}
    for name, record in project.entries()[key]["files"].items():
        inside = layout_file(NAME, name)
        assert inside is not None
        path = files[inside] = folder / inside
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(store.blob_path(record["digest"]).read_bytes())
    return files


def block_tables(graph: Path) -> set[tuple[int, ...]]:
    parameters = parameter_shapes(graph.read_bytes())
    return {one.dims for one in parameters if one.integer and len(one.dims) == 2}


WINDOWED = {
    **MODEL,
    "sliding_window": 1024,
    "layer_types": ["sliding_attention", "full_attention"] * 4,
}
"""A model half of whose layers have a window; its tables are as wide as those of a context of 1152."""
