"""Bucketers for the tests of the grid."""

from __future__ import annotations

from collections.abc import Mapping

from neffbuild.config.build import BuildConfig
from neffbuild.config.model import ModelConfig
from neffbuild.config.serve import AdditionalConfig, NeuronConfig, ServeConfig, SpeculativeConfig
from neffbuild.grid.bucketer import Bucketer, QueryLenSupport
from neffbuild.grid.shapes import Family

UNIFORM, VARLEN = QueryLenSupport.UNIFORM, QueryLenSupport.VARLEN


def build_config(
    *,
    num_seqs: tuple[int, ...] | None = (1, 2, 4),
    max_num_seqs: int | None = None,
    contexts: tuple[int, ...] | None = (4096, 8192, 16384),
    max_model_len: int = 131072,
    spec_tokens: int = 0,
    draft_limit: int | None = None,
    draft_max_positions: int | None = None,
    verify: tuple[int, ...] | None = None,
    block_size: int = 128,
    **options: object,
) -> BuildConfig:
    speculation = (
        SpeculativeConfig(
            method="eagle3",
            model="draft",
            num_speculative_tokens=spec_tokens,
            max_model_len=draft_limit,
        )
        if spec_tokens
        else None
    )
    positions = {"max_position_embeddings": draft_max_positions} if draft_max_positions else {}
    return BuildConfig(
        source="test",
        serve=ServeConfig(
            model="target",
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs or (num_seqs or (1,))[-1],
            block_size=block_size,
            speculative_config=speculation,
            additional_config=AdditionalConfig(
                neuron_config=NeuronConfig(
                    num_seqs_buckets=num_seqs,
                    decode_context_length_buckets=contexts,
                    verify_query_len_buckets=verify,
                )
            ),
            **options,
        ),
        model=ModelConfig("target", {}),
        draft_model=ModelConfig("draft", positions) if spec_tokens else None,
    )


def bucketer(
    support: QueryLenSupport = VARLEN,
    floors: Mapping[Family, int] | None = None,
    **config: object,
) -> Bucketer:
    return Bucketer.from_config(
        build_config(**config),  # type: ignore[arg-type]
        query_len_support=support,
        floors=floors,
    )
