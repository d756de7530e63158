"""Engine vllm as a config has it: what cannot be built for it, and what vLLM is started with.

Imports neither vLLM nor torch: plans are made by this.
"""

from __future__ import annotations

from typing import Any

from neffbuild.cache.serve_options import graph_options
from neffbuild.config.build import BuildConfig
from neffbuild.toolchain.inductor.engines import host_kernels, vllm_target

BACKEND = "neffbuild"
MODE = 2
"""`CompilationMode.DYNAMO_TRACE_ONCE`: the one in which vLLM hands a whole graph to a backend by name."""

# The model is in a folder of the warm-up's own, with overrides applied; the rest needs files, a network
# or a tokenizer, or sizes what is never allocated.
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
        "gpu_memory_utilization",
        "kv_transfer_config",
        "speculative_config",
    }
)
_PARALLEL_SIZES = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "decode_context_parallel_size",
)


def engine_refusal(config: BuildConfig) -> str | None:
    """Why no program of the config can be built for engine vllm, on any host."""
    serve = config.serve
    others = serve.model_extra or {}
    for name in _PARALLEL_SIZES:
        if (size := getattr(serve, name)) > 1:
            return (
                f"programs for engine vllm are built for one rank: {name} is {size}, and vLLM gives "
                "every rank a graph of its own; set it to 1, or let the engine compile at its first start"
            )
    if serve.speculative_config is not None:
        return (
            "programs for engine vllm are built for the target model alone: unset speculative_config, "
            "or let the engine compile at its first start"
        )
    for name in ("enforce_eager", "enable_lora"):
        if others.get(name):
            return f"vLLM compiles nothing with {name}: unset it"
    stated = serve.compilation_config
    for name, needed in (("mode", MODE), ("backend", BACKEND)):
        if stated.get(name, needed) != needed:
            return (
                f"compilation_config.{name} is {stated[name]!r}, with which vLLM would not ask "
                f"neffbuild: set it to {needed!r}"
            )
    if config.toolchain.flags:
        return "vLLM hands its backend no options: unset toolchain.flags"
    return None


def kernels_refusal(config: BuildConfig) -> str | None:
    """Why vLLM on this host would capture another graph than the plan is for."""
    planned = vllm_target(config.toolchain.target)
    kernels = planned.partition("+")[2]
    if kernels == host_kernels():
        return None
    return f"the plan is for vLLM's {kernels} kernels, on this host it picks {host_kernels()}"


def warm_up_options(config: BuildConfig) -> dict[str, Any]:
    """vLLM's options for a start that ends when the graph is captured: those of the config that a graph
    can see, without weights and tokenizer."""
    options = {
        name: value
        for name, value in graph_options(config.serve).items()
        if value is not None and name not in _NOT_FOR_WARM_UP
    }
    # Bucket lists of another platform's plugin.
    additional = {
        name: value
        for name, value in options.pop("additional_config", {}).items()
        if name != "neuron_config"
    }
    return {
        **options,
        **({"additional_config": additional} if additional else {}),
        "compilation_config": {
            **options.get("compilation_config", {}),
            "mode": MODE,
            "backend": BACKEND,
        },
        "load_format": "dummy",
        "skip_tokenizer_init": True,
    }
