"""Ladders, and the lookups every part of the product shares."""

from __future__ import annotations

import pytest
from grid_samples import UNIFORM, VARLEN, bucketer
from hypothesis import given
from hypothesis import strategies as st

from neffbuild.config.errors import AboveLadder, ConfigError
from neffbuild.grid.bucketer import Ladder
from neffbuild.grid.shapes import Family

RUNGS = st.sets(st.integers(1, 60), min_size=1, max_size=8).map(lambda rungs: tuple(sorted(rungs)))


@given(RUNGS, st.integers(-2, 70), st.data())
def test_cover_is_the_smallest_rung_that_is_large_enough(
    rungs: tuple[int, ...], n: int, data: st.DataObject
) -> None:
    floor = data.draw(st.integers(1, rungs[-1]))
    ladder = Ladder("buckets", "the_limit", rungs, floor)
    large_enough = [rung for rung in rungs if rung >= n and rung >= floor]
    if large_enough:
        assert ladder.cover(n) == min(large_enough)
    else:
        with pytest.raises(AboveLadder) as refused:
            ladder.cover(n)
        assert refused.value.value == n
        assert refused.value.field == "buckets"
        assert str(rungs[-1]) in refused.value.message
        assert "the_limit" in (refused.value.hint or "")


@given(RUNGS, st.data())
def test_cells_divide_what_is_covered(rungs: tuple[int, ...], data: st.DataObject) -> None:
    floor = data.draw(st.integers(1, rungs[-1]))
    ladder = Ladder("buckets", "limit", rungs, floor)
    by_cell = {n: rung for rung, covered in ladder.cells() for n in covered}
    assert by_cell == {n: ladder.cover(n) for n in range(floor, rungs[-1] + 1)}
    assert [rung for rung, _ in ladder.cells()] == list(rungs)


@pytest.mark.parametrize("rungs", [(), (0, 1), (-1,), (2, 2), (4, 2)])
def test_what_is_no_ladder_is_refused(rungs: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="strictly ascending"):
        Ladder("num_seqs_buckets", "max_num_seqs", rungs)


@pytest.mark.parametrize("floor", [0, 5])
def test_a_floor_outside_the_ladder_is_refused(floor: int) -> None:
    with pytest.raises(ConfigError, match="floor of 1 to 4") as refused:
        Ladder("num_seqs_buckets", "max_num_seqs", (1, 2, 4), floor)
    assert refused.value.value == floor


def test_families_without_and_with_speculation() -> None:
    assert bucketer().families == (Family.TARGET,)
    assert bucketer(spec_tokens=5).families == (
        Family.TARGET_WITH_SPEC,
        Family.TARGET_WITHOUT_SPEC,
        Family.DRAFT,
    )


@pytest.mark.parametrize(
    ("need", "context_len"),
    [
        (1, 4096),
        (4095, 4096),
        (4096, 4096),
        (4097, 8192),
        (16384, 16384),
        (16385, 131072),
        (131072, 131072),
    ],
)
def test_context_at_and_around_a_bucket(need: int, context_len: int) -> None:
    shape = bucketer().decode_shape(Family.TARGET, num_seqs=4, context_need=need)
    assert (shape.num_seqs, shape.context_len) == (4, context_len)


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"num_seqs": 5, "context_need": 1}, "num_seqs_buckets"),
        ({"num_seqs": 1, "context_need": 131073}, "decode_context_length_buckets"),
        ({"num_seqs": 1, "context_need": 1, "query_len": 7}, "verify_query_len_buckets"),
    ],
)
def test_above_the_top_is_refused_never_clamped(asked: dict[str, int], field: str) -> None:
    with pytest.raises(AboveLadder) as refused:
        bucketer(spec_tokens=5).decode_shape(Family.TARGET_WITH_SPEC, **asked)
    assert refused.value.field == field
    assert refused.value.exit_status == 2


def test_with_spec_width_is_exact() -> None:
    subject = bucketer(num_seqs=(1, 2, 4, 6), spec_tokens=6)
    shape = subject.decode_shape(Family.TARGET_WITH_SPEC, num_seqs=6, context_need=100, query_len=7)
    assert shape.num_tokens == 42


@pytest.mark.parametrize("max_num_seqs", [33, 100])
def test_the_top_batch_is_exact(max_num_seqs: int) -> None:
    subject = bucketer(num_seqs=None, max_num_seqs=max_num_seqs)
    rungs = subject.decode[Family.TARGET].num_seqs.rungs
    assert rungs[-1] == max_num_seqs
    assert rungs[:-1] == tuple(2**i for i in range(10) if 2**i < max_num_seqs)


def test_ladders_of_paths_are_independent() -> None:
    subject = bucketer(spec_tokens=2, floors={Family.DRAFT: 4})
    assert subject.decode_shape(Family.DRAFT, num_seqs=1, context_need=1).num_seqs == 4
    assert subject.decode_shape(Family.TARGET_WITH_SPEC, num_seqs=1, context_need=1).num_seqs == 1


def test_a_ladder_of_query_lengths_is_for_uniform_programs_only() -> None:
    options = {"spec_tokens": 5, "verify": (2, 4, 6)}
    uniform, varlen = bucketer(UNIFORM, **options), bucketer(VARLEN, **options)
    for family in (Family.TARGET_WITH_SPEC, Family.DRAFT):
        assert uniform.decode[family].query_len.rungs == (2, 4, 6)
        assert varlen.decode[family].query_len.rungs == (6,)
    assert uniform.decode[Family.TARGET_WITHOUT_SPEC].query_len.rungs == (1,)
    assert bucketer(UNIFORM, spec_tokens=5).decode[Family.DRAFT].query_len.rungs == (6,)


@pytest.mark.parametrize("verify", [(1, 6), (2, 5), (2, 8)])
def test_query_lengths_that_no_verification_has_are_refused(verify: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="from 2 to 6, ending with 6") as refused:
        bucketer(UNIFORM, spec_tokens=5, verify=verify)
    assert refused.value.field == "serve.additional_config.neuron_config.verify_query_len_buckets"


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({"draft_limit": 2048, "draft_max_positions": 4096}, 2048),
        ({"draft_max_positions": 4096}, 4096),
        ({"draft_max_positions": 262144}, 131072),
        ({}, 131072),
    ],
)
def test_the_limit_of_the_draft(options: dict[str, int], limit: int) -> None:
    assert bucketer(spec_tokens=3, **options).draft_limit == limit


@given(
    block_size=st.sampled_from([16, 32, 64, 128]),
    dcp=st.sampled_from([1, 2, 4]),
    need=st.integers(1, 1000),
)
def test_block_table_width_holds_the_context_and_no_more(
    block_size: int, dcp: int, need: int
) -> None:
    subject = bucketer(
        contexts=(128, 384),
        max_model_len=1000,
        block_size=block_size,
        decode_context_parallel_size=dcp,
    )
    shape = subject.decode_shape(Family.TARGET, num_seqs=1, context_need=need)
    width = subject.block_table_width(shape)
    assert width * block_size * dcp >= shape.context_len > (width - 1) * block_size * dcp
