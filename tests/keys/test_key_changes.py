"""What re-keys what: buckets, speculation, drafts, compilers, ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from key_samples import DRAFT, EAGLE3, MODEL, Keys, Workspace, kept, keys_of, merged

from neffbuild.cache.plan import Status, make_plan
from neffbuild.cache.recipe import ToolchainIdentity
from neffbuild.config.build import BuildConfig
from neffbuild.config.errors import ConfigError
from neffbuild.config.serve import AdditionalConfig, NeuronConfig
from neffbuild.grid.bucketer import Bucketer, QueryLenSupport
from neffbuild.grid.expand import WarmUp, expand
from neffbuild.grid.shapes import Family

SPEC_FAMILIES = (Family.TARGET_WITH_SPEC, Family.TARGET_WITHOUT_SPEC, Family.DRAFT)
WITH_DRAFT = {"speculative_config": EAGLE3}
TARGETS = (Family.TARGET_WITH_SPEC, Family.TARGET_WITHOUT_SPEC)


def buckets(**lists: list[int] | None) -> dict[str, Any]:
    return {"additional_config": {"neuron_config": lists}}


def spec(**options: Any) -> dict[str, Any]:
    return {"speculative_config": {**EAGLE3, **options}}


def all_kept(before: Keys, after: Keys, family: Family) -> bool:
    outcome = list(kept(before, after, family))
    assert outcome, f"no shape of {family} is in both"
    return all(outcome)


def none_kept(before: Keys, after: Keys) -> bool:
    assert after
    return not set(before.values()) & set(after.values())


@pytest.mark.parametrize("speculation", [{}, WITH_DRAFT], ids=["plain", "eagle3"])
@pytest.mark.parametrize(
    "change",
    [
        buckets(decode_context_length_buckets=[1024, 2048]),
        buckets(decode_context_length_buckets=[128, 512, 1024, 2048, 3968]),
        buckets(num_seqs_buckets=[1, 2, 3, 4]),
        {"max_num_seqs": 5},
        {"max_num_seqs": 64},
        {"max_num_seqs": 6, **buckets(num_seqs_buckets=[1, 2, 4, 5, 6])},
    ],
    ids=str,
)
def test_adding_a_bucket_rekeys_nothing_else(
    workspace: Workspace, speculation: Mapping[str, Any], change: Mapping[str, Any]
) -> None:
    before = workspace.keys(speculation)
    after = workspace.keys(merged(speculation, change))
    assert len(after) > len(before)
    assert before.items() <= after.items()


@given(data=st.data())
def test_a_shapes_key_does_not_depend_on_which_other_shapes_there_are(
    shared_workspace: Workspace, data: st.DataObject
) -> None:
    config = shared_workspace.load(WITH_DRAFT)
    plans: list[Keys] = []
    for _ in range(2):
        contexts = data.draw(st.sets(st.integers(1, 31).map(lambda n: n * 128), min_size=1))
        seqs = data.draw(st.sets(st.integers(1, 64), min_size=1))
        neuron = NeuronConfig(
            num_seqs_buckets=tuple(sorted(seqs)),
            decode_context_length_buckets=tuple(sorted(contexts)),
            verify_query_len_buckets=(6,),
        )
        serve = config.serve.model_copy(
            update={
                "max_num_seqs": max(seqs),
                "additional_config": AdditionalConfig(neuron_config=neuron),
            }
        )
        plans.append(planned(replace(config, serve=serve), symbolic_kv_blocks=True))
    first, second = plans
    for shape in first.keys() & second.keys():
        assert first[shape] == second[shape]
    for plan in plans:
        assert len(set(plan.values())) == len(plan)


def planned(config: BuildConfig, **identity: Any) -> Keys:
    """Keys under a toolchain whose programs know the size of the KV pool, unless told otherwise."""
    toolchain = ToolchainIdentity(
        **{
            "name": "any",
            "route": "aot",
            "target": "t1",
            "engine": "none",
            "versions": {"compiler": "1.0"},
            "flags": (),
            "source_digest": "0" * 64,
            **identity,
        }
    )
    bucketer = Bucketer.from_config(config, query_len_support=QueryLenSupport.VARLEN)
    grid = expand(bucketer, WarmUp.FULL_PRODUCT)
    return keys_of(make_plan(config, toolchain, bucketer, grid, lambda keys: {}))


def test_the_size_of_the_kv_pool_is_keyed_where_programs_know_it(workspace: Workspace) -> None:
    def keys(serve: Mapping[str, Any], **identity: Any) -> Keys:
        return planned(workspace.load(serve), **identity)

    before = keys({})
    # 4 rows of 128 blocks and the null block are what the default comes to.
    assert keys({"num_gpu_blocks_override": 513}) == before
    assert none_kept(before, keys({"num_gpu_blocks_override": 514}))
    assert none_kept(before, keys({"max_num_seqs": 8}))
    assert before.items() <= keys({"max_num_seqs": 8, "num_gpu_blocks_override": 513}).items()
    assert keys({"gpu_memory_utilization": 0.5, "kv_cache_memory_bytes": 1 << 30}) == before
    symbolic = keys({}, symbolic_kv_blocks=True)
    assert none_kept(before, symbolic)
    assert keys({"num_gpu_blocks_override": 514}, symbolic_kv_blocks=True) == symbolic


def test_whether_contexts_are_bucketed_is_part_of_the_key(workspace: Workspace) -> None:
    without = workspace.keys(buckets(decode_context_length_buckets=...))  # type: ignore[arg-type]
    assert none_kept(workspace.keys(), without)


def test_k_rekeys_what_drafts_and_keeps_the_target_without_drafts(workspace: Workspace) -> None:
    before, after = workspace.keys(spec()), workspace.keys(spec(num_speculative_tokens=3))
    assert all_kept(before, after, Family.TARGET_WITHOUT_SPEC)
    same = set(before.values()) & set(after.values())
    assert same == {
        key for shape, key in before.items() if shape.family is Family.TARGET_WITHOUT_SPEC
    }


def test_a_draft_of_another_architecture_rekeys_the_draft_alone(workspace: Workspace) -> None:
    before = workspace.keys(WITH_DRAFT)
    workspace.write_model("draft", {**DRAFT, "intermediate_size": 1024})
    after = workspace.keys(WITH_DRAFT)
    assert all_kept(before, after, Family.TARGET_WITH_SPEC)
    assert all_kept(before, after, Family.TARGET_WITHOUT_SPEC)
    assert not any(kept(before, after, Family.DRAFT))


def test_a_draft_with_other_positions_rekeys_the_draft_alone(workspace: Workspace) -> None:
    before = workspace.keys(WITH_DRAFT)
    workspace.write_model("draft", {**DRAFT, "max_position_embeddings": 2048})
    after = workspace.keys(WITH_DRAFT)
    assert all(all_kept(before, after, family) for family in TARGETS)
    assert not any(kept(before, after, Family.DRAFT))


@pytest.mark.parametrize("nesting", [lambda ids: ids, lambda ids: {"eagle_config": ids}])
def test_auxiliary_layers_rekey_the_targets(workspace: Workspace, nesting: Any) -> None:
    before = workspace.keys(WITH_DRAFT)
    workspace.write_model(
        "draft", {**DRAFT, **nesting({"eagle_aux_hidden_state_layer_ids": [1, 3, 6]})}
    )
    after = workspace.keys(WITH_DRAFT)
    for family in SPEC_FAMILIES:
        assert not any(kept(before, after, family))


def test_layers_that_a_dflash_draft_reads_are_its_own_to_state(workspace: Workspace) -> None:
    dflash = {"speculative_config": {**EAGLE3, "method": "dflash"}}
    with pytest.raises(ConfigError, match="target_layer_ids is None; allowed: a list of integers"):
        workspace.keys(dflash)
    layers = {"dflash_config": {"target_layer_ids": [1, 3]}}
    workspace.write_model("draft", {**DRAFT, **layers})
    plan = workspace.plan(dflash)
    assert {tuple(unit.recipe["auxiliary_layers"]) for unit in plan.units if unit.recipe} == {
        (1, 3)
    }
    assert plan.counts["by_family"].keys() == {family.value for family in SPEC_FAMILIES}
    # What verifies the drafts of one method is no program for another's.
    assert not keys_of(plan).items() & workspace.keys(WITH_DRAFT).items()


def test_auxiliary_layers_written_out_are_the_default_ones(workspace: Workspace) -> None:
    before = workspace.keys(WITH_DRAFT)
    workspace.write_model("draft", {**DRAFT, "eagle_aux_hidden_state_layer_ids": [2, 4, 5]})
    after = workspace.keys(WITH_DRAFT)
    assert all(all_kept(before, after, family) for family in TARGETS)


@pytest.mark.parametrize("stated", [7, "2,4", [2, "4"], [True, 2], {"a": 1}])
def test_auxiliary_layers_that_are_no_list_of_integers_are_refused(
    workspace: Workspace, stated: Any
) -> None:
    workspace.write_model("draft", {**DRAFT, "eagle_aux_hidden_state_layer_ids": stated})
    with pytest.raises(ConfigError, match="allowed: a list of integers") as caught:
        workspace.keys(WITH_DRAFT)
    assert caught.value.value == stated


def test_a_target_that_nests_its_language_model_has_auxiliary_layers(workspace: Workspace) -> None:
    workspace.write_model(
        "model", {"architectures": ["Vision"], "model_type": "vision", "text_config": MODEL}
    )
    plan = workspace.plan(WITH_DRAFT)
    recipes = [unit.recipe for unit in plan.units if unit.recipe is not None]
    assert recipes
    assert all(recipe["auxiliary_layers"] == [2, 4, 5] for recipe in recipes)


def test_turning_speculation_on_shares_no_program_with_the_target_alone(
    workspace: Workspace,
) -> None:
    assert none_kept(workspace.keys(), workspace.keys(WITH_DRAFT))


CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "compiler version": ({}, {"versions": {"g++": "12.2.1"}}),
    "torch version": ({}, {"versions": {"torch": "2.13.1"}}),
    "flag": ({}, {"flags": ["cpp.enable_unsafe_math_opt_flag=true"]}),
    "target": ({}, {"target": "x86-64-v4"}),
    "tensor parallel": ({"tensor_parallel_size": 4}, {}),
    "dtype": ({"dtype": "float32"}, {}),
    "quantisation": ({"quantization": "fp8"}, {}),
    "KV dtype": ({"kv_cache_dtype": "fp8"}, {}),
    "block size": ({"block_size": 64}, {}),
}


@pytest.mark.parametrize("speculation", [{}, WITH_DRAFT], ids=["plain", "eagle3"])
def test_what_decides_code_generation_is_a_miss_one_at_a_time(
    workspace: Workspace, speculation: Mapping[str, Any]
) -> None:
    seen = set(workspace.keys(speculation).values())
    for name, (serve, toolchain) in CHANGES.items():
        keys = set(workspace.keys(merged(speculation, serve), toolchain).values())
        assert keys, name
        assert not keys & seen, name
        seen |= keys


def test_a_tool_of_unknown_version_leaves_units_without_keys(workspace: Workspace) -> None:
    config = workspace.load()
    toolchain = ToolchainIdentity(
        name="any",
        route="aot",
        target="t1",
        engine="none",
        versions={},
        flags=(),
        source_digest="0" * 64,
        unresolved=("compiler is not installed here: pin toolchain.versions.compiler",),
    )
    bucketer = Bucketer.from_config(config, query_len_support=QueryLenSupport.VARLEN)
    asked: list[list[str]] = []

    def stored(keys: Iterable[str]) -> Mapping[str, str | None]:
        asked.append(list(keys))
        return {}

    grid = expand(bucketer, WarmUp.FULL_PRODUCT)
    plan = make_plan(config, toolchain, bucketer, grid, stored)
    assert asked == [[]]
    assert {unit.status for unit in plan.units} == {Status.UNRESOLVED}
    for unit in plan.units:
        assert unit.key is None
        assert unit.recipe is None
        assert unit.reason is not None
        assert "pin toolchain.versions.compiler" in unit.reason
