"""What our own decoder and its draft do not compute, whichever toolchain builds them; no torch needed to
say it."""

from __future__ import annotations

from neffbuild.cache.serve_options import auxiliary_layers
from neffbuild.config.build import BuildConfig
from neffbuild.config.errors import ConfigError
from neffbuild.models.architecture import SUPPORTED_DTYPES, LlamaArchitecture
from neffbuild.models.eagle3_architecture import Eagle3Architecture

_WHO = "the reference decoder"
_PARALLEL_SIZES = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "decode_context_parallel_size",
)
_METHOD = "eagle3"
# Under these a draft's programs are other ones.
_DRAFT_VARIATIONS = ("quantization", "parallel_drafting", "kv_cache_dtype")


def decoder_refusal(config: BuildConfig) -> str | None:
    """Why no step of the config's model can be built from the reference decoder."""
    serve = config.serve
    for name in _PARALLEL_SIZES:
        if (size := getattr(serve, name)) > 1:
            return f"{_WHO} is built for one rank only: {name} is {size}, set it to 1"
    if serve.quantization is not None:
        return f"{_WHO} runs unquantised models only: quantization is {serve.quantization!r}"
    if serve.kv_cache_dtype not in ("auto", serve.dtype):
        return (
            f"{_WHO} keeps the KV cache in the model's dtype: kv_cache_dtype is "
            f"{serve.kv_cache_dtype!r}, set it to 'auto'"
        )
    if serve.dtype not in SUPPORTED_DTYPES:
        return f"{_WHO} runs {' and '.join(SUPPORTED_DTYPES)} models: dtype is {serve.dtype!r}"
    try:
        target = LlamaArchitecture.from_config(config.model.architecture)
        return _speculation_refusal(config, target)
    except ConfigError as error:
        return error.message


def _speculation_refusal(config: BuildConfig, target: LlamaArchitecture) -> str | None:
    """Raises `ConfigError` for a draft that the reference model does not compute."""
    speculation = config.serve.speculative_config
    if speculation is None:
        return None
    if speculation.method != _METHOD or config.draft_model is None:
        return (
            f"{_WHO} speculates by {_METHOD} with a draft model only: "
            f"speculative_config.method is {speculation.method!r}"
        )
    for name in _DRAFT_VARIATIONS:
        if value := (speculation.model_extra or {}).get(name):
            return f"{_WHO} has no draft with speculative_config.{name}: it is {value!r}, unset it"
    Eagle3Architecture.from_configs(
        config.draft_model.architecture, target, auxiliary_layers(config) or ()
    )
    return None
