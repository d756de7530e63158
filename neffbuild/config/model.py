"""A model's architecture: its Hugging Face `config.json`, normalised, without weights or paths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from neffbuild.config.errors import ConfigError
from neffbuild.config.values import MAX_INTEGER, shown

DROPPED: Mapping[str, str] = {
    "_name_or_path": "where the file once lay",
    "_commit_hash": "which commit it was downloaded from",
    "_attn_implementation_autoset": "how transformers ran the model when it wrote the file",
    "transformers_version": "which library wrote the file",
    "torch_dtype": "a serve option: `serve.dtype` is an ingredient of its own",
    "dtype": "a serve option: `serve.dtype` is an ingredient of its own",
}
"""Keys of `config.json` (and of the models inside it) that are no part of an architecture, with the
reason. Everything else stays, `quantization_config` and `auto_map` (which names the code that defines
the graph) included: a key too many costs a compile, one too few a stale hit."""

SLIDING_ATTENTION = "sliding_attention"
"""A layer with a sliding window, as `layer_types` names it."""

_SIZE = f"a positive integer up to {MAX_INTEGER}"
_MOST_LAYERS = 100_000

# What `transformers` does for them when `use_sliding_window` is left out.
_WINDOWED_ON_REQUEST = ("qwen2", "qwen3", "smollm3")
# In the order vLLM tries them; the smallest counts.
_LENGTH_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
# Rotary scalings whose `max_position_embeddings` is already the scaled length.
_ALREADY_SCALED = frozenset(
    {"su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling"}
)
_KV_HEAD_KEYS = (
    "n_head_kv",
    "num_kv_heads",
    "num_key_value_heads",
    "multi_query_group_num",
    "num_attention_groups",
)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """`architecture` is the normalised `config.json`: what enters recipes and what graphs are built
    from. `name` is for people (the folder's or the model's name) and enters nothing; so does
    `stated_dtype`, the dtype its file states, which `serve.dtype: auto` was resolved with, and `folder`,
    where the file lay on the machine that read it.

    The accessors raise `ConfigError` when the file states something that is not a positive integer of
    at most 63 bits, and for what every decoder has, when it states nothing.
    """

    name: str
    architecture: Mapping[str, Any]
    stated_dtype: str | None = None
    folder: Path | None = field(default=None, compare=False)

    @property
    def text(self) -> Mapping[str, Any]:
        """The language model's part: a multimodal or speculator config nests it."""
        for key in ("text_config", "transformer_layer_config"):
            nested = self.architecture.get(key)
            if isinstance(nested, Mapping):
                return nested
        return self.architecture

    @property
    def model_type(self) -> str:
        return str(self.architecture.get("model_type", ""))

    @property
    def num_hidden_layers(self) -> int:
        layers = self._required("num_hidden_layers")
        if layers > _MOST_LAYERS:  # lists are made of them
            raise self._malformed("num_hidden_layers", f"an integer from 1 to {_MOST_LAYERS}")
        return layers

    @property
    def hidden_size(self) -> int:
        return self._required("hidden_size")

    @property
    def vocab_size(self) -> int:
        return self._required("vocab_size")

    @property
    def num_attention_heads(self) -> int:
        return self._required("num_attention_heads")

    @property
    def num_key_value_heads(self) -> int:
        """KV heads of the whole model; all attention heads where it states none."""
        for key in _KV_HEAD_KEYS:
            heads = self._positive(key)
            if heads is not None:
                return heads
        return self.num_attention_heads

    @property
    def head_dim(self) -> int:
        return self._positive("head_dim") or self.hidden_size // self.num_attention_heads

    @property
    def uses_mla(self) -> bool:
        """Multi-head latent attention: one compressed KV head, whatever the config calls its heads."""
        return self.text.get("kv_lora_rank") is not None

    @property
    def latent_size(self) -> int:
        """With multi-head latent attention, elements that one position takes in a layer's KV cache: the
        compressed latent and the rotary key, shared by all heads."""
        return self._required("kv_lora_rank") + (self._positive("qk_rope_head_dim") or 0)

    @property
    def sliding_window(self) -> int | None:
        """Window of the sliding-window layers in positions, or None. Models of which some layers may have
        one have none unless `use_sliding_window` says so."""
        used = self.text.get("use_sliding_window")
        if used is None:
            used = not str(self.text.get("model_type")).startswith(_WINDOWED_ON_REQUEST)
        elif not isinstance(used, bool):
            raise self._malformed("use_sliding_window", "true or false")
        return self._positive("sliding_window") if used else None

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """For each layer the window of its attention in positions, None for one without.

        `layer_types` says which layers have one. Without it all have; with Qwen 2's
        `max_window_layers` those from that number on. Raises `ConfigError` for windows without a size
        and for a list that is not one of the layers.
        """
        window, layers = self.sliding_window, self.num_hidden_layers
        types = self.text.get("layer_types")
        if types is None:
            first = self.text.get("max_window_layers") or 0
            if isinstance(first, bool) or not isinstance(first, int) or first < 0:
                raise self._malformed("max_window_layers", "an integer from 0")
            return tuple(window if layer >= first else None for layer in range(layers))
        # Some publish the types of further layers, which predict more than one token, behind them.
        if not isinstance(types, list) or len(types) < layers:
            raise self._malformed("layer_types", f"a list of {layers} names, one for each layer")
        types = types[:layers]
        if window is None and SLIDING_ATTENTION in types:
            raise ConfigError(
                f"config.json of model {self.name}: layer_types names {SLIDING_ATTENTION}, and it states no "
                f"sliding_window in use; allowed: {_SIZE}",
                field="sliding_window",
                hint="state sliding_window (and no use_sliding_window: false)",
            )
        return tuple(window if kind == SLIDING_ATTENTION else None for kind in types)

    @property
    def max_position_embeddings(self) -> int | None:
        """The longest context the model can serve, in positions, or None where it states none: the
        smallest of the lengths it states, times the factor of a rotary scaling that is not in it."""
        stated = [length for key in _LENGTH_KEYS if (length := self._positive(key)) is not None]
        if not stated:
            return None
        # Command-R: this key, when there is one, is the length that was trained.
        length = self._positive("model_max_length") or min(stated)
        if "gemma3" in self.model_type:  # its length is stated scaled, whatever the type of scaling
            return length
        factors = [
            factor
            for rope in _rotary_parameters(self.text)
            if rope.get("rope_type", rope.get("type")) not in _ALREADY_SCALED
            if isinstance(factor := rope.get("factor"), int | float)
            and not isinstance(factor, bool)
        ]
        if not factors:
            return length
        scaled = length * factors[-1]
        if not 1 <= scaled <= MAX_INTEGER:
            raise ConfigError(
                f"config.json of model {self.name}: the factor of its rotary scaling is "
                f"{shown(factors[-1])}, which makes of {length} positions no length; allowed: a positive "
                f"number that makes at most {MAX_INTEGER} of them",
                field="factor",
                value=factors[-1],
            )
        return int(scaled)

    @property
    def default_max_model_len(self) -> int | None:
        """What vLLM serves when `max_model_len` is not set: the longest context, except that a
        LongRoPE model is cut to its original length to keep short contexts at full quality."""
        types = {rope.get("rope_type", rope.get("type")) for rope in _rotary_parameters(self.text)}
        original = self._positive("original_max_position_embeddings")
        if types & {"longrope", "su"} and original is not None:
            return original
        return self.max_position_embeddings

    def _required(self, key: str) -> int:
        value = self._positive(key)
        if value is None:
            raise ConfigError(
                f"config.json of model {self.name} states no {key}; allowed: {_SIZE}",
                field=key,
                hint="is this the config.json of a decoder?",
            )
        return value

    def _positive(self, key: str) -> int | None:
        value = self.text.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MAX_INTEGER:
            raise self._malformed(key, _SIZE)
        return value

    def _malformed(self, key: str, allowed: str) -> ConfigError:
        value = self.text.get(key)
        return ConfigError(
            f"config.json of model {self.name}: {key} is {shown(value)}; allowed: {allowed}",
            field=key,
            value=value,
        )


def model_config(name: str, document: Mapping[str, Any]) -> ModelConfig:
    """The architecture in a parsed `config.json`."""
    return ModelConfig(name, _without_dropped(document), _stated_dtype(document))


def overridden(document: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A parsed `config.json` under vLLM's `hf_overrides`: the models inside it are merged into,
    anything else is replaced."""
    result = dict(document)
    for key, value in overrides.items():
        nested = result.get(key)
        if _is_model(key) and isinstance(nested, dict) and isinstance(value, dict):
            value = overridden(nested, value)
        result[key] = value
    return result


def _without_dropped(document: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_dropped(value) if isinstance(value, dict) and _is_model(key) else value
        for key, value in document.items()
        if key not in DROPPED
    }


def _is_model(key: str) -> bool:
    """Whether a nested object is a model of its own (and not, say, a quantisation scheme, whose
    `dtype` is part of the architecture)."""
    return key.endswith("_config") and key not in ("quantization_config", "compression_config")


def _stated_dtype(document: Mapping[str, Any]) -> str | None:
    for part in (
        document,
        *(document.get(f"{name}_config") for name in ("text", "vision", "encoder")),
    ):
        if isinstance(part, Mapping):
            stated = part.get("dtype") or part.get("torch_dtype")
            if isinstance(stated, str):
                return stated.removeprefix("torch.")
    return None


def _rotary_parameters(text: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Rotary parameters, one mapping, or one per layer type where they differ."""
    parameters = text.get("rope_parameters") or text.get("rope_scaling")
    if not isinstance(parameters, Mapping):
        return
    nested = [value for value in parameters.values() if isinstance(value, Mapping)]
    yield from nested if len(nested) == len(parameters) else [parameters]
