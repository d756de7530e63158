"""The same over really compiled programs: planned, built by the farm, loaded from the store."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import Serving
from spec_models import DRAFT, MAX_MODEL_LEN, build_config, cyclic_pair, random_pair
from test_lossless import BUDGETS, CHANCE, POLICIES, budgets, joins, serve

from neffbuild.cache.directory import DirectoryStore
from neffbuild.cache.plan import Plan, store_plan_manifest
from neffbuild.config.build import FarmConfig
from neffbuild.config.errors import ToolchainRefusal
from neffbuild.config.model import ModelConfig
from neffbuild.farm.run import compile_units
from neffbuild.grid.shapes import Family
from neffbuild.runtime.loader import Loader
from neffbuild.runtime.replay import execute_replay
from neffbuild.toolchain.base import Unit
from neffbuild.toolchain.inductor import InductorToolchain
from neffbuild.toolchain.planning import plan_config

SPEC_TOKENS, CONTEXT = 3, 64
SCHEMA = json.loads(
    (Path(__file__).parents[2] / "docs/schemas/neffbuild.replay-1.json").read_text()
)
CONFIG = build_config(SPEC_TOKENS, contexts=(CONTEXT,), num_seqs=(4,))


def units_of(plan: Plan) -> list[Unit]:
    return [Unit(plan.config, unit.shape, unit.recipe, unit.key) for unit in plan.units if unit.key]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> DirectoryStore:
    """Holds three families, each at two contexts."""
    folder = tmp_path_factory.mktemp("compiled")
    store, toolchain = DirectoryStore(folder / "cache"), InductorToolchain()
    units = units_of(plan_config(CONFIG, toolchain, store))
    assert len(units) == 6
    run = compile_units(
        units, toolchain, store, FarmConfig(), logs=folder / "logs", on_event=lambda event: None
    )
    assert [unit.outcome.value for unit in run.units] == ["built"] * 6, run
    store_plan_manifest(plan_config(CONFIG, toolchain, store), store)
    return store


@pytest.fixture(scope="module")
def loader(compiled: DirectoryStore) -> Loader:
    loader = Loader.from_config(CONFIG, compiled)
    loader.load_all()
    return loader


@pytest.mark.parametrize("kind", ["fixed", "adaptive", "any"])
@pytest.mark.parametrize(
    ("make_pair", "foreseen"), [(random_pair, False), (random_pair, True), (cyclic_pair, False)],
    ids=["random", "foreseeing", "knowing"],
)  # fmt: skip
def test_to_max_model_len_with_requests_joining_and_leaving(loader, make_pair, foreseen, kind):
    chance = random.Random(1)
    serving = Serving(make_pair, CONFIG, budgets(SPEC_TOKENS, chance)[kind], loader=loader)
    requests = [
        (0, 0, 2, MAX_MODEL_LEN, False),
        (3, 1, 50, MAX_MODEL_LEN, False),
        (9, 2, 80, 90, False),
        (12, 3, 3, 40, True),
        (13, 4, 85, MAX_MODEL_LEN, False),
    ]
    serve(serving, requests, chance, serving.foresee if foreseen else lambda: None)
    ran = {shape for step in serving.steps for shape in (step.shapes.target, step.shapes.draft)}
    assert {(shape.family, shape.context_len) for shape in ran if shape} >= {
        (family, context)
        for family in (Family.TARGET_WITH_SPEC, Family.DRAFT)
        for context in (CONTEXT, MAX_MODEL_LEN)
    }
    acceptance = serving.decoder.acceptance
    assert acceptance.verified[0] > 20
    if foreseen or make_pair is cyclic_pair:
        assert acceptance.accepted == acceptance.verified
    else:
        assert sum(acceptance.accepted) < 0.05 * sum(acceptance.verified)
    assert loader.counters.misses == loader.counters.compiles == 0


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.sampled_from([random_pair, cyclic_pair]), POLICIES, joins(), BUDGETS, CHANCE)
def test_any_batch(loader, make_pair, policy, requests, kind, chance):
    budget = budgets(SPEC_TOKENS, chance)[kind]
    serving = Serving(make_pair, CONFIG, budget, policy=policy, loader=loader)
    serve(serving, requests, chance)
    if make_pair is cyclic_pair:
        acceptance = serving.decoder.acceptance
        assert acceptance.accepted == acceptance.verified


def test_replay_runs_every_program_and_counts_what_became_of_the_drafts(compiled):
    document = execute_replay(CONFIG, compiled, steps=120)
    jsonschema.validate(document, SCHEMA)
    assert (document["compiles"], document["hits"], document["misses"]) == (0, 120, 0)
    assert {unit["bucket_name"] for unit in document["units"]} == {
        f"{name}_ctx{context}"
        for name in ("decode_b4_s1", "decode_b4_s4", "draft_b4_s4")
        for context in (CONTEXT, MAX_MODEL_LEN)
    }
    acceptance = document["acceptance"]
    assert [at["position"] for at in acceptance] == [1, 2, 3]
    # 4 rows in each step, but for the two in which new requests join.
    assert acceptance[0]["verified"] <= 4 * 118
    assert acceptance[0]["rate"] < 0.1
    assert all(unit["median_step_seconds"] > 0 for unit in document["units"])


def test_a_draft_other_than_the_one_compiled_for_is_refused(compiled, loader):
    other = DRAFT | {"norm_before_residual": False}
    config = replace(CONFIG, draft_model=ModelConfig("draft", other))
    wrong = Loader(
        loader.manifest,
        compiled,
        InductorToolchain(),
        architecture=config.model.architecture,
        draft_architecture=config.draft_model.architecture,
    )
    shapes = {unit.shape.family: unit.shape for unit in loader.manifest.units}
    wrong.load(shapes[Family.TARGET_WITH_SPEC])
    with pytest.raises(ToolchainRefusal, match=r"another draft.*norm_before_residual"):
        wrong.load(shapes[Family.DRAFT])
