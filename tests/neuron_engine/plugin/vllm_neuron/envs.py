"""The variables a start is told by. What is not set as this stand-in knows it is an error, not a default."""

from __future__ import annotations

import os
from pathlib import Path

SHOWN = ("VLLM_", "NEURON_", "HF_", "AWS_", "TMPDIR")
"""Beginnings of the names of variables that the journal of starts keeps."""


def is_cpu_compile() -> bool:
    """Raises for what excludes it, or that it needs."""
    if not _on("VLLM_NEURON_CPU_COMPILE"):
        return False
    if _on("VLLM_NEURON_CPU_MODE"):
        raise ValueError("VLLM_NEURON_CPU_COMPILE and VLLM_NEURON_CPU_MODE are mutually exclusive")
    if not os.environ.get("NEURON_PLATFORM_TARGET_OVERRIDE"):
        raise ValueError("NEURON_PLATFORM_TARGET_OVERRIDE must be set for CPU compilation")
    return True


def is_xla() -> bool:
    """Of the 0.24 line: only `neuron_native` is the native route."""
    return os.environ["VLLM_NEURON_BACKEND"] != "neuron_native"


def target() -> str:
    """That of the device is asked for where nothing says it; a farm says it."""
    return os.environ["NEURON_PLATFORM_TARGET_OVERRIDE"]


def parallel_trace() -> bool:
    return not _on("VLLM_NEURON_DISABLE_PARALLEL_TRACE")


def compile_workers() -> int:
    return int(os.environ.get("NEURON_LIBTORCH_PARALLEL_COMPILE_WORKERS", "8"))


def skips(phase: str) -> bool:
    return _on(f"VLLM_NEURON_SKIP_{phase}_WARMUP") or _on("VLLM_NEURON_SKIP_PREFILL_DECODE_WARMUP")


def cache_dir() -> Path:
    root = os.environ.get("VLLM_CACHE_ROOT", str(Path.home() / ".cache" / "vllm"))
    return Path(root, "neuron", "compile_cache")


def _on(name: str) -> bool:
    return os.environ.get(name) == "1"
