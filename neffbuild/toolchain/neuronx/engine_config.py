"""What vLLM Neuron is started with to compile one row of the grid, and when it cannot be.

A row is what one start compiles: the decode programs of one batch bucket, or all prefill programs. The
serve config is narrowed to it by `num_seqs_buckets` and `max_num_seqs` alone; context ladder,
`max_model_len` and number of KV blocks stay as they are, because each of them is in every graph of the
row. That the graphs of a row are those of the full start is an inference from vLLM Neuron's code, where
`max_num_seqs` sizes the input batch and is no part of the KV budget. It does not hold for a model that keeps
state per slot, sized by `max_num_seqs`; such models are refused.

Of generations vLLM Neuron 0.21 to 0.24 (SDK 2.32 and before) on the route xla is documented well enough to
be started: capture backend, then parallel compile. For the route native, and for 0.25 and later on either,
it is not, and they are refused.

Imports neither vLLM nor torch: plans are made by this.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from neffbuild.config.build import BuildConfig
from neffbuild.grid.shapes import DecodeShape, Shape
from neffbuild.toolchain.base import KVGroup
from neffbuild.toolchain.kv_groups import kv_groups
from neffbuild.toolchain.neuronx.flags import (
    CC_FLAGS,
    TARGET,
    VERBOSE,
    canonical_flags,
    environment_flags,
)
from neffbuild.toolchain.neuronx.routes import BACKEND, NATIVE, REFERENCE, VLLM_NEURON, Route
from neffbuild.toolchain.neuronx.target import LOGICAL_CORES, TARGET_OVERRIDE, resolve_target

CPU_COMPILE = "VLLM_NEURON_CPU_COMPILE"
CPU_MODE = "VLLM_NEURON_CPU_MODE"
NEURON = "neuron"
"""The device that some units need, as plans name it."""

_GENERATIONS = ((0, 21), (0, 24))
_MOVED = (0, 24)
"""The release that calls variables of its compile stack `NEURON_LIBTORCH_*`."""
_XLA_BACKEND = "vllm_neuron"
_WAIT_SECONDS = 7 * 24 * 3600
"""How long ranks wait for the one that compiles: when that is too long is for the farm to say."""
_RELEASE = re.compile(r"(\d+)\.(\d+)(?:\.|$)")

# The models are in folders of the start's own, with overrides applied; tokenizers reach no graph.
_NOT_FOR_WARM_UP = frozenset(
    {
        "model",
        "hf_config_path",
        "hf_overrides",
        "config_format",
        "revision",
        "code_revision",
        "tokenizer",
        "tokenizer_mode",
        "tokenizer_revision",
    }
)


@dataclass(frozen=True, slots=True)
class Row:
    """The programs one start compiles: the decode programs of `num_seqs` rows; prefill's where it is
    None."""

    num_seqs: int | None

    def __str__(self) -> str:
        return "prefill" if self.num_seqs is None else f"decode_b{self.num_seqs}"

    def holds(self, shape: Shape) -> bool:
        return row_of(shape) == self


def row_of(shape: Shape) -> Row:
    """The row that a shape is compiled with."""
    return Row(shape.num_seqs if isinstance(shape, DecodeShape) else None)


def starts_engine(config: BuildConfig, route: Route) -> bool:
    """Whether the config's graphs come from a start of vLLM Neuron, rather than from a folder of them or
    from our own decoder."""
    return route.engine == VLLM_NEURON and config.toolchain.hlo_dir is None


def start_of(config: BuildConfig, shape: Shape, route: Route) -> str | None:
    """Which start a unit comes of, in words; None where its graph comes of none."""
    return str(row_of(shape)) if starts_engine(config, route) else None


def device_need(config: BuildConfig, route: Route) -> str | None:
    """The device beside which a config's units are captured; None where any host does it.

    vLLM Neuron's documentation says that speculation is not supported in CPU compile, and nothing was
    found in its code that would refuse it: graphs would be missing.
    """
    speculates = config.serve.speculative_config is not None
    return NEURON if speculates and starts_engine(config, route) else None


def start_refusal(config: BuildConfig, route: Route, versions: Mapping[str, str]) -> str | None:
    """Why vLLM Neuron cannot be started for the config's graphs, on any host."""
    if route.name == NATIVE:
        return (
            "how vLLM Neuron captures graphs of the route native without a device is not documented: set "
            "toolchain.route to xla (vLLM Neuron 0.21 to 0.24), or toolchain.engine to "
            f"{REFERENCE} for our own decoder's graphs"
        )
    release = versions.get("vllm-neuron")
    if release is not None and generation(release) is None:
        return (
            f"vLLM Neuron {release} is planned, and which {BACKEND} has it take the route xla is published "
            "for 0.21 to 0.24 only: pin toolchain.versions.vllm-neuron to one of these, or set "
            "toolchain.hlo_dir to graphs that it has captured"
        )
    serve = config.serve
    for field, model in (("serve.model", config.model), ("the draft", config.draft_model)):
        if model is not None and KVGroup.RECURRENT in kv_groups(model):
            return (
                f"{field} {model.name} keeps recurrent state for each slot, sized by max_num_seqs: its "
                "graphs cannot be captured one batch bucket at a time; let the engine compile at its first "
                "start"
            )
    if serve.data_parallel_size > 1:
        return (
            f"data_parallel_size is {serve.data_parallel_size}, and how one replica of several is started "
            "without the others is not documented: set toolchain.hlo_dir to graphs that the engine has "
            "captured"
        )
    if config.toolchain.flags:
        return (
            "vLLM Neuron hands neuronx-cc arguments of its own on the route xla: unset toolchain.flags, or "
            "set toolchain.hlo_dir to graphs that it has captured"
        )
    return _environment_refusal(config, os.environ)


def _environment_refusal(config: BuildConfig, environment: Mapping[str, str]) -> str | None:
    """Why what the environment asks of neuronx-cc would be in the key and not in the NEFF: the engine's own
    command line has neither other flags nor a grouping of cores."""
    stated = canonical_flags(environment_flags(environment.get(CC_FLAGS, "")))
    if words := [str(flag) for flag in stated if flag.name not in (TARGET, VERBOSE)]:
        return (
            f"{CC_FLAGS} has {' '.join(words)}, and vLLM Neuron hands neuronx-cc arguments of its own on the "
            "route xla: unset it, or set toolchain.hlo_dir to graphs that it has captured"
        )
    target = resolve_target(config.toolchain.target, stated, environment)
    if not target.is_default:
        return (
            f"{LOGICAL_CORES} is {target.lnc}, and vLLM Neuron has neuronx-cc group cores by its default on "
            "the route xla: unset it, or set toolchain.hlo_dir to graphs that it has captured"
        )
    return None


def generation(release: str) -> tuple[int, int] | None:
    """(major, minor) of a release of vLLM Neuron that can be started; None for any other."""
    found = _RELEASE.match(release)
    if found is None:
        return None
    stated = (int(found[1]), int(found[2]))
    first, last = _GENERATIONS
    return stated if first <= stated <= last else None


def engine_options(
    config: BuildConfig, row: Row, num_kv_blocks: int, model: str, draft: str | None
) -> dict[str, Any]:
    """vLLM's options for a start that ends when a row is compiled. `model` and `draft` are folders that
    hold the models."""
    options = {
        name: value
        for name, value in config.serve.model_dump(mode="json", exclude_none=True).items()
        if name not in _NOT_FOR_WARM_UP
    }
    options |= {
        "model": model,
        "num_gpu_blocks_override": num_kv_blocks,
        "skip_tokenizer_init": True,
    }
    if draft is not None:
        options["speculative_config"] = {**options["speculative_config"], "model": draft}
    if row.num_seqs is not None:
        additional = options["additional_config"]
        neuron = {**additional["neuron_config"], "num_seqs_buckets": [row.num_seqs]}
        options["max_num_seqs"] = row.num_seqs
        options["additional_config"] = {**additional, "neuron_config": neuron}
    return options


def engine_environment(
    row: Row, chip: str, release: tuple[int, int], cache_root: str, *, on_device: bool
) -> dict[str, str]:
    """The variables that a start is told by, beside those of the worker. `cache_root` is the folder that
    the engine keeps its caches in."""
    own = "NEURON_LIBTORCH" if release >= _MOVED else "VLLM_NEURON"
    skipped = "DECODE" if row.num_seqs is None else "PREFILL"
    return {
        **({} if on_device else {CPU_COMPILE: "1"}),
        TARGET_OVERRIDE: chip,
        BACKEND: _XLA_BACKEND,
        "VLLM_CACHE_ROOT": cache_root,
        # For processes in which the plugin does not set it.
        "NEURON_LIBTORCH_CACHE_ROOT": cache_root,
        "VLLM_NEURON_DISABLE_PARALLEL_TRACE": "1",
        f"VLLM_NEURON_SKIP_{skipped}_WARMUP": "1",
        # The graphs of encoders are no units.
        "VLLM_NEURON_SKIP_ENCODER_WARMUP": "1",
        "VLLM_NEURON_BARRIER_TIMEOUT": str(_WAIT_SECONDS),
        f"{own}_COMPILATION_TIMEOUT": str(_WAIT_SECONDS),
        # One unit is one worker's work: the farm has reserved memory for one compile.
        f"{own}_PARALLEL_COMPILE_WORKERS": "1",
        # In the process that was started, so that its end and output are the engine's.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def compile_cache(cache_root: str) -> str:
    """Where the engine keeps finished graphs below `VLLM_CACHE_ROOT`."""
    return f"{cache_root}/neuron/compile_cache"
