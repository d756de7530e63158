"""What the reference EAGLE3 draft needs to know of a published draft's `config.json`, checked once.

No torch here: planning asks whether a draft can be built without importing it.

Source of the fields: vLLM's `llama_eagle3.py` and its reader of `speculators` configs; the drafts
published by SafeAILab (EAGLE), SpecForge and the speculators project.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

from neffbuild.config.errors import ConfigError
from neffbuild.models.architecture import (
    SUPPORTED_ARCHITECTURES,
    LlamaArchitecture,
    first_architecture,
)

EAGLE3_ARCHITECTURES = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3Speculator",
    "Eagle3DraftModel",
    "LlamaForCausalLM",
)
"""How published EAGLE3 drafts name themselves; the last is SafeAILab's."""

_VARIATIONS = ("norm_before_fc", "fc_norm", "norm_output", "parallel_drafting")
"""Switches under which a draft computes something else than the reference draft."""


@dataclass(frozen=True, slots=True)
class Eagle3Architecture:
    """An EAGLE3 draft of a Llama.

    `layer` describes its one decoder layer; `layer.vocab_size` is the target's vocabulary. The draft's
    own head ranks the `draft_vocab_size` tokens it can propose; where those are fewer, a vocabulary map
    leads from them to the target's. `auxiliary_size` is the width of the target's auxiliary hidden
    states side by side. `norm_before_residual`: the residual starts from the normed hidden state.
    """

    layer: LlamaArchitecture
    draft_vocab_size: int
    auxiliary_size: int
    norm_before_residual: bool

    @property
    def maps_vocabulary(self) -> bool:
        return self.draft_vocab_size < self.layer.vocab_size

    @classmethod
    def from_configs(
        cls,
        config: Mapping[str, Any],
        target: LlamaArchitecture,
        auxiliary_layers: Sequence[int],
    ) -> Self:
        """Parse a draft's normalised `config.json`, flat or nested as `speculators` writes it, for a
        target whose states entering `auxiliary_layers` it reads.

        Raises `ConfigError` naming the field for another architecture, a malformed number, a draft that
        does not fit the target, and every variation the reference draft does not compute.
        """
        _check_architecture(config)
        _check_auxiliary_layers(auxiliary_layers, target)
        is_nested = isinstance(config.get("transformer_layer_config"), Mapping)
        layer = _layer(config["transformer_layer_config"] if is_nested else config)
        draft_vocab_size = _size(config, "draft_vocab_size", layer.vocab_size)
        if draft_vocab_size > layer.vocab_size:
            raise _unfit("draft_vocab_size", draft_vocab_size, f"up to {layer.vocab_size}")
        if layer.vocab_size != target.vocab_size:
            raise _unfit("vocab_size", layer.vocab_size, f"the target's {target.vocab_size}")
        # The embedding may be the target's own, and its states are fused to the draft's width.
        target_size = _size(config, "target_hidden_size", layer.hidden_size)
        if target_size != target.hidden_size:
            name = "target_hidden_size" if config.get("target_hidden_size") else "hidden_size"
            raise _unfit(name, target_size, f"the target's {target.hidden_size}")
        return cls(
            layer=layer,
            draft_vocab_size=draft_vocab_size,
            auxiliary_size=len(auxiliary_layers) * target.hidden_size,
            # A config in the style of `speculators` that leaves it out means true.
            norm_before_residual=bool(config.get("norm_before_residual", is_nested)),
        )


def _check_architecture(config: Mapping[str, Any]) -> None:
    stated = config.get("architectures")
    if first_architecture(stated) not in EAGLE3_ARCHITECTURES:
        raise ConfigError(
            f"no reference draft for architecture {stated!r}; supported: "
            + ", ".join(EAGLE3_ARCHITECTURES),
            field="draft_model.architectures",
            value=stated,
            hint="point speculative_config.model at an EAGLE3 draft of a Llama",
        )
    eagle = config.get("eagle_config")
    for source in (config, eagle if isinstance(eagle, Mapping) else {}):
        for name in _VARIATIONS:
            if source.get(name):
                raise _unfit(name, source[name], "false, or not stated")
        if source.get("use_aux_hidden_state") is False:
            raise _unfit("use_aux_hidden_state", False, "true, or not stated")


def _check_auxiliary_layers(layers: Sequence[int], target: LlamaArchitecture) -> None:
    most = target.num_hidden_layers
    if not layers or layers[0] < 0 or layers[-1] > most or any(a >= b for a, b in pairwise(layers)):
        raise ConfigError(
            f"the draft reads the target's hidden states entering layers {list(layers)}; allowed: "
            f"strictly ascending layers from 0 to {most}",
            field="draft_model.eagle_aux_hidden_state_layer_ids",
            value=list(layers),
            hint="state eagle_aux_hidden_state_layer_ids in the draft's config.json",
        )


def _layer(config: Mapping[str, Any]) -> LlamaArchitecture:
    try:
        layer = LlamaArchitecture.from_config(
            {**config, "architectures": SUPPORTED_ARCHITECTURES[:1]}
        )
    except ConfigError as error:
        raise ConfigError(
            f"the draft cannot be built: {error.message}",
            field=f"draft_{error.field}",
            value=error.value,
            hint="correct the draft's config.json, or use a draft the reference model computes",
        ) from error
    if layer.num_hidden_layers != 1:
        raise _unfit("num_hidden_layers", layer.num_hidden_layers, "1")
    if layer.tie_word_embeddings:
        raise _unfit("tie_word_embeddings", True, "false: a draft has a head of its own")
    return layer


def _size(config: Mapping[str, Any], name: str, default: int) -> int:
    value = config.get(name)
    if value is None:
        return default
    if type(value) is not int or value <= 0:
        raise _unfit(name, value, "a positive integer")
    return value


def _unfit(name: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(
        f"{name} of the draft's config.json is {value!r}; the reference draft takes {allowed}",
        field=f"draft_model.{name}",
        value=value,
        hint="correct the draft's config.json, or use a draft that fits the target",
    )
