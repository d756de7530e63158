"""The serve config: what the serving engine is told, in vLLM's own option names."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

VLLM_VERSION = "0.32.0"
"""The vLLM release whose option names and defaults this schema follows; recorded in every recipe."""


class NeuronConfig(BaseModel):
    """`additional_config.neuron_config`: the bucket lists, as vLLM Neuron reads them.

    Each list is strictly ascending and positive. `num_seqs_buckets` ends with `max_num_seqs`;
    `decode_context_length_buckets` are multiples of 128 below `max_model_len`, None when the feature is
    off; `num_batched_tokens_buckets` ends with min(`max_num_batched_tokens`, `max_model_len`);
    `kv_segment_size_buckets` is one size; `verify_query_len_buckets` ends with 1 + K, None without
    speculation.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    num_seqs_buckets: tuple[int, ...] | None = None
    decode_context_length_buckets: tuple[int, ...] | None = None
    num_batched_tokens_buckets: tuple[int, ...] | None = None
    kv_segment_size_buckets: tuple[int, ...] | None = None
    verify_query_len_buckets: tuple[int, ...] | None = None


class AdditionalConfig(BaseModel):
    """`additional_config`: platform plugins' own options."""

    model_config = ConfigDict(frozen=True, extra="allow")

    neuron_config: NeuronConfig = NeuronConfig()


class SpeculativeConfig(BaseModel):
    """`speculative_config`.

    After loading, `max_model_len` is the draft's limit in positions (min of the draft's own maximum
    and the target's `max_model_len` where it was not set), and `draft_tensor_parallel_size` is set.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    method: str
    model: str
    num_speculative_tokens: int
    max_model_len: int | None = None
    draft_tensor_parallel_size: int | None = None


class ServeConfig(BaseModel):
    """Options the grid depends on are typed; every other option is kept as given and enters the key.

    After loading, `dtype` is concrete, `max_model_len`, `max_num_seqs`, `max_num_batched_tokens`,
    `block_size` and `enable_prefix_caching` are set, and `num_seqs_buckets` is the full ladder.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    model: str
    dtype: str = "auto"
    max_model_len: int
    max_num_seqs: int
    block_size: int
    max_num_batched_tokens: int | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    cp_kv_cache_interleave_size: int = 1
    enable_expert_parallel: bool = False
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    num_gpu_blocks_override: int | None = None
    gpu_memory_utilization: float = 0.92
    enable_prefix_caching: bool | None = None
    speculative_config: SpeculativeConfig | None = None
    kv_transfer_config: dict[str, Any] | None = None
    additional_config: AdditionalConfig = AdditionalConfig()
    compilation_config: dict[str, Any] = Field(default_factory=dict)

    @property
    def neuron_config(self) -> NeuronConfig:
        return self.additional_config.neuron_config

    @property
    def num_speculative_tokens(self) -> int:
        """K; 0 when speculation is not configured."""
        return self.speculative_config.num_speculative_tokens if self.speculative_config else 0
