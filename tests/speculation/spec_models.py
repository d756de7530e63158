"""Small targets and drafts: random ones, and a pair whose draft is always right."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from neffbuild.config.build import BuildConfig, ToolchainConfig
from neffbuild.config.model import ModelConfig
from neffbuild.config.serve import AdditionalConfig, NeuronConfig, ServeConfig, SpeculativeConfig
from neffbuild.grid.shapes import Family
from neffbuild.models.decode import build_decoder, build_draft, named_tensors
from neffbuild.models.eagle3 import Eagle3Draft
from neffbuild.models.llama import LlamaDecoder

MAX_MODEL_LEN = 96
BLOCK_SIZE = 8
CONTEXTS = (32, 64)
MAX_NUM_SEQS = 4
VOCABULARY, DRAFT_VOCABULARY = 160, 128

TARGET: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
}
DRAFT = TARGET | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "num_key_value_heads": 4,
    "draft_vocab_size": DRAFT_VOCABULARY,
    "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
    "norm_before_residual": True,
}


def build_config(
    spec_tokens: int = 0,
    *,
    contexts: tuple[int, ...] | None = CONTEXTS,
    num_seqs: tuple[int, ...] = (1, 2, MAX_NUM_SEQS),
    draft_limit: int | None = None,
    verify: tuple[int, ...] | None = None,
) -> BuildConfig:
    """As loading makes one, with contexts too short for a configuration file to have."""
    speculation = SpeculativeConfig(
        method="eagle3",
        model="draft",
        num_speculative_tokens=spec_tokens,
        max_model_len=draft_limit,
    )
    return BuildConfig(
        source="test",
        serve=ServeConfig(
            model="target",
            dtype="float32",
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=num_seqs[-1],
            block_size=BLOCK_SIZE,
            speculative_config=speculation if spec_tokens else None,
            additional_config=AdditionalConfig(
                neuron_config=NeuronConfig(
                    num_seqs_buckets=num_seqs,
                    decode_context_length_buckets=contexts,
                    verify_query_len_buckets=verify,
                )
            ),
        ),
        model=ModelConfig("target", TARGET),
        draft_model=ModelConfig("draft", DRAFT) if spec_tokens else None,
        toolchain=ToolchainConfig(target="x86-64-v3"),
    )


@dataclass(frozen=True)
class Pair:
    """Weights of a target and of its draft; the draft's modules differ by K, its weights do not."""

    target: LlamaDecoder
    draft: Eagle3Draft

    @property
    def tensors(self) -> dict[str, Tensor]:
        return named_tensors(self.target)

    @property
    def draft_tensors(self) -> dict[str, Tensor]:
        return named_tensors(self.draft)


@cache
def random_pair() -> Pair:
    """The draft knows nothing of the target. Small initialisers would make greedy decoding run in a
    loop of two tokens."""
    pair = _uninitialised()
    for model in (pair.target, pair.draft):
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.15)
    return pair


@cache
def cyclic_pair() -> Pair:
    """A target that goes round a cycle of tokens, and a draft that knows it.

    The target's layers do what random ones do, but weakly: the token after t is the one whose row of the
    head is t's embedding. The draft's attention finds its own position (a token's key resembles its own
    query most), through the cache like any other, and replaces the residual by the token's embedding. A
    key or value that went to another slot, or is read from one, makes it propose another token.
    """
    pair = _uninitialised()
    hidden, heads, size = 64, DRAFT["num_attention_heads"], 16
    for name, parameter in [*pair.target.named_parameters(), *pair.draft.named_parameters()]:
        weak = name.endswith(("o_proj.weight", "down_proj.weight"))
        parameter.fill_(1.0) if parameter.dim() == 1 else parameter.normal_(
            0, 0.01 if weak else 0.1
        )
    # Of the same length in every head.
    embeddings = torch.randn(VOCABULARY, heads, size)
    embeddings = embeddings / embeddings.pow(2).mean(-1, keepdim=True).sqrt()
    embeddings = embeddings.reshape(VOCABULARY, hidden)
    following = successor()
    pair.target.model.embed_tokens.weight.copy_(embeddings)
    pair.draft.embed_tokens.weight.copy_(embeddings)
    for token, after in following.items():
        pair.target.lm_head.weight[after] = embeddings[token]
    mapped = torch.arange(DRAFT_VOCABULARY) + pair.draft.d2t
    before = {after: token for token, after in following.items()}
    pair.draft.lm_head.weight.copy_(embeddings[[before[int(token)] for token in mapped]])
    attention, identity = pair.draft.midlayer.self_attn, torch.eye(hidden)
    for projection in (attention.q_proj, attention.k_proj):
        projection.weight.copy_(torch.cat([12 * identity, torch.zeros(hidden, hidden)], dim=1))
    attention.v_proj.weight.copy_(torch.cat([identity, -identity], dim=1))
    attention.o_proj.weight.copy_(identity)
    pair.draft.midlayer.mlp.down_proj.weight.zero_()
    return pair


@cache
def successor() -> dict[int, int]:
    """Token → the next on the cycle of `cyclic_pair`, which goes through all the draft can say."""
    order = [int(token) for token in _mapped_tokens()]
    torch.manual_seed(1)
    order = [order[index] for index in torch.randperm(len(order))]
    return dict(zip(order, order[1:] + order[:1], strict=True))


def _uninitialised() -> Pair:
    config = build_config(1)
    pair = Pair(build_decoder(config, Family.TARGET_WITH_SPEC), build_draft(config))
    pair.draft.d2t.copy_(_mapped_tokens() - torch.arange(DRAFT_VOCABULARY))
    torch.manual_seed(2)
    return pair


def _mapped_tokens() -> Tensor:
    torch.manual_seed(0)
    return torch.randperm(VOCABULARY)[:DRAFT_VOCABULARY].sort().values
