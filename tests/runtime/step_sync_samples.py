"""Configs whose data-parallel ranks run each step in the same programs."""

from __future__ import annotations

from sync_rank import MAX_MODEL_LEN, MAX_NUM_SEQS, SPEC_TOKENS

from neffbuild.config.build import BuildConfig
from neffbuild.config.model import ModelConfig
from neffbuild.config.serve import AdditionalConfig, NeuronConfig, ServeConfig, SpeculativeConfig
from neffbuild.grid.bucketer import Bucketer, QueryLenSupport


def config_of(
    ranks: int,
    *,
    expert_parallel: bool = True,
    verify: list[int] | None = None,
    **neuron: int,
) -> BuildConfig:
    """A config with speculation of that many data-parallel ranks; `neuron` are further options of
    `neuron_config`."""
    return BuildConfig(
        source="test",
        serve=ServeConfig(
            model="target",
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=MAX_NUM_SEQS,
            block_size=32,
            data_parallel_size=ranks,
            enable_expert_parallel=expert_parallel,
            speculative_config=SpeculativeConfig(
                method="eagle3", model="draft", num_speculative_tokens=SPEC_TOKENS
            ),
            additional_config=AdditionalConfig(
                neuron_config=NeuronConfig(
                    num_seqs_buckets=(1, 2, 4, 8),
                    decode_context_length_buckets=(256, 1024, 2048),
                    verify_query_len_buckets=tuple(verify) if verify else None,
                    **neuron,  # type: ignore[arg-type]
                )
            ),
        ),
        model=ModelConfig("target", {}),
        draft_model=ModelConfig("draft", {"max_position_embeddings": MAX_MODEL_LEN - 512}),
    )


def bucketer_of(config: BuildConfig, verify: list[int] | None) -> Bucketer:
    support = QueryLenSupport.UNIFORM if verify else QueryLenSupport.VARLEN
    return Bucketer.from_config(config, query_len_support=support)
