"""Which ranks size one another's steps and which share programs, by configuration alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from neffbuild.config.errors import ConfigError
from neffbuild.config.serve import ServeConfig
from neffbuild.config.values import shown
from neffbuild.grid.shapes import ALL_RANKS, Shape

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
    Raises `ConfigError` for a component spread over something other than a number of ranks.
    """
    if serve.data_parallel_size == 1:
        return False
    return serve.enable_expert_parallel or any(
        _component_ranks(serve, name) > 1 for name in COMPONENT_DP_SIZES
    )


def _component_ranks(serve: ServeConfig, name: str) -> int:
    ranks = (serve.neuron_config.model_extra or {}).get(name)
    if ranks is None:
        return 1
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        path = f"serve.additional_config.neuron_config.{name}"
        raise ConfigError(
            f"{path} is {shown(ranks)}; allowed: an integer of at least 1", field=path, value=ranks
        )
    return ranks


def rank_scopes(serve: ServeConfig, *, replica_groups: bool) -> tuple[str, ...]:
    """The rank scopes that need programs of their own: `all`, or one for each data-parallel replica.

    Tensor-parallel ranks share: a rank's number is an input of its programs. A collective names the
    global ranks it joins. Where programs have `replica_groups` for that and hold a collective across
    replicas, each replica's are its own.
    """
    if not replica_groups or not steps_are_synced(serve):
        return (ALL_RANKS,)
    return tuple(f"dp{replica}" for replica in range(serve.data_parallel_size))


def shapes_on_every_rank(units: Mapping[str, Shape], stored: Collection[str]) -> set[Shape]:
    """Of `units` (key → shape), the shapes whose units are `stored`, in every rank scope that has one."""
    lacking = {shape for key, shape in units.items() if key not in stored}
    return set(units.values()) - lacking
