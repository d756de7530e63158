"""The backend `neuron`: one NEFF a graph, in a directory."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch._dynamo import register_backend

_BESIDE = Path(shutil.which("neuronx-cc")).parent
_KNOWN = {
    "TORCH_NEURONX_COMPILE_ONLY",
    "TORCH_NEURONX_DEBUG_DIR",
    "TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION",
    "TORCH_NEURONX_NEFF_CACHE_DIR",
    "TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR",
}


def _fault(shapes):
    """How to misbehave: by the number of columns of the step's block table."""
    path = _BESIDE / "torch_neuronx.json"
    orders = json.loads(path.read_text()) if path.exists() else {}
    return next((orders[str(shape[-1])] for shape in shapes if str(shape[-1]) in orders), None)


@register_backend(name="neuron")
def neuron(module, example_inputs):
    told = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("TORCH_NEURONX", "NEURON_"))
    }
    assert not {name for name in told if name.startswith("TORCH_NEURONX")} - _KNOWN
    assert told.get("TORCH_NEURONX_COMPILE_ONLY") == "1", "there is no device"
    assert all(tensor.device.type == "neuron" for tensor in example_inputs)
    inputs = [list(tensor.shape) for tensor in example_inputs]
    fault = _fault(
        size
        for size, tensor in zip(inputs, example_inputs, strict=True)
        if tensor.dtype == torch.int32
    )
    outputs = [node.meta["example_value"] for node in module.graph.output_node().args[0]]
    asked = {
        "environment": told,
        "inputs": inputs,
        "folder": str(Path.cwd()),
    }
    with (_BESIDE / "torch_neuronx.jsonl").open("a") as journal:
        journal.write(json.dumps(asked) + "\n")
    shapes = " ".join(f"{tensor.dtype}{list(tensor.shape)}" for tensor in example_inputs)
    text = f"module {shapes}\n{module.graph}"

    def compiled(*_inputs):
        _compile(text, fault)
        return tuple(
            torch.empty(tensor.shape, dtype=tensor.dtype, device="neuron") for tensor in outputs
        )

    return compiled


def _compile(text, fault):
    match fault:
        case "nothing":
            return
        case "raise":
            raise RuntimeError("StableHLO to NEFF compilation failed for torch.compile: no rule")
        case "killed":
            os.kill(os.getpid(), 9)
        case "eager":
            for line in text.splitlines()[-3:]:
                compile_text(f"module {line}", "-O1")
            return
        case "half":
            place = compile_text(text, "-O2")
            place.write_bytes(place.read_bytes()[:-100])
            return
    compile_text(text, "-O2", name=fault or "neuron_compile")


def compile_text(text, default_level, name="eager"):
    level = os.environ.get("NEURON_COMPILER_OPT_LEVEL") or default_level
    target, lnc = (
        os.environ["NEURON_PLATFORM_TARGET_OVERRIDE"],
        os.environ.get("NEURON_LOGICAL_NC_CONFIG", "2"),
    )
    flags = os.environ.get("NEURON_CC_FLAGS", "")
    spelt = flags.replace(" ", "_").replace("=", "-")
    key = hashlib.md5(f"base_{target}_{lnc}_{level}_{spelt}{text}".encode()).hexdigest()
    place = Path(os.environ["TORCH_NEURONX_NEFF_CACHE_DIR"]) / key[:2] / key[2:4] / f"{key}.neff"
    locks = Path(os.environ["TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR"]) / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    (locks / f"{key}.lock").touch()
    if place.exists() and place.stat().st_size:
        return place
    with tempfile.TemporaryDirectory(prefix=f"{name}-") as temporary:
        # The stand-in compiler takes orders by the name of the folder above its own.
        folder = Path(temporary) / "work"
        folder.mkdir()
        (folder / "module.mlir").write_text(text)
        done = subprocess.run(
            [
                *("neuronx-cc", "compile", "module.mlir", "--framework", "XLA", "--target", target),
                *("--lnc", lnc, level, "--model-type", "transformer", "--auto-cast=none"),
                *shlex.split(flags),
                *("--output", "module.neff"),
            ],
            cwd=folder,
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            raise RuntimeError(
                f"neuronx-cc compilation failed with exit code {done.returncode}: {done.stdout}"
            )
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(folder / "module.neff", place)
    return place
