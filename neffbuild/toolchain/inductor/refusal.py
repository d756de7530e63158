"""What the inductor toolchain does not build, and why; no torch needed to say it."""

from __future__ import annotations

import platform

from neffbuild.cache.serve_options import auxiliary_layers
from neffbuild.config.build import BuildConfig
from neffbuild.config.errors import ConfigError
from neffbuild.grid.shapes import DecodeShape, Shape, SymbolicShape
from neffbuild.models.architecture import SUPPORTED_DTYPES, LlamaArchitecture
from neffbuild.models.eagle3_architecture import Eagle3Architecture
from neffbuild.toolchain.inductor.engines import VLLM
from neffbuild.toolchain.inductor.identity import (
    inductor_identity,
    planned_versions,
    version_mismatches,
)
from neffbuild.toolchain.inductor.vllm_engine import engine_refusal, kernels_refusal

_PARALLEL_SIZES = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "decode_context_parallel_size",
)
METHOD = "eagle3"
# Under these a draft's programs are other ones.
_DRAFT_VARIATIONS = ("quantization", "parallel_drafting", "kv_cache_dtype")


def config_refusal(config: BuildConfig) -> str | None:
    """Why no unit of the config can be built on any host."""
    if config.toolchain.engine == VLLM:
        return engine_refusal(config)
    serve = config.serve
    for name in _PARALLEL_SIZES:
        if (size := getattr(serve, name)) > 1:
            return f"inductor builds for one rank only: {name} is {size}, set it to 1"
    if serve.quantization is not None:
        return f"inductor builds unquantised models only: quantization is {serve.quantization!r}"
    if serve.kv_cache_dtype not in ("auto", serve.dtype):
        return (
            f"inductor keeps the KV cache in the model's dtype: kv_cache_dtype is "
            f"{serve.kv_cache_dtype!r}, set it to 'auto'"
        )
    if serve.dtype not in SUPPORTED_DTYPES:
        return f"inductor builds {' and '.join(SUPPORTED_DTYPES)} models: dtype is {serve.dtype!r}"
    try:
        target = LlamaArchitecture.from_config(config.model.architecture)
        inductor_identity(config)
        return _speculation_refusal(config, target)
    except ConfigError as error:
        return error.message


def _speculation_refusal(config: BuildConfig, target: LlamaArchitecture) -> str | None:
    """Raises `ConfigError` for a draft that the reference model does not compute."""
    speculation = config.serve.speculative_config
    if speculation is None:
        return None
    if speculation.method != METHOD or config.draft_model is None:
        return (
            f"inductor builds speculation by {METHOD} with a draft model only: "
            f"speculative_config.method is {speculation.method!r}"
        )
    for name in _DRAFT_VARIATIONS:
        if value := (speculation.model_extra or {}).get(name):
            return (
                f"inductor has no draft with speculative_config.{name}: it is {value!r}, unset it"
            )
    Eagle3Architecture.from_configs(
        config.draft_model.architecture, target, auxiliary_layers(config) or ()
    )
    return None


def shape_refusal(shape: Shape) -> str | None:
    """Why one shape of a config that can be built cannot."""
    if isinstance(shape, SymbolicShape):
        return None
    if not isinstance(shape, DecodeShape):
        return f"inductor builds decode programs only, {shape.bucket_name} is a {shape.family} one"
    return None


def host_refusal(config: BuildConfig) -> str | None:
    """Why this host cannot compile what it might plan."""
    if platform.machine() != "x86_64":
        return f"inductor targets are x86-64 and this host is {platform.machine()}"
    if mismatches := version_mismatches(planned_versions(config.toolchain)):
        return f"this host is not what the plan was made for: {'; '.join(mismatches)}"
    if unresolved := inductor_identity(config).unresolved:
        return "; ".join(unresolved)
    return kernels_refusal(config) if config.toolchain.engine == VLLM else None
