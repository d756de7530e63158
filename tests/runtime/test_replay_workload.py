"""The synthetic workload and its tally, nothing run."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neffbuild.config.load import load_config
from neffbuild.grid.bucketer import Bucketer, QueryLenSupport
from neffbuild.grid.expand import Need, WarmUp, expand
from neffbuild.grid.replay import replay_steps, simulate_replay

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "docs/schemas/neffbuild.replay-1.json").read_text())
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


def bucketer_of(path: Path) -> Bucketer:
    return Bucketer.from_config(load_config(path), query_len_support=QueryLenSupport.VARLEN)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
@pytest.mark.parametrize("steps", [1, 7, 200])
def test_a_simulated_replay_is_a_valid_document(path, steps):
    bucketer = bucketer_of(path)
    document = simulate_replay(bucketer, 2, steps, stored=())
    jsonschema.validate(document, SCHEMA)
    assert document["steps"] == steps
    assert (document["hits"], document["misses"], document["compiles"]) == (0, steps, 0)
    assert 1 <= document["amplification"] <= document["amplification_full_length"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_enough_steps_cross_every_boundary_with_every_batch(path):
    bucketer = bucketer_of(path)
    required = expand(bucketer, WarmUp.REACHABLE).with_need(Need.REQUIRED)
    target = bucketer.families[0]
    document = simulate_replay(bucketer, 1, 400, stored=required)
    assert (document["hits"], document["misses"]) == (400, 0)
    ran = {unit["bucket_name"] for unit in document["units"]}
    assert {shape.bucket_name for shape in required if shape.family is target} <= ran


def test_one_program_missing_costs_the_steps_that_need_it():
    bucketer = bucketer_of(ROOT / "configs/quickstart.yaml")
    shapes = expand(bucketer, WarmUp.REACHABLE).with_need(Need.REQUIRED)
    document = simulate_replay(bucketer, 1, 200, stored=shapes[1:])
    [lost] = [
        unit["steps"] for unit in document["units"] if unit["bucket_name"] == shapes[0].bucket_name
    ]
    assert document["misses"] == lost > 0
    assert document["hits"] == 200 - lost


@given(st.sampled_from(CONFIGS), st.integers(0, 500))
def test_rows_stay_below_the_limit_and_grow_by_one(path, steps):
    bucketer = bucketer_of(path)
    taken = list(replay_steps(bucketer, steps))
    assert len(taken) == steps
    contexts = [[row.num_computed_tokens for row in step.rows] for step in taken]
    assert all(0 < n <= bucketer.max_model_len - 2 for rows in contexts for n in rows)
    grown = sum(now == [n + 1 for n in before] for before, now in pairwise(contexts))
    # All but the step from one stretch to the next.
    assert steps - 1 - grown <= len({len(rows) for rows in contexts}) * len(
        bucketer.decode[bucketer.families[0]].context_len.rungs
    )


def test_the_tally_counts_bytes_as_the_definition_says():
    bucketer = bucketer_of(ROOT / "configs/quickstart.yaml")
    [first, second] = replay_steps(bucketer, 2)
    document = simulate_replay(bucketer, 10, 2, stored=())
    contexts = [row.num_computed_tokens for step in (first, second) for row in step.rows]
    assert [unit["bucket_name"] for unit in document["units"]] == [
        "decode_b4_ctx256", "decode_b4_ctx1024",
    ]  # fmt: skip
    assert document["kv_bytes_read"] == 10 * 4 * (256 + 1024)
    assert document["kv_bytes_full_length"] == 10 * 4 * 4096 * 2
    needed = sum(n + 1 for n in contexts)
    assert document["amplification"] == pytest.approx(4 * (256 + 1024) / needed)
    assert document["transitions"] == [
        {"step": 0, "from": None, "to": "decode_b4_ctx256"},
        {"step": 1, "from": "decode_b4_ctx256", "to": "decode_b4_ctx1024"},
    ]
