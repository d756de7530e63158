"""Engines' caches as the engines leave them, written from their published behaviour and from nothing of ours,
and the rules by which those engines take what is there for finished."""

from __future__ import annotations

import base64
import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "neuronx"))

from neffs import make_neff

NKI_ROOT = "/var/tmp/nki-intermediate-cache"
SOURCE_PATH = "/home/builder/vllm-root/neuron/compile_cache"
"""Where the machine that compiled keeps its cache; only what holds it by contract may say so."""


def key_of(number: int) -> str:
    """The engine's key of a graph: 32 hex digits."""
    return hashlib.md5(b"graph %d" % number).hexdigest()


def neff(number: int = 0, *, build: str = "2.27.5334.0+abcd") -> bytes:
    """A container with a payload of its own."""
    return make_neff({"info.json": b"{}", "sg00/pe.bin": b"%d" % number * 500}, build_version=build)


def varint(number: int) -> bytes:
    out = b""
    while number > 127:
        out += bytes([number & 127 | 128])
        number >>= 7
    return out + bytes([number])


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def hlo(number: int = 0, *kernels: str) -> bytes:
    """An HloModuleProto with a custom call for each kernel binary."""
    instructions = [field(1, b"param.%d" % number) + field(2, b"parameter")]
    for path in kernels:
        config = {"kernel": "nki_attention", "klir_binary": {"binary": path, "input_names": ["q"]}}
        encoded = base64.b64encode(json.dumps(config).encode())
        instructions.append(
            field(1, b"call") + field(2, b"custom-call") + field(28, b"AwsNeuronCustomNativeKernel")
            + field(43, encoded) + field(71, b"tail")
        )  # fmt: skip
    computation = field(1, b"main") + b"".join(field(2, one) for one in instructions)
    return field(1, b"module_%d" % number) + field(2, b"main") + field(3, computation)


def write(folder: Path, contents: Mapping[str, bytes]) -> Path:
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def vllm_entry(
    root: Path, number: int = 0, *, kernels: tuple[str, ...] = (), **changed: Any
) -> Path:
    """A finished entry of the XLA route. `changed` are files to replace, by a name without what Python does
    not allow in one; None leaves a file out."""
    key = key_of(number)
    binary = neff(number)
    contents: dict[str, bytes | None] = {
        "graph.hlo": hlo(number, *kernels),
        f"graph_{key}.neff": binary,
        ".artifact_metadata_v0.json": json.dumps(
            {"version": 0, "cache_key": key, "output_count": 2, "io_map": [[0, 1]]}
        ).encode(),
        "command.txt": (
            f"neuronx-cc compile {SOURCE_PATH}/{key}/graph.hlo --framework XLA --target trn2 "
            f"--output {SOURCE_PATH}/{key}/graph_{key}.neff --auto-cast=none\n"
        ).encode(),
        "log-neuron-cc.txt": f"reading {SOURCE_PATH}/{key}/graph.hlo\n".encode(),
        "fxgraph.txt": b"graph():\n    %x = placeholder\n",
        "example_inputs.txt": b"int32[4] (1,)\n",
        "hlo_passes/step1_torch_xla_trace.hlo": hlo(number),
        "rank0/graph.hlo": hlo(number),
        ".cache_accessed": b"1790000000.5",
        ".compilation_complete": b"completed:1790000000\nneff_size:%d\ncompleted_by_rank:0\n"
        % len(binary),
    }
    names = {
        "graph": "graph.hlo",
        "neff": f"graph_{key}.neff",
        "metadata": ".artifact_metadata_v0.json",
        "sentinel": ".compilation_complete",
        "command": "command.txt",
    }
    contents.update({names[name]: content for name, content in changed.items()})
    return write(root / key, {name: one for name, one in contents.items() if one is not None})


def native_entry(root: Path, number: int = 0) -> Path:
    """What the native route may leave, by the names its compiler is called with."""
    key, binary = key_of(number), neff(number, build="2.28.7631.0")
    return write(
        root / key,
        {
            "module.mlir": b"module @m { func.func public @main() { return } }\n",
            "module.neff": binary,
            ".artifact_metadata_v1.json": json.dumps({"cache_key": key}).encode(),
            ".compilation_complete": b"completed:1790000000\nneff_size:%d\n" % len(binary),
        },
    )


def vllm_metadata(root: Path, number: int, *, pid: int, name: str, command: str) -> Path:
    """What a process writes that compiles an entry."""
    path = root / f".{key_of(number)}.compilation_metadata"
    path.write_text(
        f"pid:{pid}\nprocess_name:{name}\ncmdline:{command}\nrank:0\ntimestamp:1790000000.0\n"
    )
    (root / f".{key_of(number)}.compilation_metadata.lock").touch()
    return path


def torch_entry(root: Path, number: int = 0, **of_neff: Any) -> Path:
    key = key_of(number)
    write(root, {f"{key[:2]}/{key[2:4]}/{key}.neff": neff(number, **of_neff)})
    return root / key[:2] / key[2:4] / f"{key}.neff"


def xla_module(
    root: Path, number: int = 0, *, version: str = "2.16.372.0+abc", **changed: Any
) -> Path:
    """A finished module of libneuronxla; `changed` as for `vllm_entry`."""
    contents: dict[str, bytes | None] = {
        "model.hlo_module.pb": hlo(number),
        "compile_flags.json": b'["--target=trn1", "--model-type=transformer"]',
        "model.neff": neff(number, build=version),
        "model.done": b"",
        "wrapped_neff.hlo": b"wrapped",
    }
    names = {
        "graph": "model.hlo_module.pb",
        "neff": "model.neff",
        "done": "model.done",
        "log": "model.log",
        "lock": "model.hlo_module.pb.lock",
    }
    contents.update({names[name]: content for name, content in changed.items()})
    folder = root / f"neuronxcc-{version}" / f"MODULE_{number + 11111}+abc123de"
    return write(folder, {name: one for name, one in contents.items() if one is not None})


def vllm_hit(root: Path, key: str) -> bool:
    """Whether vLLM Neuron takes `<root>/<key>/` for a hit: the graph, the NEFF that has the key in its name,
    the sentinel and metadata whose cache_key is the folder's name."""
    folder = root / key
    if not (folder / ".compilation_complete").is_file():
        return False
    metadata = list(folder.glob(".artifact_metadata_v*.json"))
    if not metadata or not (folder / "graph.hlo").is_file():
        return False
    if not (folder / f"graph_{key}.neff").is_file():
        return False
    return all(json.loads(one.read_text())["cache_key"] == key for one in metadata)


def sentinel_lines(root: Path, key: str) -> dict[str, str]:
    text = (root / key / ".compilation_complete").read_text()
    return dict(line.split(":", 1) for line in text.splitlines())


def torch_hit(root: Path, key: str) -> bool:
    path = root / key[:2] / key[2:4] / f"{key}.neff"
    return path.is_file() and path.stat().st_size > 0


def xla_state(folder: Path) -> str:
    """In the order in which Hugging Face's cleaner of this cache asks."""
    names = {one.name for one in folder.iterdir()} if folder.is_dir() else set()
    if {"model.neff", "model.done"} <= names:
        return "success"
    if "model.log" in names and "model.neff" not in names:
        return "failed"
    return "locked" if any(name.endswith(".lock") for name in names) else "empty"


def content(folder: Path) -> dict[str, bytes]:
    """name → bytes, of every file below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
