"""Plans with speculation: how many units by toolchain, and which models may not speculate at all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toolchain_samples import DRAFT_ARCHITECTURE, TINY_ARCHITECTURE, speculative_build, tiny_build

from neffbuild.cache.directory import DirectoryStore
from neffbuild.cache.plan import Plan
from neffbuild.cache.recipe import ToolchainIdentity
from neffbuild.config.build import BuildConfig
from neffbuild.config.errors import ToolchainRefusal
from neffbuild.config.model import ModelConfig
from neffbuild.config.serve import AdditionalConfig, NeuronConfig, SpeculativeConfig
from neffbuild.grid.bucketer import QueryLenSupport
from neffbuild.toolchain.base import KEPT_BY_POSITION, Capabilities, KVGroup, Toolchain
from neffbuild.toolchain.inductor import InductorToolchain
from neffbuild.toolchain.kv_groups import kv_groups
from neffbuild.toolchain.planning import plan_config, plan_with

UNIFORM, VARLEN = QueryLenSupport.UNIFORM, QueryLenSupport.VARLEN


@dataclass
class Planner:
    """As much of a toolchain as planning asks for; its engine warms up every shape it lists."""

    capabilities: Capabilities
    name: str = "planner"

    def identity(self, config: BuildConfig) -> ToolchainIdentity:
        return ToolchainIdentity(self.name, "r", "t", "some engine", {"cc": "1"}, (), "0" * 64)


def planner(
    support: QueryLenSupport, rolled_back: frozenset[KVGroup] = KEPT_BY_POSITION
) -> Toolchain:
    return Planner(Capabilities(support, frozenset(KVGroup), rolled_back))


def plan(toolchain: Toolchain, config: BuildConfig) -> Plan:
    return plan_with(config, toolchain, lambda keys: {})


def with_lists(config: BuildConfig, **lists: tuple[int, ...] | None) -> BuildConfig:
    additional = AdditionalConfig(neuron_config=NeuronConfig(**lists))
    serve = {"additional_config": additional, "max_num_seqs": lists["num_seqs_buckets"][-1]}
    return replace(config, serve=config.serve.model_copy(update=serve))


def speculative(spec_tokens: int, **lists: tuple[int, ...] | None) -> BuildConfig:
    config = speculative_build([0, 1])
    eagle3 = SpeculativeConfig(method="eagle3", model="draft", num_speculative_tokens=spec_tokens)
    serve = config.serve.model_copy(update={"speculative_config": eagle3})
    return with_lists(replace(config, serve=serve), **lists)


LADDERS = st.sets(st.integers(1, 8), min_size=1, max_size=4).map(lambda s: tuple(sorted(s)))
CONTEXTS = st.sets(st.sampled_from(range(16, 255, 16)), max_size=4).map(
    lambda s: tuple(sorted(s)) or None
)


@given(LADDERS, CONTEXTS, st.integers(1, 7), st.data())
def test_how_many_units_a_config_has(num_seqs, contexts, spec_tokens, data):
    """|num_seqs| × (|ctx| + 1), three times that with EAGLE3, (2 |Q| + 1) times where programs are
    uniform; |ctx| is 0 without context buckets."""
    inner = data.draw(st.sets(st.integers(2, 1 + spec_tokens)))
    widths = tuple(sorted(inner | {1 + spec_tokens}))
    lists = {"num_seqs_buckets": num_seqs, "decode_context_length_buckets": contexts}
    shapes = len(num_seqs) * (len(contexts or ()) + 1)
    without = with_lists(tiny_build(), **lists)
    for support in (UNIFORM, VARLEN):
        assert plan(planner(support), without).counts["by_family"] == {"target": shapes}
    config = speculative(spec_tokens, **lists, verify_query_len_buckets=widths)
    for support, ladder in ((VARLEN, 1), (UNIFORM, len(widths))):
        assert plan(planner(support), config).counts["by_family"] == {
            "target-with-spec": shapes * ladder,
            "target-without-spec": shapes,
            "draft": shapes * ladder,
        }
    one_width = speculative(spec_tokens, **lists)
    assert plan(planner(UNIFORM), one_width).counts["units"] == 3 * shapes


def test_widths_are_exact():
    lists = {"num_seqs_buckets": (1, 6), "decode_context_length_buckets": None}
    config = speculative(6, **lists, verify_query_len_buckets=(3, 7))
    units = plan(planner(UNIFORM), config).units
    assert {unit.shape.num_tokens for unit in units} == {1, 3, 6, 7, 18, 42}


RECURRENT = {
    "Mamba": {"state_size": 16, "num_attention_heads": None},
    "Jamba": {"mamba_d_state": 16, "attn_layer_period": 8},
    "Bamba": {"layers_block_type": ["mamba", "attention"], "mamba_d_state": 128},
    "Qwen3-Next": {"layer_types": ["linear_attention", "full_attention"]},
    "LFM2": {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3},
    "RecurrentGemma": {"block_types": ["recurrent", "recurrent", "attention"]},
    "MiniMax": {"attn_type_list": [0, 0, 0, 1]},
    "Nemotron-H": {"hybrid_override_pattern": "M-M*-", "ssm_state_size": 128},
    "inside a multimodal model": {"text_config": {"mamba_d_state": 16, "num_attention_heads": 4}},
}


@pytest.mark.parametrize("fields", RECURRENT.values(), ids=RECURRENT)
@pytest.mark.parametrize("support", QueryLenSupport)
def test_speculation_over_state_that_cannot_be_rolled_back_is_refused(fields, support):
    lists = {"num_seqs_buckets": (1, 2), "decode_context_length_buckets": (64,)}
    hybrid = ModelConfig("hybrid", TINY_ARCHITECTURE | fields)
    as_target = replace(speculative(3, **lists), model=hybrid)
    as_draft = replace(speculative(3, **lists), draft_model=hybrid)
    for config, field in ((as_target, "serve.model"), (as_draft, "serve.speculative_config.model")):
        with pytest.raises(ToolchainRefusal, match="hybrid keeps recurrent state") as refused:
            plan(planner(support), config)
        assert refused.value.field == field
        assert "without speculative_config" in refused.value.hint
        able = planner(support, KEPT_BY_POSITION | {KVGroup.RECURRENT})
        assert plan(able, config).counts["units"] == 12
    plain = replace(with_lists(tiny_build(), **lists), model=hybrid)
    assert plan(planner(support), plain).counts["units"] == 4


def test_the_inductor_toolchain_says_that_it_cannot(tmp_path: Path):
    config = speculative_build([0, 1])
    hybrid = ModelConfig("hybrid", TINY_ARCHITECTURE | {"mamba_d_state": 16})
    store = DirectoryStore(tmp_path)
    with pytest.raises(ToolchainRefusal, match="toolchain inductor cannot roll back"):
        plan_config(replace(config, model=hybrid), InductorToolchain(), store)
    assert plan_config(config, InductorToolchain(), store).units


BY_POSITION = {
    "full": ({}, {KVGroup.FULL}),
    "sliding": ({"sliding_window": 4096}, {KVGroup.SLIDING_WINDOW}),
    "sliding and full": (
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4096},
        {KVGroup.SLIDING_WINDOW, KVGroup.FULL},
    ),
    "MLA": ({"kv_lora_rank": 512}, {KVGroup.MLA}),
    "MLA beside linear attention": (
        {"kv_lora_rank": 512, "linear_attn_config": {"head_dim": 128}},
        {KVGroup.MLA, KVGroup.RECURRENT},
    ),
    "MiniMax without linear layers": ({"attn_type_list": [1, 1]}, {KVGroup.FULL}),
}


@pytest.mark.parametrize(("fields", "groups"), BY_POSITION.values(), ids=BY_POSITION)
def test_kinds_of_state_are_told_from_the_config(fields, groups):
    assert kv_groups(ModelConfig("m", TINY_ARCHITECTURE | fields)) == groups


def test_a_published_draft_keeps_its_state_by_position():
    assert kv_groups(ModelConfig("draft", DRAFT_ARCHITECTURE)) <= KEPT_BY_POSITION
