"""Llama, layer by layer the same, under other names."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.models.llama import LlamaForCausalLM


class RenamedLlama(LlamaForCausalLM):
    def __init__(self, *, vllm_config: Any, prefix: str = "", **others: Any) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix or "renamed", **others)
