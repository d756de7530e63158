"""The options of the engine, as many as these tests set. It refuses any other, as a dataclass does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class EngineArgs:
    model: str
    max_model_len: int
    max_num_seqs: int
    block_size: int
    dtype: str = "auto"
    max_num_batched_tokens: int | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    cp_kv_cache_interleave_size: int = 1
    enable_expert_parallel: bool = False
    kv_cache_dtype: str = "auto"
    num_gpu_blocks_override: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool | None = None
    speculative_config: dict[str, Any] | None = None
    kv_transfer_config: dict[str, Any] | None = None
    skip_tokenizer_init: bool = False
    additional_config: dict[str, Any] = field(default_factory=dict)
    compilation_config: dict[str, Any] = field(default_factory=dict)
