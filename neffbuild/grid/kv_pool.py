"""How many KV blocks vLLM Neuron makes of a device's memory.

The number is in every program: the caches are inputs of a fixed size. The engine settles it when it
starts, so a plan made elsewhere works it out as the engine does, or has it pinned.

The formula is the published one and has not been checked on a device. What the runtime itself takes of a
core (a few MiB) is not in it, so a device may come out some blocks lower.

Source: "determine_available_memory design" of Neuron SDK 2.33 (budget, cap, minimum, memory of a logical
core); vLLM's `get_num_blocks` (blocks in a budget); AWS Neuron's "Trainium2 Architecture Guide for NKI" and
"Trainium3 Architecture Guide for NKI" (four HBM stacks of together 96 and 144 GiB for eight cores).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from neffbuild.config.build import BuildConfig
from neffbuild.config.model import ModelConfig
from neffbuild.config.serve import ServeConfig
from neffbuild.grid.kv_blocks import kv_element_bytes
from neffbuild.grid.ranks import COMPONENT_DP_SIZES
from neffbuild.grid.weights import weight_bytes_per_rank

GIB = 1 << 30
HBM_STACK_BYTES: Mapping[str, int] = {"trn2": 24 * GIB, "trn3": 36 * GIB}
"""Target → bytes of one HBM stack, which two physical cores share."""
CORES_PER_STACK = 2

CAP_VARIABLE = "VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION"
MINIMUM_VARIABLE = "VLLM_NEURON_MIN_KV_BUDGET_GIB"
DEFAULT_CAP = 0.30
DEFAULT_MINIMUM_GIB = 1.0

PIN = "pin serve.num_gpu_blocks_override"
# In the names of options and variables that have memory kept free by rules that are not published.
_KEPT_FREE = ("headroom", "graph_reserve")
# What weights take is an estimate here. It decides nothing where the cap would bind with this much more.
_WEIGHT_MARGIN = 1.1


@dataclass(frozen=True, slots=True)
class KVPool:
    """`blocks` of the pool, the null block included, or None and `unresolved`: why it cannot be told
    here, and what to pin."""

    blocks: int | None
    unresolved: str | None = None


class _Unknown(Exception):
    """Why the size cannot be told."""


def logical_core_bytes(target: str, physical_cores: int) -> int | None:
    """Memory of a logical core of some physical ones; None for a target whose is not published."""
    stack = HBM_STACK_BYTES.get(target)
    return None if stack is None else stack * physical_cores // CORES_PER_STACK


def kv_budget(
    hbm_bytes: int, utilization: float, weight_bytes: int, cap_fraction: float = DEFAULT_CAP
) -> int:
    """Bytes of a rank's memory that its KV pool may take: what `gpu_memory_utilization` leaves beside
    the weights (parameters and buffers), up to a fraction of what it allows."""
    total = int(hbm_bytes * utilization)
    return max(min(total - weight_bytes, int(total * cap_fraction)), 0)


def neuron_kv_pool(
    config: BuildConfig, *, target: str, physical_cores: int, environment: Mapping[str, str]
) -> KVPool:
    """The pool of a rank that is a logical core of `physical_cores` on `target`, in an engine that runs
    under `environment`; `num_gpu_blocks_override` where that is set.

    Raises `ConfigError` for a `kv_cache_dtype` of unknown size.
    """
    if config.serve.num_gpu_blocks_override is not None:
        return KVPool(config.serve.num_gpu_blocks_override)
    try:
        return KVPool(_blocks(config, target, physical_cores, environment))
    except _Unknown as error:
        return KVPool(
            None, f"how many KV blocks there are cannot be worked out here ({error}): {PIN}"
        )


def _blocks(
    config: BuildConfig, target: str, physical_cores: int, environment: Mapping[str, str]
) -> int:
    serve = config.serve
    hbm = logical_core_bytes(target, physical_cores)
    if hbm is None:
        raise _Unknown(f"the memory of {target} is not known")
    _refuse_other_policies(serve, environment)
    cap, minimum = _variable(environment, CAP_VARIABLE), _variable(environment, MINIMUM_VARIABLE)
    cap = DEFAULT_CAP if cap is None else cap
    minimum = DEFAULT_MINIMUM_GIB if minimum is None else minimum
    weights = weight_bytes_per_rank(serve, config.model, config.draft_model)
    if weights is None:
        raise _Unknown(f"what the weights of a {config.model.model_type} model take is not known")
    utilization = serve.gpu_memory_utilization
    available = kv_budget(hbm, utilization, int(weights * _WEIGHT_MARGIN), cap)
    if available != kv_budget(hbm, utilization, 0, cap):
        raise _Unknown(
            f"weights take about {weights / GIB:.1f} of a core's {hbm / GIB:.0f} GiB, so that it depends on "
            "them to the byte"
        )
    if available < minimum * GIB:
        raise _Unknown(
            f"{available / GIB:.2f} GiB are left for it, below the engine's minimum of {minimum:g}"
        )
    page = _page_bytes(serve, config.model, serve.tensor_parallel_size)
    blocks = available // page // _layers(config, page)
    needed = -(-serve.max_model_len // (serve.block_size * serve.decode_context_parallel_size))
    if blocks <= needed:
        raise _Unknown(
            f"{available / GIB:.2f} GiB hold {blocks} blocks, and one sequence of max_model_len takes "
            f"{needed} beside the null block"
        )
    return blocks


def _refuse_other_policies(serve: ServeConfig, environment: Mapping[str, str]) -> None:
    """What makes the engine size the pool, or lay it out, in another way."""
    neuron = serve.neuron_config.model_extra or {}
    others = {**(serve.model_extra or {}), **neuron}
    for name in (*others, *environment):
        if any(word in name.lower() for word in _KEPT_FREE):
            raise _Unknown(f"{name} is set")
    if others.get("kv_cache_memory_bytes") is not None:
        raise _Unknown("kv_cache_memory_bytes is set")
    if serve.pipeline_parallel_size > 1:
        raise _Unknown("stages of pipeline parallelism may differ")
    for name in COMPONENT_DP_SIZES:
        if neuron.get(name) not in (None, 1):
            raise _Unknown(f"neuron_config.{name} is set")


def _layers(config: BuildConfig, page: int) -> int:
    """Layers that draw on the pool: all of target and draft, where one page is like another."""
    serve, layers = config.serve, 0
    speculation = serve.speculative_config
    draft_ranks = speculation.draft_tensor_parallel_size if speculation else None
    for model, ranks in (
        (config.model, serve.tensor_parallel_size),
        (config.draft_model, draft_ranks or serve.tensor_parallel_size),
    ):
        if model is None:
            continue
        if model.sliding_window is not None:
            raise _Unknown(f"{model.name} has layers with a sliding window")
        if serve.kv_cache_dtype == "auto" and "quantization_config" in model.architecture:
            raise _Unknown(f"{model.name} is quantised, which may say how its KV cache is kept")
        if _page_bytes(serve, model, ranks) != page:
            raise _Unknown(
                f"blocks of {model.name} are not of the size of those of {config.model.name}"
            )
        layers += model.num_hidden_layers
    return layers


def _page_bytes(serve: ServeConfig, model: ModelConfig, ranks: int) -> int:
    """Bytes of one block in one layer on one rank."""
    if model.uses_mla:
        return serve.block_size * model.latent_size * kv_element_bytes(serve)
    heads = max(model.num_key_value_heads // ranks, 1)
    return 2 * serve.block_size * heads * model.head_dim * kv_element_bytes(serve)


def _variable(environment: Mapping[str, str], name: str) -> float | None:
    text = environment.get(name)
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        raise _Unknown(f"{name} is {text!r}") from None
    if not 0 <= value < float("inf"):
        raise _Unknown(f"{name} is {text!r}")
    return value
