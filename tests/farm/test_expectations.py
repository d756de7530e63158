"""What a unit is expected to take: measured, else scaled from its neighbours, else the prior."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import farmtools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neffbuild.config.model import ModelConfig
from neffbuild.farm.expectations import (
    Sample,
    default_prior,
    distance,
    expected_seconds,
    kin,
    prior_of,
    scaled_from,
    work,
)
from neffbuild.grid.shapes import DecodeShape, Family, PrefillShape, Shape
from neffbuild.toolchain.base import Expectation, Unit
from neffbuild.toolchain.inductor.prior import inductor_prior

decodes = st.builds(
    DecodeShape,
    st.sampled_from([Family.TARGET, Family.DRAFT]),
    st.integers(1, 64),
    st.integers(1, 8),
    st.integers(1, 1024).map(lambda n: n * 128),
)
prefills = st.builds(
    PrefillShape, st.just(Family.PREFILL), st.integers(1, 8192), st.sampled_from([0, 2048])
)
shapes = st.one_of(decodes, prefills)


def by_work(shape: Shape) -> float:
    return float(work(shape)) ** 0.5


@st.composite
def units_and_times(draw: st.DrawFn) -> tuple[list[Unit], dict[str, float]]:
    (unit,) = farmtools.make_units(Path("/nowhere"), 1)
    units = [
        replace(unit, shape=shape, key=f"{number:064x}")
        for number, shape in enumerate(draw(st.lists(shapes, unique=True, max_size=12)))
    ]
    keys = draw(st.lists(st.sampled_from([u.key for u in units]), unique=True)) if units else []
    return units, {key: draw(st.floats(0.1, 1e4)) for key in keys}


@given(units_and_times())
def test_what_was_measured_is_expected_and_the_rest_lies_within_its_neighbours(
    case: tuple[list[Unit], dict[str, float]],
) -> None:
    units, measured = case
    expected = expected_seconds(units, measured, by_work)
    assert expected.keys() == {unit.key for unit in units}
    assert {key: expected[key] for key in measured} == measured
    errors = [measured[u.key] / by_work(u.shape) for u in units if u.key in measured] or [1.0]
    for unit in units:
        if unit.key not in measured:
            error = expected[unit.key] / by_work(unit.shape)
            assert min(errors) * 0.999 <= error <= max(errors) * 1.001


@given(st.lists(shapes, max_size=6), st.floats(0.01, 100))
def test_a_prior_that_is_off_by_a_factor_is_put_right_by_one_measurement(
    others: list[Shape], factor: float
) -> None:
    measured = DecodeShape(Family.TARGET, 2, 1, 256)
    sample = Sample(measured, factor * by_work(measured))
    scale = scaled_from([sample], by_work)
    for shape in others:
        assert scale(shape) == pytest.approx(factor * by_work(shape))


def test_without_measurements_the_prior_is_expected() -> None:
    units = farmtools.make_units(Path("/nowhere"), 4)
    expected = expected_seconds(units, {}, by_work)
    assert expected == {unit.key: by_work(unit.shape) for unit in units}


def test_nearer_neighbours_count_more() -> None:
    def flat(shape: Shape) -> float:
        return 1.0

    near, far = (DecodeShape(Family.TARGET, 1, 1, context) for context in (256, 65536))
    scale = scaled_from([Sample(near, 10.0), Sample(far, 1000.0)], flat)
    assert 10 < scale(DecodeShape(Family.TARGET, 1, 1, 512)) < 20
    assert 500 < scale(DecodeShape(Family.TARGET, 1, 1, 32768)) < 1000


def test_the_same_shape_under_another_version_is_the_nearest_neighbour() -> None:
    units = farmtools.make_units(Path("/nowhere"), 3)
    earlier = [Sample(unit.shape, seconds) for unit, seconds in zip(units, (3, 50, 7), strict=True)]
    expected = expected_seconds(units, {}, by_work, earlier)
    assert [expected[unit.key] for unit in units] == pytest.approx([3, 50, 7], rel=0.05)


def test_units_of_one_model_are_kin_whatever_their_shape_and_the_tools_version() -> None:
    one, other = farmtools.make_units(Path("/nowhere"), 2)
    toolchain = {**one.recipe["toolchain"], "versions": {"hostile": "2.0"}}
    newer = replace(one, recipe={**one.recipe, "toolchain": toolchain})
    larger = replace(one, recipe={**one.recipe, "model": {"model_type": "larger"}})
    assert kin(one) == kin(other) == kin(newer)
    assert kin(larger) != kin(one)


@given(shapes, shapes)
def test_distances(one: Shape, other: Shape) -> None:
    assert distance(one, one) == 0
    assert distance(one, other) == pytest.approx(distance(other, one))
    assert distance(one, other) >= 0


def test_a_toolchain_without_a_prior_gets_the_default() -> None:
    class Bare:
        pass

    (unit,) = farmtools.make_units(Path("/nowhere"), 1)
    assert prior_of(Bare()) is default_prior  # type: ignore[arg-type]
    small = default_prior(unit.config, DecodeShape(Family.TARGET, 32, 1, 128))
    large = default_prior(unit.config, DecodeShape(Family.TARGET, 64, 1, 4096))
    assert small.seconds == pytest.approx(60)
    assert large.seconds > small.seconds
    assert small.memory_bytes == large.memory_bytes == 1 << 30


def test_inductors_prior_grows_with_the_layers_a_family_runs() -> None:
    def prior(family: Family, **architecture: int) -> Expectation:
        (unit,) = farmtools.make_units(Path("/nowhere"), 1)
        model, draft = ModelConfig("m", architecture), ModelConfig("d", {"num_hidden_layers": 1})
        config = replace(unit.config, model=model, draft_model=draft)
        return inductor_prior(config, DecodeShape(family, 1, 1, 128))

    draft = prior(Family.DRAFT, num_hidden_layers=80)
    small = prior(Family.TARGET_WITH_SPEC, num_hidden_layers=4)
    large = prior(Family.TARGET_WITH_SPEC, num_hidden_layers=80)
    assert draft.seconds < small.seconds < large.seconds
    assert draft.memory_bytes < small.memory_bytes < large.memory_bytes
    # An estimate refuses nothing.
    assert small.seconds < prior(Family.TARGET, n_layer=12).seconds < large.seconds
