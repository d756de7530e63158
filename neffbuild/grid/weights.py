"""How many bytes of weights a rank holds, from the architecture alone."""

from __future__ import annotations

from neffbuild.config.model import ModelConfig
from neffbuild.config.serve import ServeConfig

_DENSE = frozenset({"llama", "mistral", "qwen2", "qwen3"})
_EXPERTS = {
    "mixtral": ("num_local_experts", "intermediate_size"),
    "qwen3_moe": ("num_experts", "moe_intermediate_size"),
}
"""Of models with experts: the keys of how many there are, and of the width of one."""
_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def weight_bytes_per_rank(
    serve: ServeConfig, model: ModelConfig, draft: ModelConfig | None
) -> int | None:
    """Bytes of the matrices in one rank's share of a model and its draft, in `serve.dtype`; None for an
    architecture, or a dtype, that is not known here.

    Of quantised weights it is what they would take unquantised. Norms, biases and buffers are left out:
    they take less than a hundredth.
    """
    width = _BYTES.get(serve.dtype)
    target = _elements(model, serve.tensor_parallel_size, _expert_ranks(serve))
    if width is None or target is None:
        return None
    speculation = serve.speculative_config
    if speculation is None or draft is None:
        return target * width
    ranks = speculation.draft_tensor_parallel_size or serve.tensor_parallel_size
    drafting = _elements(draft, ranks, ranks)
    if drafting is None:
        return None
    # A draft that reads hidden states of the target has projections for them, of its own or in its layers.
    fusing = 8 * draft.hidden_size * draft.hidden_size // ranks
    return (target + drafting + fusing) * width


def _expert_ranks(serve: ServeConfig) -> int:
    tensor = serve.tensor_parallel_size
    return tensor * serve.data_parallel_size if serve.enable_expert_parallel else tensor


def _elements(model: ModelConfig, ranks: int, expert_ranks: int) -> int | None:
    hidden, heads = model.hidden_size, model.num_attention_heads * model.head_dim
    if model.model_type in _EXPERTS:
        how_many, width = (model.text.get(key) for key in _EXPERTS[model.model_type])
        if not isinstance(how_many, int) or not isinstance(width, int):
            return None
        mlp = how_many * (3 * hidden * width // expert_ranks + hidden)
    elif model.model_type in _DENSE:
        width = model.text.get("intermediate_size")
        if not isinstance(width, int):
            return None
        mlp = 3 * hidden * width // ranks
    else:
        return None
    kv = 2 * max(model.num_key_value_heads // ranks, 1) * model.head_dim * hidden
    layer = 2 * hidden * heads // ranks + kv + mlp
    vocabularies = 1 if model.text.get("tie_word_embeddings") is True else 2
    return model.num_hidden_layers * layer + vocabularies * model.vocab_size * hidden // ranks
