"""How many KV blocks there are, and how many KV bytes a step reads and needs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from neffbuild.config.errors import ConfigError
from neffbuild.config.model import ModelConfig
from neffbuild.config.serve import ServeConfig
from neffbuild.grid.bucketer import Bucketer
from neffbuild.grid.shapes import DecodeShape
from neffbuild.grid.windows import KVLayers

_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}


def num_kv_blocks(serve: ServeConfig) -> int:
    """Blocks of the KV pool, the null block included: `num_gpu_blocks_override`, else enough for every
    sequence at full length."""
    if serve.num_gpu_blocks_override is not None:
        return serve.num_gpu_blocks_override
    return serve.max_num_seqs * -(-serve.max_model_len // serve.block_size) + 1


def blocks_for_all(bucketer: Bucketer) -> int:
    """Blocks of a KV pool in which no sequence is ever preempted for want of one, the null block included:
    every sequence may grow to `max_model_len`."""
    most_seqs = max(ladders.num_seqs.rungs[-1] for ladders in bucketer.decode.values())
    full_length = -(-bucketer.max_model_len // (bucketer.block_size * bucketer.dcp_size))
    return most_seqs * full_length + 1


def kv_bytes_per_position(serve: ServeConfig, model: ModelConfig) -> int:
    """Bytes that one position, as `kv_traffic` counts them, takes in the KV caches of all ranks together:
    in all layers; in one where some have a sliding window.

    Raises `ConfigError` for a `kv_cache_dtype` of unknown size, or a model of malformed ones.
    """
    entries = (
        model.latent_size if model.uses_mla else 2 * model.num_key_value_heads * model.head_dim
    )
    layers = model.num_hidden_layers if KVLayers.of(model).window is None else 1
    return layers * entries * kv_element_bytes(serve)


def kv_element_bytes(serve: ServeConfig) -> int:
    """Bytes of one element of a KV cache. Raises `ConfigError` for a dtype of unknown size."""
    dtype = serve.dtype if serve.kv_cache_dtype == "auto" else serve.kv_cache_dtype
    if dtype not in _BYTES:
        raise ConfigError(
            f"the size of a KV cache entry of dtype {dtype!r} is not known; "
            f"known: {', '.join(_BYTES)}",
            field="serve.kv_cache_dtype",
            value=dtype,
        )
    return _BYTES[dtype]


class KVTraffic(NamedTuple):
    """KV positions of one step, or of many added up: what the program reads, what the program at
    `max_model_len` would read, and what the live rows need. Where some layers have a sliding window,
    every layer's positions count."""

    read: int = 0
    full_length: int = 0
    needed: int = 0

    def plus(self, other: KVTraffic) -> KVTraffic:
        return KVTraffic(*(mine + others for mine, others in zip(self, other, strict=True)))

    @property
    def amplification(self) -> float:
        """Bytes read over bytes needed; 0 before the first step."""
        return self.read / self.needed if self.needed else 0.0

    @property
    def amplification_full_length(self) -> float:
        return self.full_length / self.needed if self.needed else 0.0


def kv_traffic(
    bucketer: Bucketer, shape: DecodeShape, num_computed_tokens: Iterable[int]
) -> KVTraffic:
    """The traffic of one decode step of `shape` whose live rows have `num_computed_tokens`.

    A program reads every column of its block tables for every row, padded ones included; a live row
    needs the positions it has and the one it computes, of a sliding window the last of them.
    """
    full_length = replace(shape, context_len=bucketer.max_model_len)
    layers = bucketer.kv_layers(shape)
    return KVTraffic(
        read=_positions_read(bucketer, shape),
        full_length=_positions_read(bucketer, full_length),
        needed=sum(_positions_needed(layers, tokens + 1) for tokens in num_computed_tokens),
    )


def _positions_read(bucketer: Bucketer, shape: DecodeShape) -> int:
    layers = bucketer.kv_layers(shape)
    columns = layers.full * bucketer.block_table_width(shape)
    columns += layers.windowed * (bucketer.window_table_width(shape) or 0)
    return shape.num_seqs * columns * bucketer.dcp_size * bucketer.block_size


def _positions_needed(layers: KVLayers, context: int) -> int:
    within = min(context, layers.window or 0)
    return layers.full * context + layers.windowed * within
