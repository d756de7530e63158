"""The comparison itself, against plain set arithmetic, for any plan and any engine."""

from __future__ import annotations

from itertools import product
from time import process_time

import pytest
from engine_samples import graph_inputs, write_entry
from grid_samples import UNIFORM, VARLEN, bucketer, build_config
from hypothesis import given
from hypothesis import strategies as st

from neffbuild.cache.engine_cache import engine_entries
from neffbuild.config.errors import ConfigError
from neffbuild.grid.conformance import Expected, shape_differences
from neffbuild.grid.engine_entries import compare_entries, entry_shapes
from neffbuild.grid.expand import Phase, WarmUp, expand
from neffbuild.grid.shapes import DecodeShape, Family, PrefillShape

SHAPES = [
    DecodeShape(family, rows, query_len, context)
    for family, rows, query_len, context in product(
        (Family.TARGET_WITH_SPEC, Family.DRAFT), (1, 2), (2, 4), (128, 256)
    )
] + [PrefillShape(Family.PREFILL, tokens, segment) for tokens in (128, 256) for segment in (0, 512)]
some = st.frozensets(st.sampled_from(SHAPES))


def expected(shapes=frozenset(), **config) -> Expected:
    serve = build_config(**config).serve
    return Expected(serve, bucketer(**config), frozenset(shapes), {})


@given(some, st.lists(some, max_size=3), some)
def test_every_shape_is_accounted_for_once(planned, compiled, others) -> None:
    differences = shape_differences(expected(planned), planned, compiled, others)
    everywhere = frozenset.intersection(*compiled) if compiled else planned
    lacking = [one.plan for one in differences if one.plan is not None]
    beyond = [one.engine for one in differences if one.engine is not None]
    assert sorted(lacking, key=repr) == sorted(planned - everywhere, key=repr)
    assert sorted(beyond, key=repr) == sorted(others.union(*compiled) - planned, key=repr)
    for one in differences:
        if one.kind == "other_width":
            assert one.plan.family is one.engine.family
            assert one.plan.bucket_name != one.engine.bucket_name
        else:
            assert one.kind == ("missing" if one.engine is None else "extra")
            assert one.plan is None or one.engine is None


def test_two_that_could_be_paired_both_ways_are_not() -> None:
    planned = {DecodeShape(Family.TARGET, 1, 1, context) for context in (128, 256)}
    engine = {DecodeShape(Family.TARGET, 1, 1, context) for context in (384, 512)}
    differences = shape_differences(
        expected(), frozenset(planned), [frozenset(engine)], frozenset()
    )
    assert [one.kind for one in differences] == ["missing", "missing", "extra", "extra"]


CONFIGS = {
    "no speculation": {},
    "EAGLE3": {"spec_tokens": 5},
    "a ladder of query lengths": {"spec_tokens": 5, "verify": (2, 4, 6), "support": UNIFORM},
    "no context buckets": {"contexts": None, "max_model_len": 4000, "block_size": 32},
    "context parallelism": {"block_size": 32, "decode_context_parallel_size": 2},
}


def planned_by(config) -> Expected:
    config = dict(config)
    support = config.pop("support", VARLEN)
    made = bucketer(support, **config)
    grid = expand(made, WarmUp.FULL_PRODUCT, (Phase.DECODE, Phase.PREFILL))
    shapes = frozenset(gridded.shape for gridded in grid.shapes)
    return Expected(build_config(**config).serve, made, shapes, {})


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_an_entry_is_known_by_its_inputs(config, tmp_path) -> None:
    plan = planned_by(config)
    shapes = sorted(plan.shapes, key=repr)
    for number, shape in enumerate(shapes):
        write_entry(tmp_path, number, graph_inputs(plan.bucketer, shape))
    for shape, entry in zip(shapes, engine_entries(tmp_path), strict=True):
        assert entry_shapes(plan.bucketer, entry) == {shape}
    conformance = compare_entries(plan, engine_entries(tmp_path))
    assert conformance.differences == ()
    assert conformance.matching == len(plan.shapes)


def test_contexts_of_one_width_are_one_program(tmp_path) -> None:
    """256 positions are one column on each of eight ranks, and so are 128."""
    config = {"block_size": 32, "decode_context_parallel_size": 8, "contexts": (128, 256)}
    plan = planned_by(config)
    shape = DecodeShape(Family.TARGET, 1, 1, 128)
    write_entry(tmp_path, 1, graph_inputs(plan.bucketer, shape))
    [entry] = engine_entries(tmp_path)
    assert {one.context_len for one in entry_shapes(plan.bucketer, entry)} == {128, 256}


def test_texts_of_an_entry_cost_no_more_than_reading_them_and_say_no_lines_of_ours(
    tmp_path,
) -> None:
    plan = planned_by({})
    shape = DecodeShape(Family.TARGET, 1, 1, 4096)
    entry = write_entry(
        tmp_path, 1, graph_inputs(plan.bucketer, shape), stated="1\\n\\u001b[2Jall well"
    )
    graph = entry / "fxgraph.txt"
    graph.write_text(graph.read_text() + "placeholder[target=" * 400_000)
    started = process_time()
    [difference] = [
        one
        for one in compare_entries(plan, engine_entries(tmp_path)).differences
        if one.kind == "failed"
    ]
    assert process_time() - started < 2
    assert difference.detail.isprintable()


@pytest.mark.parametrize("stop", [0, 1, 40])
def test_texts_that_do_not_fit_together_are_not_guessed_at(tmp_path, stop) -> None:
    plan = planned_by({})
    whole = write_entry(
        tmp_path, 1, graph_inputs(plan.bucketer, DecodeShape(Family.TARGET, 1, 1, 4096))
    )
    cut = write_entry(
        tmp_path, 2, graph_inputs(plan.bucketer, DecodeShape(Family.TARGET, 2, 1, 4096))
    )
    text = cut / "example_inputs.txt"
    text.write_text(text.read_text()[:stop])
    conformance = compare_entries(plan, engine_entries(tmp_path))
    assert conformance.matching == 1
    assert list(conformance.unread) == [cut.name]
    (whole / "fxgraph.txt").unlink()
    with pytest.raises(ConfigError, match=r"nothing in the engine's cache says.*it has no fxgraph"):
        compare_entries(plan, engine_entries(tmp_path))
