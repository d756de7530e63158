"""Plans for an engine with prefill programs and replica groups: phases, rank scopes, notes, refusals."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toolchain_samples import speculative_build, tiny_build

from neffbuild.cache.directory import DirectoryStore
from neffbuild.cache.plan import Plan, store_plan_manifest
from neffbuild.cache.recipe import ToolchainIdentity
from neffbuild.cli.selection import Selection, part_of
from neffbuild.config.build import BuildConfig, ToolchainConfig
from neffbuild.config.errors import ConfigError, MissingUnit
from neffbuild.config.neuron_engine import neuron_prefill
from neffbuild.config.serve import AdditionalConfig, NeuronConfig, ServeConfig
from neffbuild.farm.shards import Shard
from neffbuild.grid.bucketer import QueryLenSupport
from neffbuild.runtime.loader import Loader
from neffbuild.toolchain.base import Capabilities, KVGroup, Unit
from neffbuild.toolchain.planning import plan_with, require_buckets

CAPABILITIES = Capabilities(
    QueryLenSupport.UNIFORM, frozenset(KVGroup), prefill=neuron_prefill, replica_groups=True
)


@dataclass
class Planner:
    """As much of a toolchain as planning asks for."""

    engine: str = "vllm-neuron"
    name: str = "planner"
    kv_blocks: int | None = None
    capabilities: Capabilities = CAPABILITIES

    def identity(self, config: BuildConfig) -> ToolchainIdentity:
        return ToolchainIdentity(
            self.name, "r", "t", self.engine, {"cc": "1"}, (), "0" * 64, kv_blocks=self.kv_blocks
        )


def configured(
    base: BuildConfig, phases: str | None = None, neuron: dict[str, Any] | None = None, **serve: Any
) -> BuildConfig:
    """`base` with three batch buckets, one context bucket and prompts in one step of up to 256 tokens."""
    lists = {"num_seqs_buckets": (1, 2, 4), "decode_context_length_buckets": (128,)}
    options = {
        "max_model_len": 256,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 256,
        "enable_prefix_caching": False,
        "additional_config": AdditionalConfig(
            neuron_config=NeuronConfig(**lists, **(neuron or {}))
        ),
    }
    return replace(
        base,
        serve=base.serve.model_copy(update=options | serve),
        toolchain=ToolchainConfig(name="planner", phases=phases),
    )


def plan(config: BuildConfig, toolchain: Planner | None = None) -> Plan:
    return plan_with(config, toolchain or Planner(), lambda keys: {})


@pytest.mark.parametrize(
    ("role", "phases", "families"),
    [
        (None, None, {"target": 6, "prefill": 2}),
        ("kv_both", None, {"target": 6, "prefill": 2}),
        ("kv_consumer", None, {"target": 6}),
        ("kv_producer", None, {"prefill": 2}),
        ("kv_consumer", "both", {"target": 6, "prefill": 2}),
        (None, "decode", {"target": 6}),
    ],
)
def test_units_by_role(role: str | None, phases: str | None, families: dict[str, int]) -> None:
    transfer = {"kv_connector": "NixlConnector", "kv_role": role} if role else None
    planned = plan(configured(tiny_build(), phases, kv_transfer_config=transfer))
    assert planned.counts["by_family"] == families
    assert planned.counts["by_rank_scope"] == {"all": sum(families.values())}


def test_a_draft_prefills_what_its_target_does() -> None:
    config = configured(speculative_build([0, 1]), neuron={"on_device_sampling_config": {}})
    assert plan(config).counts["by_family"] == {
        "target-with-spec": 6,
        "target-without-spec": 6,
        "draft": 6,
        "prefill": 2,
        "draft-prefill": 2,
    }


@given(st.integers(1, 5), st.integers(1, 3), st.booleans(), st.sampled_from([None, "kv_consumer"]))
def test_units_are_counted_by_rank_scope(
    replicas: int, context_buckets: int, experts: bool, role: str | None
) -> None:
    """|num_seqs| × (|ctx| + 1) in each rank scope, and as many prefill units as one scope has."""
    contexts = (128, 256, 384)[:context_buckets]
    config = configured(
        tiny_build(),
        data_parallel_size=replicas,
        enable_expert_parallel=experts,
        max_model_len=512,
        max_num_batched_tokens=512,
        kv_transfer_config={"kv_role": role} if role else None,
    )
    lists = NeuronConfig(num_seqs_buckets=(1, 2, 4), decode_context_length_buckets=contexts)
    additional = AdditionalConfig(neuron_config=lists)
    config = replace(
        config, serve=config.serve.model_copy(update={"additional_config": additional})
    )
    planned = plan(config)
    each = 3 * (context_buckets + 1) + (0 if role else 3)
    scopes = (
        [f"dp{replica}" for replica in range(replicas)] if experts and replicas > 1 else ["all"]
    )
    assert planned.counts["by_rank_scope"] == dict.fromkeys(scopes, each)
    assert planned.counts["units"] == each * len(scopes)
    names = [unit.bucket_name for unit in planned.units]
    keys = [unit.key for unit in planned.units]
    assert len(set(names)) == len(names) == len(set(keys))


def scoped() -> Plan:
    return plan(configured(tiny_build(), data_parallel_size=2, enable_expert_parallel=True))


def test_a_units_name_is_one_everywhere() -> None:
    planned = scoped()
    assert [unit.bucket_name for unit in planned.units[:3]] == [
        "decode_b1_ctx128@dp0",
        "decode_b1_ctx128@dp1",
        "decode_b1_ctx256@dp0",
    ]
    for unit in planned.units:
        assert unit.recipe is not None
        assert unit.key is not None
        assert unit.recipe["rank_scope"] == unit.rank_scope
        assert (
            Unit(planned.config, unit.shape, unit.recipe, unit.key).bucket_name == unit.bucket_name
        )


def test_a_manifest_keeps_rank_scopes(tmp_path) -> None:
    planned = scoped()
    manifest = store_plan_manifest(planned, DirectoryStore(tmp_path))
    assert [unit.bucket_name for unit in manifest.units] == [
        unit.bucket_name for unit in planned.units
    ]
    assert type(manifest).from_json(manifest.to_json()) == manifest
    # Nothing is stored: each state lacks its program once, however many ranks there are.
    shapes = {unit.shape.bucket_name for unit in planned.units if "decode" in unit.bucket_name}
    uncovered = [state["reason"] for state in manifest.coverage["uncovered_states"]]
    assert sorted(uncovered) == sorted(f"{name} is missing" for name in shapes)


@given(st.integers(1, 9))
def test_shards_share_out_units_of_every_rank(count: int) -> None:
    planned = scoped()
    parts = [
        part_of(planned, Selection(None, Shard(index, count), None, False, False), lambda _: 1.0)
        for index in range(1, count + 1)
    ]
    names = [name for part in parts for name in part.names]
    assert sorted(names) == sorted(unit.bucket_name for unit in planned.units)
    assert {part.of_units for part in parts} == {len(planned.units)}


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("decode_b1_ctx128", ["decode_b1_ctx128@dp0", "decode_b1_ctx128@dp1"]),
        ("decode_b1_*@dp1", ["decode_b1_ctx128@dp1", "decode_b1_ctx256@dp1"]),
        ("prefill_s256@dp0", ["prefill_s256@dp0"]),
    ],
)
def test_a_pattern_matches_with_and_without_the_rank_scope(pattern: str, names: list[str]) -> None:
    part = part_of(scoped(), Selection(pattern, None, None, False, False), lambda _: 1.0)
    assert sorted(part.names) == names


def test_a_rank_loads_its_own_programs(tmp_path) -> None:
    planned, store = scoped(), DirectoryStore(tmp_path)
    manifest = store_plan_manifest(planned, store)
    first, second = planned.units[:2]
    for unit in (first, second):
        loader = Loader(manifest, store, Planner(), rank_scope=unit.rank_scope)
        with pytest.raises(MissingUnit, match=f"key {unit.key}"):
            loader.load(unit.shape)
    with pytest.raises(MissingUnit, match="is not in"):
        Loader(manifest, store, Planner()).load(first.shape)


def test_our_own_engine_has_decode_programs_of_one_rank() -> None:
    config = configured(tiny_build(), data_parallel_size=2, enable_expert_parallel=True)
    planned = plan(config, Planner(engine="reference"))
    assert planned.counts["by_family"] == {"target": 6}
    assert planned.counts["by_rank_scope"] == {"all": 6}


def test_what_the_engine_refuses_is_no_plan() -> None:
    with pytest.raises(ConfigError, match="enable_prefix_caching is true") as refused:
        plan(configured(tiny_build(), enable_prefix_caching=True))
    assert refused.value.exit_status == 2
    # Other engines take it.
    plan(configured(tiny_build(), enable_prefix_caching=True), Planner(engine="reference"))


@given(
    st.dictionaries(
        st.sampled_from(["ep_degree", "attention_dp_size", "on_device_sampling_config", "other"]),
        st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.lists(st.integers()),
    ),
    st.dictionaries(
        st.sampled_from(["encoder_neuron_config", "vision_neuron_config", "mm_language_model_only"]),
        st.none() | st.booleans() | st.text(max_size=4) | st.dictionaries(
            st.just("num_vision_tokens_buckets"), st.none() | st.integers() | st.lists(st.integers())
        ),
    ),
    st.dictionaries(
        st.sampled_from(["async_scheduling", "mm_encoder_only", "kv_cache_memory_bytes"]),
        st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    ),
)  # fmt: skip
def test_whatever_an_option_holds_there_is_a_plan_or_a_refusal(neuron, additional, others) -> None:
    config = configured(tiny_build(), data_parallel_size=2)
    lists = config.serve.neuron_config.model_dump(exclude_none=True)
    serve = ServeConfig(
        **{
            **config.serve.model_dump(),
            "additional_config": {"neuron_config": {**lists, **neuron}, **additional},
            **others,
        }
    )
    with contextlib.suppress(ConfigError):
        plan(replace(config, serve=serve))


def test_what_the_engine_settles_is_noted() -> None:
    planned = plan(configured(speculative_build([0, 1])))
    assert any("on_device_sampling_config is not set" in note for note in planned.config.notes)
    assert plan(configured(tiny_build())).config.notes == ()


def test_a_pool_of_the_formula_is_keyed_and_noted() -> None:
    computed = plan(configured(tiny_build()), Planner(kv_blocks=321))
    assert {unit.recipe["num_kv_blocks"] for unit in computed.units if unit.recipe} == {321}
    (note,) = computed.config.notes
    assert note.startswith("the KV pool of 321 blocks follows from the engine's published formula")
    pinned = plan(configured(tiny_build(), num_gpu_blocks_override=321))
    assert [unit.key for unit in pinned.units] == [unit.key for unit in computed.units]


def test_a_worker_that_only_prefills_has_no_steps_to_replay() -> None:
    require_buckets(configured(tiny_build()), Planner())
    producer = configured(tiny_build(), kv_transfer_config={"kv_role": "kv_producer"})
    with pytest.raises(ConfigError, match="no decode steps to replay: the worker only prefills"):
        require_buckets(producer, Planner())
