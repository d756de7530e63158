"""What the serving engine decides for itself where its options leave it open: element type, lengths
and sizes, resolved as vLLM resolves them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from neffbuild.config.findings import Findings
from neffbuild.config.model import ModelConfig
from neffbuild.config.serve import VLLM_VERSION

_DTYPES = {
    "float16": "float16",
    "half": "float16",
    "bfloat16": "bfloat16",
    "float32": "float32",
    "float": "float32",
}
# Models whose activations overflow float16; vLLM refuses it for them.
_NOT_IN_FLOAT16 = frozenset({"gemma2", "gemma3", "gemma3_text", "glm4"})


@dataclass(frozen=True, slots=True)
class EngineDefaults:
    """What the engine's API server picks when an option is not set.

    `max_num_seqs` and `max_num_batched_tokens` are multiplied by the ranks of one replica where
    `per_rank` says so. With `prefill_programs` the engine compiles for prefill steps too.
    """

    engine: str
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    per_rank: bool = False
    prefill_programs: bool = False


ENGINE_DEFAULTS = {
    "inductor": EngineDefaults(f"vLLM {VLLM_VERSION} on CPU", 128, 128, 2048, per_rank=True),
    "neuronx": EngineDefaults("vLLM Neuron", 32, 256, 2048, prefill_programs=True),
}
"""By toolchain, since each serves on one platform."""
OTHER_DEFAULTS = EngineDefaults(f"vLLM {VLLM_VERSION}", 16, 256, 2048)


def resolve_dtype(given: str, model: ModelConfig, findings: Findings) -> str:
    """The element type the engine computes in, `auto` resolved as vLLM does: what the checkpoint
    states, except that float32 (and what is not computed in) becomes bfloat16."""
    path = "serve.dtype"
    float16_overflows = model.model_type in _NOT_IN_FLOAT16
    if given == "auto":
        stated = model.stated_dtype
        usable = {"bfloat16"} if float16_overflows else {"bfloat16", "float16"}
        if stated in usable:
            return str(stated)
        findings.note(
            f"{path} is auto and the model's config.json states no dtype: bfloat16 assumed (vLLM looks "
            "at the weights)"
            if stated is None
            else f"{path} is auto: a {stated} model is served in bfloat16, as vLLM does"
        )
        return "bfloat16"
    if given not in _DTYPES:
        findings.refuse(path, given, ", ".join(["auto", *_DTYPES]))
        return given
    dtype = _DTYPES[given]
    if dtype == "float16" and float16_overflows:
        findings.refuse(
            path, given, "auto, bfloat16, float32", f"{model.model_type} overflows in float16"
        )
    return dtype


def resolve_max_model_len(given: int | None, model: ModelConfig, findings: Findings) -> int:
    path = "serve.max_model_len"
    longest = model.max_position_embeddings
    if given is None:
        default = model.default_max_model_len
        if default is None:
            findings.refuse(
                path, None, "an integer of at least 1", "the model's config.json states no length"
            )
            return 0
        findings.note(f"{path} is not set: {default}, from the model's config.json")
        return default
    if longest is not None and given > longest:
        if os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN") == "1":
            findings.note(
                f"{path} {given} is beyond the model's {longest} positions, as allowed by "
                "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1"
            )
        else:
            findings.refuse(
                path,
                given,
                f"1 to {longest}, the positions the model's config.json states",
                "vLLM refuses it too, unless VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 is set",
            )
    return given


def fill_defaults(
    fields: dict[str, Any],
    neuron: Mapping[str, Any],
    others: Mapping[str, Any],
    toolchain: str,
    findings: Findings,
) -> None:
    """Write in what the engine's API server picks for the sizes that are not set."""
    defaults = ENGINE_DEFAULTS.get(toolchain, OTHER_DEFAULTS)
    ranks = fields.get("tensor_parallel_size", 1) * fields.get("pipeline_parallel_size", 1)
    scale = (ranks if defaults.per_rank else 1) * (
        2 if others.get("performance_mode") == "throughput" else 1
    )
    seqs = fields.get("max_num_seqs", defaults.max_num_seqs * scale)
    tokens = fields.get("max_num_batched_tokens")
    if tokens is None:
        tokens = defaults.max_num_batched_tokens * scale
        if others.get("enable_chunked_prefill") is False:
            tokens = max(tokens, fields["max_model_len"])
        tokens = min(tokens, seqs * fields["max_model_len"])
    assumed = {
        "max_num_seqs": min(seqs, tokens),
        "block_size": defaults.block_size,
        "max_num_batched_tokens": tokens,
    }
    missing = {name: value for name, value in assumed.items() if name not in fields}
    fields.update(missing)
    sizes_prefill = {"num_batched_tokens_buckets", "kv_segment_size_buckets"} & neuron.keys()
    if not sizes_prefill and not defaults.prefill_programs:
        missing.pop("max_num_batched_tokens", None)  # decode programs do not see it
    if missing:
        findings.note(
            f"not set, so the defaults of {defaults.engine} are assumed: "
            + ", ".join(f"serve.{name} {value}" for name, value in missing.items())
        )
