"""Every field of the serve config, per family: it changes the key, or it is left out with a reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import replace
from types import EllipsisType, NoneType
from typing import Any, get_args, get_origin

import pytest
from key_samples import EAGLE3, MODEL, SERVE, Workspace, kept, merged, nested
from pydantic import BaseModel

from neffbuild.cache.recipe import (
    ToolchainIdentity,
    family_recipe,
    graph_recipe,
    recipe_key,
    unit_recipe,
)
from neffbuild.cache.serve_options import FAMILY_REMOVALS, INERT, removed_options
from neffbuild.config import vllm_options
from neffbuild.config.build import BuildConfig
from neffbuild.config.model import model_config
from neffbuild.config.serve import ServeConfig
from neffbuild.grid.shapes import DecodeShape, Family

REMOVALS = (*INERT, *FAMILY_REMOVALS)
FAMILIES = [pytest.param(family, id=family.value) for family in Family]
IDENTITY = ToolchainIdentity(
    name="any",
    route="aot",
    target="t1",
    engine="none",
    versions={"compiler": "1.0"},
    flags=("-O2",),
    source_digest="0" * 64,
    environment={"KEYED": "1"},
)
BASE = ServeConfig(
    **merged(
        SERVE,
        {
            "dtype": "bfloat16",
            "quantization": "fp8",
            "num_gpu_blocks_override": 100,
            "max_num_batched_tokens": 512,
            "enable_prefix_caching": True,
            "kv_transfer_config": {"kv_connector": "NixlConnector"},
            "compilation_config": {"mode": 0},
            "speculative_config": {
                **EAGLE3,
                "max_model_len": 2048,
                "draft_tensor_parallel_size": 8,
            },
            "additional_config": {
                "neuron_config": {
                    "num_seqs_buckets": [1, 2, 4],
                    "num_batched_tokens_buckets": [512],
                    "kv_segment_size_buckets": [512],
                    "verify_query_len_buckets": [6],
                }
            },
        },
    )
)


def schema_leaves(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, annotation) of every field, fields of nested models in place of the models."""
    for name, field in model.model_fields.items():
        kinds = list(get_args(field.annotation) or (field.annotation,))
        inner = next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)
        if inner is not None:
            yield from schema_leaves(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field.annotation


LEAVES = dict(schema_leaves(ServeConfig))


def other_value(value: Any, annotation: Any) -> Any:
    """Something else that the annotation allows."""
    options = [kind for kind in get_args(annotation) if kind not in (NoneType, EllipsisType)]
    kind = annotation if get_origin(annotation) in (dict, tuple) or not options else options[0]
    if kind is bool:
        return not value
    if kind is int:
        return (value or 0) + 3
    if kind is float:
        return (value or 0.0) / 2
    if kind is str:
        return f"{value}-other"
    if get_origin(kind) is tuple:
        return (*(value or ()), 4096)
    assert get_origin(kind) is dict, f"no other value of {annotation} is known"
    return {**(value or {}), "added": 1}


def value_at(document: Any, path: str) -> Any:
    for name in path.split("."):
        document = document.get(name) if isinstance(document, dict) else None
    return document


def with_option(path: str, value: Any) -> ServeConfig:
    return ServeConfig(**merged(BASE.model_dump(), nested(path, value)))


def build(serve: ServeConfig) -> BuildConfig:
    model = model_config("model", MODEL)
    return BuildConfig("tests", serve, model, draft_model=model)


def recipe(serve: ServeConfig, family: Family) -> dict[str, Any]:
    return family_recipe(build(serve), family, IDENTITY, num_kv_blocks=None)


def check_changes_key_or_is_removed(serve: ServeConfig, path: str, family: Family) -> None:
    reasons = dict(removed_options(serve, family))
    if recipe(serve, family) == recipe(BASE, family):
        assert reasons.get(path), f"{path} neither changes the key of {family} nor has a reason"
    else:
        assert path not in reasons


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("path", LEAVES)
def test_every_field_of_the_schema_changes_the_key_or_has_a_reason(
    path: str, family: Family
) -> None:
    value = value_at(BASE.model_dump(), path)
    changed = with_option(path, other_value(value, LEAVES[path]))
    assert changed != BASE
    check_changes_key_or_is_removed(changed, path, family)


def test_the_walk_reaches_nested_fields_and_finds_both_kinds() -> None:
    assert "additional_config.neuron_config.num_seqs_buckets" in LEAVES
    assert "speculative_config.num_speculative_tokens" in LEAVES
    left_out = {
        path
        for path, annotation in LEAVES.items()
        if recipe(
            with_option(path, other_value(value_at(BASE.model_dump(), path), annotation)),
            Family.TARGET,
        )
        == recipe(BASE, Family.TARGET)
    }
    # A new field is an ingredient until somebody says otherwise here and in the table of removals.
    assert left_out == {
        "model",
        "max_num_seqs",
        "max_num_batched_tokens",
        "num_gpu_blocks_override",
        "gpu_memory_utilization",
        "speculative_config.model",
        "speculative_config.max_model_len",
        "speculative_config.draft_tensor_parallel_size",
        *(path for path in LEAVES if path.startswith("additional_config.neuron_config.")),
    }


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("removal", REMOVALS, ids=lambda removal: removal.path)
def test_every_removal_removes_its_option_from_its_families_alone(
    removal: Any, family: Family
) -> None:
    value = value_at(BASE.model_dump(), removal.path)
    annotation = LEAVES.get(removal.path, str)
    changed = with_option(removal.path, other_value(value, annotation))
    same = recipe(changed, family) == recipe(BASE, family)
    assert same == (family in removal.families)
    check_changes_key_or_is_removed(changed, removal.path, family)


def test_removals_name_real_options_once_and_give_reasons() -> None:
    known = vllm_options.NAMES | ServeConfig.model_fields.keys()
    paths = [removal.path for removal in REMOVALS]
    assert len(set(paths)) == len(paths)
    assert [path for path in paths if path.split(".")[0] not in known] == []
    assert all(len(removal.reason) > 10 for removal in REMOVALS)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "path",
    [
        "an_option_of_a_newer_vllm",
        "additional_config.another_plugin",
        "additional_config.neuron_config.a_new_knob",
        "speculative_config.a_new_knob",
        "compilation_config.pass_config.a_new_pass",
        "kv_transfer_config.kv_connector_extra_config.backend",
        "scheduler_cls",
        "hf_overrides.rope_theta",
    ],
)
def test_an_option_nobody_knows_changes_the_key(path: str, family: Family) -> None:
    changed = with_option(path, "set")
    assert recipe(changed, family) != recipe(BASE, family)
    check_changes_key_or_is_removed(changed, path, family)


# What they say of a recipe is in it: how many KV blocks there are, and the shape.
NOT_KEYED = {"kv_blocks", "symbolic_kv_blocks", "symbolic_shapes", "unresolved"}
IDENTITY_CHANGES: dict[str, Any] = {
    "name": "another",
    "route": "jit",
    "target": "t2",
    "engine": "vllm",
    "versions": {"compiler": "1.1"},
    "flags": ("-O3",),
    "source_digest": "1" * 64,
    "environment": {"KEYED": "2"},
}


def test_every_part_of_a_toolchains_identity_changes_the_key() -> None:
    fields = {field.name for field in dataclasses.fields(ToolchainIdentity)}
    assert fields == IDENTITY_CHANGES.keys() | NOT_KEYED
    config = build(BASE)
    keys = {
        recipe_key(family_recipe(config, Family.TARGET, identity, num_kv_blocks=None))
        for identity in (
            IDENTITY,
            *(replace(IDENTITY, **{name: value}) for name, value in IDENTITY_CHANGES.items()),
        )
    }
    assert len(keys) == 1 + len(IDENTITY_CHANGES)


def test_rank_scope_and_pool_size_are_ingredients() -> None:
    def key(**parts: Any) -> str:
        arguments: dict[str, Any] = {"num_kv_blocks": None, **parts}
        return recipe_key(family_recipe(build(BASE), Family.TARGET, IDENTITY, **arguments))

    keys = [key(), key(rank_scope="dp0"), key(num_kv_blocks=100), key(num_kv_blocks=101)]
    assert len(set(keys)) == 4


def test_every_part_of_a_shape_is_an_ingredient() -> None:
    shape = DecodeShape(Family.TARGET, 1, 1, 1024)
    others = [
        DecodeShape(Family.TARGET_WITHOUT_SPEC, 1, 1, 1024),
        DecodeShape(Family.TARGET, 2, 1, 1024),
        DecodeShape(Family.TARGET, 1, 2, 1024),
        DecodeShape(Family.TARGET, 1, 1, 2048),
        DecodeShape(Family.TARGET, 1, 1, 1024, context_bucketed=False),
    ]
    shared = recipe(BASE, Family.TARGET)
    assert len({recipe_key(unit_recipe(shared, one)) for one in (shape, *others)}) == 6


@pytest.mark.parametrize("name", [name for name in MODEL if name != "torch_dtype"])
def test_every_key_of_a_models_config_changes_the_key(name: str) -> None:
    value = MODEL[name]
    changed = model_config(
        "model",
        {
            **MODEL,
            name: other_value(value, type(value)) if not isinstance(value, list) else ["Other"],
        },
    )
    config = build(BASE)
    for family in Family:
        key = recipe_key(family_recipe(config, family, IDENTITY, num_kv_blocks=None))
        other = family_recipe(replace(config, model=changed), family, IDENTITY, num_kv_blocks=None)
        assert recipe_key(other) != key


def test_a_graph_is_looked_up_by_digest_platform_and_options() -> None:
    digest, options = "a" * 64, {"flags": ["-O2"]}
    platform = IDENTITY.platform
    keys = {
        recipe_key(recipe)
        for recipe in (
            graph_recipe(digest, platform, options),
            graph_recipe("b" * 64, platform, options),
            graph_recipe(digest, replace(IDENTITY, target="t2").platform, options),
            graph_recipe(digest, replace(IDENTITY, versions={"compiler": "2"}).platform, options),
            graph_recipe(digest, replace(IDENTITY, route="jit").platform, options),
            graph_recipe(digest, replace(IDENTITY, name="another").platform, options),
            graph_recipe(digest, platform, {"flags": ["-O3"]}),
            graph_recipe(digest, platform, {"flags": ["-O2", "-g"]}),
        )
    }
    assert len(keys) == 8


# What a user can write for each field, so that the whole way from file to key is walked too.
WRITTEN: dict[str, Any] = {
    "model": "elsewhere/model",
    "dtype": "float16",
    "max_model_len": 8192,
    "max_num_seqs": 16,
    "block_size": 64,
    "max_num_batched_tokens": 1024,
    "tensor_parallel_size": 4,
    "pipeline_parallel_size": 2,
    "data_parallel_size": 2,
    "decode_context_parallel_size": 4,
    "cp_kv_cache_interleave_size": 2,
    "enable_expert_parallel": True,
    "quantization": "fp8",
    "kv_cache_dtype": "fp8",
    "num_gpu_blocks_override": 999,
    "gpu_memory_utilization": 0.5,
    "enable_prefix_caching": False,
    "kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_consumer"},
    "compilation_config": {"mode": 2},
    "additional_config.neuron_config.num_seqs_buckets": [1, 3, 4],
    "additional_config.neuron_config.decode_context_length_buckets": [512, 1024, 2048],
    "additional_config.neuron_config.num_batched_tokens_buckets": [128, 4096],
    "additional_config.neuron_config.kv_segment_size_buckets": [512],
    "additional_config.neuron_config.verify_query_len_buckets": [3, 6],
    "speculative_config.model": "elsewhere/draft",
    "speculative_config.max_model_len": 2048,
    "speculative_config.draft_tensor_parallel_size": 1,
}
NOT_TO_BE_WRITTEN = {
    "speculative_config.method",  # only one is accepted
    "speculative_config.num_speculative_tokens",  # decides which shapes there are: see test_key_changes
}


def test_the_written_walk_is_complete() -> None:
    assert WRITTEN.keys() | NOT_TO_BE_WRITTEN == LEAVES.keys()


@pytest.mark.parametrize("path", WRITTEN)
def test_every_field_as_written_changes_the_key_or_has_a_reason(
    workspace: Workspace, path: str
) -> None:
    needs_draft = path.startswith("speculative_config") or "verify" in path
    bases = (
        [{"speculative_config": EAGLE3}] if needs_draft else [{}, {"speculative_config": EAGLE3}]
    )
    for base in bases:
        before = workspace.keys(base)
        plan = workspace.plan(merged(base, nested(path, WRITTEN[path])))
        after = {unit.shape: unit.key for unit in plan.units if unit.key is not None}
        for family in plan.bucketer.families:
            outcome = set(kept(before, after, family))
            assert len(outcome) == 1, f"{family}: {outcome}"
            reasons = dict(removed_options(plan.config.serve, family))
            assert (path in reasons) == (outcome == {True}), f"{family}: {reasons}"
