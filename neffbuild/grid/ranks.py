"""Which ranks size one another's steps, by configuration alone."""

from __future__ import annotations

from neffbuild.config.serve import ServeConfig

COMPONENT_DP_SIZES = (
    "attention_dp_size",
    "embedding_dp_size",
    "mlp_dp_size",
    "lm_head_dp_size",
)
"""Options of `neuron_config` that spread one component over the data-parallel ranks."""


def steps_are_synced(serve: ServeConfig) -> bool:
    """Whether the data-parallel ranks must run the same programs in every step.

    So it is where a program holds a collective across them: with expert parallelism, or with a component
    spread over them. Nothing of a step enters, or ranks could disagree on whether to ask one another.
    """
    if serve.data_parallel_size == 1:
        return False
    options = serve.neuron_config.model_extra or {}
    return serve.enable_expert_parallel or any(
        int(options.get(name) or 1) > 1 for name in COMPONENT_DP_SIZES
    )
