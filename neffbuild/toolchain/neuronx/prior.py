"""What a neuronx-cc compile of a shape is expected to take, before any was measured.

Published by others, measured here by nobody. A farm's process trees under neuronx-cc 2.27, resident at
their peak, by the size of the HLO: below 1 MB 10.6 GB, to 2 MB 14.4, to 3 MB 22.9, to 5 MB 17.0, 6.3 MB
30.0; a prefill graph of 0.57 MB took 23.6 GB, and outliers 107 to 175 GB. Times reported are 46 seconds to
30 minutes a graph. Before a graph is captured its size is not known, so what stands for it is how many
layers the family's model has and which phase it is of.

Of scratch space nothing is published; 4 GiB are assumed.
"""

from __future__ import annotations

from neffbuild.config.build import BuildConfig
from neffbuild.grid.shapes import DecodeShape, Family, PrefillShape, Shape
from neffbuild.toolchain.base import Expectation

_GB = 10**9
_SMALL = int(10.6 * _GB)
_MEDIUM = int(14.4 * _GB)
_LARGE = int(22.9 * _GB)
_PREFILL = int(23.6 * _GB)
_LONG_PREFILL = 30 * _GB
_FEW_LAYERS, _MANY_LAYERS = 8, 40
_LONG = 2048
"""Tokens of a prefill step, from which the outliers were seen."""
_SHORTEST, _LONGEST = 46.0, 1800.0
_SCRATCH = 4 << 30
_COMMON_LAYERS = 32
_LEAST_SCORES = 128
_DRAFTS = frozenset({Family.DRAFT, Family.DRAFT_PREFILL})


def neuronx_prior(config: BuildConfig, shape: Shape) -> Expectation:
    """Seconds and bytes; time grows with the square root of the attention scores a step computes, within
    what was reported."""
    is_draft = shape.family in _DRAFTS and config.draft_model is not None
    layers = 1 if is_draft else _layers(config)
    seconds = (
        _SHORTEST * (_scores(shape) / _LEAST_SCORES) ** 0.5 * max(1.0, layers / _COMMON_LAYERS)
    )
    return Expectation(
        seconds=min(_LONGEST, max(_SHORTEST, seconds)),
        memory_bytes=_memory(shape, layers),
        scratch_bytes=_SCRATCH,
    )


def _memory(shape: Shape, layers: int) -> int:
    if isinstance(shape, PrefillShape):
        return _LONG_PREFILL if shape.num_batched_tokens >= _LONG else _PREFILL
    if layers <= _FEW_LAYERS:
        return _SMALL
    return _MEDIUM if layers <= _MANY_LAYERS else _LARGE


def _scores(shape: Shape) -> int:
    if isinstance(shape, DecodeShape):
        return shape.num_tokens * shape.context_len
    if isinstance(shape, PrefillShape):
        return shape.num_batched_tokens * max(shape.kv_segment, shape.num_batched_tokens)
    return _LEAST_SCORES


def _layers(config: BuildConfig) -> int:
    stated = config.model.text.get("num_hidden_layers")
    return stated if isinstance(stated, int) and stated > 0 else _COMMON_LAYERS
