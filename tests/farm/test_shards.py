"""Static shards: every machine cuts the same parts, and none of them is much longer than the others."""

from __future__ import annotations

import random
import sys
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neffbuild.config.errors import ConfigError
from neffbuild.farm.shards import Shard, parse_shard, shard_members, shard_of_groups

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import bench_shards as bench
from bench_schedule import DISTRIBUTIONS, grid_expectations, measured_grid

SECONDS = st.lists(st.floats(min_value=0, max_value=1e5), max_size=60)
COUNTS = st.integers(min_value=1, max_value=20)


def parts(seconds: list[float], count: int) -> list[list[int]]:
    return [shard_members(seconds, Shard(index, count)) for index in range(1, count + 1)]


@given(seconds=SECONDS, count=COUNTS)
def test_every_unit_is_in_exactly_one_shard(seconds: list[float], count: int) -> None:
    assert sorted(chain.from_iterable(parts(seconds, count))) == list(range(len(seconds)))


@given(
    units=st.lists(st.tuples(st.floats(0, 1e5), st.sampled_from([None, "a", "b"]))), count=COUNTS
)
def test_units_of_one_compile_are_in_one_shard(
    units: list[tuple[float, str | None]], count: int
) -> None:
    seconds, groups = [one[0] for one in units], [one[1] for one in units]
    cut = [shard_of_groups(seconds, groups, Shard(index, count)) for index in range(1, count + 1)]
    assert sorted(chain.from_iterable(cut)) == list(range(len(units)))
    for group in ("a", "b"):
        assert sum(any(groups[place] == group for place in part) for part in cut) <= 1
    alone = [
        shard_of_groups(seconds, [None] * len(units), Shard(index, count)) for index in (1, count)
    ]
    assert alone == [parts(seconds, count)[0], parts(seconds, count)[-1]]


@given(seconds=SECONDS, count=COUNTS)
def test_no_shard_is_longer_than_an_even_split_and_one_unit_more(
    seconds: list[float], count: int
) -> None:
    loads = [sum(seconds[place] for place in part) for part in parts(seconds, count)]
    fair = sum(seconds) / count + (1 - 1 / count) * max(seconds, default=0)
    assert max(loads) <= fair + 1e-3 * (len(seconds) + 1)  # costs are whole milliseconds


@given(seconds=SECONDS, count=COUNTS, noise=st.randoms(use_true_random=False))
def test_the_last_bits_of_an_expectation_do_not_matter(
    seconds: list[float], count: int, noise: random.Random
) -> None:
    """Machines with another C library compute other last bits."""
    whole = [float(round(each)) for each in seconds]
    elsewhere = [each * (1 + noise.choice((-1, 0, 1)) * 2**-52) for each in whole]
    assert parts(whole, count) == parts(elsewhere, count)


@given(count=COUNTS, units=st.integers(min_value=0, max_value=60))
def test_equal_units_are_dealt_out_evenly(count: int, units: int) -> None:
    sizes = [len(part) for part in parts([0.0] * units, count)]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def test_units_go_where_their_expectations_do() -> None:
    seconds = [1.0, 2.0, 4.0, 8.0]
    assert shard_members(seconds, Shard(1, 2)) == [3]
    assert shard_members(seconds, Shard(2, 2)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("text", "shard"), [("1/1", Shard(1, 1)), ("3/8", Shard(3, 8)), ("8/8", Shard(8, 8))]
)
def test_a_shard_is_named_by_its_number_and_how_many_there_are(text: str, shard: Shard) -> None:
    assert parse_shard(text, {"JOB_COMPLETION_INDEX": "5"}) == shard
    assert str(shard) == text


NOT_SHARDS = (
    "|3|/|3/|/8|0/8|9/8|-1/8|3/0|3/8/2| 3/8|+3/8|three/8|3.0/8|٣/٨|3/100001|1/9999999999"
    "|auto/|auto/0|auto/x|Auto|auto/8/8"
)


@pytest.mark.parametrize("text", NOT_SHARDS.split("|"))
def test_anything_else_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_shard(text, {"JOB_COMPLETION_INDEX": "0"})
    assert refused.value.field == "--shard"
    assert refused.value.value == text
    assert "3/8" in str(refused.value.hint)
    assert "auto/8" in str(refused.value.hint)


AWS = {"AWS_BATCH_JOB_ARRAY_INDEX": "2", "AWS_BATCH_JOB_ARRAY_SIZE": "8"}
SLURM = {
    "SLURM_ARRAY_TASK_ID": "16",
    "SLURM_ARRAY_TASK_MIN": "10",
    "SLURM_ARRAY_TASK_MAX": "31",
    "SLURM_ARRAY_TASK_STEP": "3",
    "SLURM_ARRAY_TASK_COUNT": "8",
}
GITLAB = {"CI_NODE_INDEX": "3", "CI_NODE_TOTAL": "8"}
CIRCLE = {"CIRCLE_NODE_INDEX": "2", "CIRCLE_NODE_TOTAL": "8"}
BUILDKITE = {"BUILDKITE_PARALLEL_JOB": "2", "BUILDKITE_PARALLEL_JOB_COUNT": "8"}
KUBERNETES = {"JOB_COMPLETION_INDEX": "2", "NEFFBUILD_SHARDS": "8"}


@pytest.mark.parametrize("environment", [AWS, SLURM, GITLAB, CIRCLE, BUILDKITE, KUBERNETES])
@pytest.mark.parametrize("text", ["auto", "auto/8"])
def test_schedulers_are_understood(environment: dict[str, str], text: str) -> None:
    assert parse_shard(text, environment) == Shard(3, 8)


def test_the_ends_of_an_array_are_its_first_and_last_shard() -> None:
    for environment, index, first, last in (
        (AWS, "AWS_BATCH_JOB_ARRAY_INDEX", "0", "7"),
        (SLURM, "SLURM_ARRAY_TASK_ID", "10", "31"),
        (GITLAB, "CI_NODE_INDEX", "1", "8"),
        (KUBERNETES, "JOB_COMPLETION_INDEX", "0", "7"),
    ):
        assert parse_shard("auto", {**environment, index: first}) == Shard(1, 8)
        assert parse_shard("auto", {**environment, index: last}) == Shard(8, 8)


@pytest.mark.parametrize(
    ("environment", "text", "said"),
    [
        ({}, "auto", "no scheduler says which shard this is"),
        ({"CI_NODE_TOTAL": "1"}, "auto", "no scheduler says which shard this is"),
        ({"JOB_COMPLETION_INDEX": "2"}, "auto", "does not say how many shards there are"),
        ({"AWS_BATCH_JOB_ARRAY_INDEX": "2"}, "auto", "AWS_BATCH_JOB_ARRAY_SIZE is not set"),
        (AWS, "auto/9", "shards there are: 9 by --shard auto/9, 8 by AWS_BATCH_JOB_ARRAY_SIZE"),
        (KUBERNETES, "auto/3", "shards there are: 3 by --shard auto/3, 8 by NEFFBUILD_SHARDS"),
        ({**AWS, "NEFFBUILD_SHARDS": "3"}, "auto", "8 by AWS_BATCH_JOB_ARRAY_SIZE, 3 by NEFFBUILD"),
        (
            {**AWS, **CIRCLE, "CIRCLE_NODE_TOTAL": "9"},
            "auto",
            "disagree which shard this is: shard 3/8 by AWS Batch, shard 3/9 by CircleCI",
        ),
        (
            {**AWS, "AWS_BATCH_JOB_ARRAY_INDEX": "x"},
            "auto",
            "INDEX is 'x'; allowed: a whole number",
        ),
        ({**AWS, "AWS_BATCH_JOB_ARRAY_INDEX": "8"}, "auto", "not 9"),
        ({**GITLAB, "CI_NODE_INDEX": "0"}, "auto", "CI_NODE_INDEX=0"),
        ({**SLURM, "SLURM_ARRAY_TASK_ID": "17"}, "auto", "no step of 3 from 10"),
        ({**SLURM, "SLURM_ARRAY_TASK_ID": "7"}, "auto", "numbered from 1 to 8, not 0"),
        ({**SLURM, "SLURM_ARRAY_TASK_STEP": "0"}, "auto", "no step of 0 from 10"),
        ({**SLURM, "SLURM_ARRAY_TASK_MIN": ""}, "auto", "SLURM_ARRAY_TASK_MIN is ''"),
        ({**SLURM, "SLURM_ARRAY_TASK_MAX": ""}, "auto", "SLURM_ARRAY_TASK_MAX is ''"),
        ({**KUBERNETES, "NEFFBUILD_SHARDS": "many"}, "auto", "NEFFBUILD_SHARDS is 'many'"),
    ],
)
def test_what_schedulers_leave_open_is_refused(
    environment: dict[str, str], text: str, said: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_shard(text, environment)
    assert said in refused.value.message
    assert refused.value.hint


@given(numbers=st.sets(st.integers(0, 20), min_size=1, max_size=6), step=st.integers(1, 3))
def test_arrays_with_holes_lose_no_unit(numbers: set[int], step: int) -> None:
    """`--array=1,3,7`: every task is refused, or the tasks have all shards between them."""
    environment = {
        "SLURM_ARRAY_TASK_COUNT": str(len(numbers)),
        "SLURM_ARRAY_TASK_MIN": str(min(numbers)),
        "SLURM_ARRAY_TASK_MAX": str(max(numbers)),
        "SLURM_ARRAY_TASK_STEP": str(step),
    }
    found, refused = set(), 0
    for number in numbers:
        try:
            found.add(parse_shard("auto", {**environment, "SLURM_ARRAY_TASK_ID": str(number)}))
        except ConfigError:
            refused += 1
    assert refused or found == {Shard(index, len(numbers)) for index in range(1, len(numbers) + 1)}
    if step == 1 and len(numbers) < max(numbers) - min(numbers) + 1:
        assert not found


def test_two_schedulers_that_agree_are_believed() -> None:
    assert parse_shard("auto", {**AWS, **BUILDKITE}) == Shard(3, 8)


@pytest.mark.parametrize("workers", [1, 8])
@pytest.mark.parametrize("machines", [8, 64])
@pytest.mark.parametrize("units", [144, 1000])
@pytest.mark.parametrize("name", ["log-normal", "Pareto", "bimodal"])
def test_shards_take_hardly_longer_than_one_queue_for_all_machines(
    name: str, units: int, machines: int, workers: int
) -> None:
    source = random.Random(1)
    seconds = [DISTRIBUTIONS[name](source) for _ in range(units)]
    assert bench.ratios(seconds, seconds, machines, workers)[0] <= 1.1


@pytest.mark.parametrize("machines", [2, 3, 8])
def test_shards_of_the_measured_grid_are_no_more_than_a_tenth_longer(machines: int) -> None:
    """Though cut by the toolchain's prior, which knows no measurement of theirs."""
    shapes, seconds = measured_grid()
    prior = grid_expectations(shapes, seconds)["by the prior alone"]
    assert bench.ratios(seconds, prior, machines, 1)[0] <= 1.1
