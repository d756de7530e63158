"""What the reference decoder needs to know of a Hugging Face `config.json`, checked once.

No torch here: planning asks whether a model can be built without importing it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from neffbuild.config.errors import ConfigError
from neffbuild.config.model import SLIDING_ATTENTION, ModelConfig

SUPPORTED_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MinistralForCausalLM",
    "Qwen2ForCausalLM",
)
"""All of one arithmetic: the second and third of a Llama whose layers may have sliding windows, the last
with biases on queries, keys and values besides."""
_WINDOW_BY_DEFAULT = ("MistralForCausalLM", "MinistralForCausalLM")
_BIASED = "Qwen2ForCausalLM"
_LAYER_TYPES = frozenset({"full_attention", SLIDING_ATTENTION})
SUPPORTED_DTYPES = ("float32", "bfloat16")
"""`serve.dtype`: what weights, activations and KV cache are kept in."""
_ROPE_TYPES = ("default", "llama3")


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama-3 scaling of the rotary frequencies: wavelengths longer than
    `original_max_position_embeddings / low_freq_factor` are divided by `factor`, shorter than
    `… / high_freq_factor` kept, interpolated between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class LlamaArchitecture:
    """A Llama decoder, or one of the same arithmetic. Names are those of Hugging Face `LlamaConfig`,
    defaults resolved.

    `rope_scaling` is None for plain rotary embeddings. `attention_bias` is of queries, keys and values,
    `attention_output_bias` of what is made of them. `layer_windows` are the windows of the layers'
    attention in positions, None for a layer without.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Scaling | None
    tie_word_embeddings: bool
    attention_bias: bool
    attention_output_bias: bool
    mlp_bias: bool
    layer_windows: tuple[int | None, ...]

    @property
    def kv_windows(self) -> tuple[int | None, ...]:
        """The windows of the KV groups, those layers that read the cache through one block table: None
        for the layers without a window, which come first."""
        return tuple(sorted(set(self.layer_windows), key=lambda window: window or 0))

    @property
    def has_windows(self) -> bool:
        return self.kv_windows != (None,)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Parse a normalised `config.json`.

        Raises `ConfigError` naming the field for another architecture, a missing or malformed
        number, and every variation the decoder does not compute.
        """
        stated = config.get("architectures")
        architecture = first_architecture(stated)
        if architecture not in SUPPORTED_ARCHITECTURES:
            raise ConfigError(
                f"no reference model for architecture {stated!r}; supported: "
                + ", ".join(SUPPORTED_ARCHITECTURES),
                field="model.architectures",
                value=stated,
                hint="point serve.model at a supported model, or use an engine's own graphs",
            )
        _refuse_variations(config)
        hidden_size = _positive_int(config, "hidden_size")
        heads = _positive_int(config, "num_attention_heads")
        kv_heads = _positive_int(config, "num_key_value_heads", heads)
        if config.get("head_dim") is None and hidden_size % heads:
            raise _malformed(
                "hidden_size", hidden_size, f"a multiple of num_attention_heads {heads}"
            )
        if heads % kv_heads:
            raise _malformed(
                "num_key_value_heads", kv_heads, f"a divisor of num_attention_heads {heads}"
            )
        head_dim = _positive_int(config, "head_dim", hidden_size // heads)
        if head_dim % 2:
            raise _malformed("head_dim", head_dim, "an even number")
        rope = _rope_parameters(config)
        is_biased = architecture == _BIASED or _bool(config, "attention_bias")
        return cls(
            vocab_size=_positive_int(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_positive_int(config, "intermediate_size"),
            num_hidden_layers=_positive_int(config, "num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=_positive_float(config, "rms_norm_eps", 1e-6),
            rope_theta=_positive_float(rope, "rope_theta", 10000.0),
            rope_scaling=_llama3_scaling(config, rope),
            tie_word_embeddings=_bool(config, "tie_word_embeddings"),
            attention_bias=is_biased,
            attention_output_bias=is_biased and architecture != _BIASED,
            mlp_bias=_bool(config, "mlp_bias"),
            layer_windows=_layer_windows(config, architecture),
        )


def first_architecture(stated: object) -> object:
    """The architecture that `architectures` of a config.json states, or None."""
    return stated[0] if isinstance(stated, list | tuple) and stated else None


def _refuse_variations(config: Mapping[str, Any]) -> None:
    """Fields under which `LlamaForCausalLM` computes something else than the reference decoder."""
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise _malformed("hidden_act", config["hidden_act"], "silu")
    if config.get("quantization_config"):
        raise ConfigError(
            "the reference model computes unquantised weights only",
            field="model.quantization_config",
            value=config["quantization_config"],
            hint="use the unquantised checkpoint",
        )


def _layer_windows(config: Mapping[str, Any], architecture: object) -> tuple[int | None, ...]:
    kinds = config.get("layer_types")
    for kind in kinds if isinstance(kinds, list) else []:
        if not isinstance(kind, str) or kind not in _LAYER_TYPES:
            raise _malformed("layer_types", kind, "layers of " + " or ".join(sorted(_LAYER_TYPES)))
    if architecture in _WINDOW_BY_DEFAULT and "sliding_window" not in config:
        # Left out, it is one number to transformers and another to who left it out.
        raise _malformed("sliding_window", None, "it stated: a positive integer, or null for none")
    if architecture == _BIASED and config.get("use_sliding_window"):
        if "sliding_window" not in config:
            raise _malformed("sliding_window", None, "it stated where it is in use")
        if kinds is None and config.get("max_window_layers") is None:
            raise _malformed("max_window_layers", None, "it stated: the layers without a window")
    try:
        return ModelConfig("being served", config).layer_windows
    except ConfigError as error:
        error.field = f"model.{error.field}"
        raise


def _rope_parameters(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """`rope_parameters` as transformers 5 writes it, else `rope_scaling` and `rope_theta` beside it."""
    field = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    stated = config.get(field) or {}
    if not isinstance(stated, Mapping):
        raise _malformed(field, stated, "an object")
    rope_type = stated.get("rope_type", stated.get("type", "default"))
    if rope_type not in _ROPE_TYPES:
        raise _malformed(f"{field}.rope_type", rope_type, "one of " + ", ".join(_ROPE_TYPES))
    partial = stated.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise _malformed("partial_rotary_factor", partial, "1.0")
    theta = stated.get("rope_theta", config.get("rope_theta"))
    return {**stated, "rope_type": rope_type, "rope_theta": theta}


def _llama3_scaling(config: Mapping[str, Any], rope: Mapping[str, Any]) -> Llama3Scaling | None:
    if rope["rope_type"] == "default":
        return None
    original = rope.get("original_max_position_embeddings", config.get("max_position_embeddings"))
    scaling = Llama3Scaling(
        factor=_positive_float(rope, "factor"),
        low_freq_factor=_positive_float(rope, "low_freq_factor"),
        high_freq_factor=_positive_float(rope, "high_freq_factor"),
        original_max_position_embeddings=_positive_int(
            {"original_max_position_embeddings": original}, "original_max_position_embeddings"
        ),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise _malformed(
            "high_freq_factor",
            scaling.high_freq_factor,
            f"greater than low_freq_factor {scaling.low_freq_factor}",
        )
    return scaling


def _positive_int(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if type(value) is not int or value <= 0:
        raise _malformed(name, value, "a positive integer")
    return value


def _positive_float(config: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise _malformed(name, value, "a positive number")
    return float(value)


def _bool(config: Mapping[str, Any], name: str) -> bool:
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise _malformed(name, value, "true or false")
    return bool(value)


def _malformed(name: str, value: object, expected: str) -> ConfigError:
    found = "is missing" if value is None else f"is {value!r}"
    return ConfigError(
        f"{name} of the model's config.json {found}; the reference model needs {expected}",
        field=f"model.{name}",
        value=value,
        hint="correct config.json, or serve a model the reference decoder computes",
    )
