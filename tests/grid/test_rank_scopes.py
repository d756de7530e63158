"""Which ranks share programs."""

from __future__ import annotations

from typing import Any

import pytest
from grid_samples import build_config

from neffbuild.config.errors import ConfigError
from neffbuild.config.serve import AdditionalConfig, NeuronConfig, ServeConfig
from neffbuild.grid.ranks import COMPONENT_DP_SIZES, rank_scopes, shapes_on_every_rank
from neffbuild.grid.shapes import ALL_RANKS, DecodeShape, Family, unit_name


def serving(neuron: dict[str, Any] | None = None, **options: Any) -> ServeConfig:
    serve = build_config(**options).serve
    additional = AdditionalConfig(neuron_config=NeuronConfig(**(neuron or {})))
    return serve.model_copy(update={"additional_config": additional})


@pytest.mark.parametrize(
    "serve",
    [
        serving(),
        serving(tensor_parallel_size=8),
        serving(tensor_parallel_size=8, enable_expert_parallel=True),
        serving(data_parallel_size=4),
        serving(neuron={"attention_dp_size": 1}, data_parallel_size=4),
    ],
)
def test_ranks_without_a_collective_across_replicas_share(serve: ServeConfig) -> None:
    assert rank_scopes(serve, replica_groups=True) == (ALL_RANKS,)


@pytest.mark.parametrize(
    "serve",
    [
        serving(data_parallel_size=3, enable_expert_parallel=True),
        *(serving(neuron={name: 3}, data_parallel_size=3) for name in COMPONENT_DP_SIZES),
    ],
)
def test_replicas_whose_programs_name_ranks_have_their_own(serve: ServeConfig) -> None:
    assert rank_scopes(serve, replica_groups=True) == ("dp0", "dp1", "dp2")
    assert rank_scopes(serve, replica_groups=False) == (ALL_RANKS,)


@pytest.mark.parametrize("value", ["many", 0, -2, True, 1.5, [2], {}])
def test_a_component_is_spread_over_a_number_of_ranks(value: Any) -> None:
    serve = serving(neuron={"attention_dp_size": value}, data_parallel_size=2)
    with pytest.raises(ConfigError, match="allowed: an integer of at least 1") as refused:
        rank_scopes(serve, replica_groups=True)
    assert refused.value.field == "serve.additional_config.neuron_config.attention_dp_size"
    assert refused.value.value == value


def test_a_unit_is_named_by_its_shape_and_its_ranks() -> None:
    shape = DecodeShape(Family.TARGET, 4, 1, 4096)
    assert unit_name(shape, ALL_RANKS) == "decode_b4_ctx4096"
    assert unit_name(shape, "dp1") == "decode_b4_ctx4096@dp1"


def test_a_shape_is_there_when_it_is_for_every_rank() -> None:
    one, other = (DecodeShape(Family.TARGET, rows, 1, 4096) for rows in (1, 2))
    units = {"a": one, "b": one, "c": other, "d": other}
    assert shapes_on_every_rank(units, {"a", "b", "c"}) == {one}
    assert shapes_on_every_rank(units, units.keys()) == {one, other}
    assert shapes_on_every_rank(units, ()) == set()
