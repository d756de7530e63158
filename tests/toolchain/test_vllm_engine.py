"""Engine vllm as far as it goes without vLLM: plans, keys, refusals, and names in graphs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from dynamo_samples import dynamo_graph
from toolchain_samples import speculative_build, tiny_build
from torch._library.opaque_object import register_opaque_type
from torch._opaque_base import OpaqueBase

from neffbuild.cache.plan import Status
from neffbuild.cache.recipe import difference
from neffbuild.config.errors import ConfigError, IntegrityError, ToolchainRefusal
from neffbuild.grid.shapes import Family, SymbolicShape, shape_from_document
from neffbuild.toolchain.graph_digest import graph_digest, nameless_digest
from neffbuild.toolchain.inductor import cpu_level, engines, identity, opaque
from neffbuild.toolchain.inductor.binding import Binding, BindingFile, Requirements
from neffbuild.toolchain.inductor.capture import capture_graph, plain_graph
from neffbuild.toolchain.inductor.engines import graph_engine, host_kernels
from neffbuild.toolchain.inductor.fit import host_fit
from neffbuild.toolchain.inductor.identity import inductor_identity
from neffbuild.toolchain.inductor.vllm_engine import warm_up_options
from neffbuild.toolchain.planning import plan_with, require_buckets
from neffbuild.toolchain.registry import load_toolchain

TOOLCHAIN = load_toolchain("inductor")
VERSIONS = {"torch": "2.13.0", "g++": "12.2.0", "vllm": "0.32.0"}
V4 = cpu_level.LEVELS["x86-64-v4"].features


def build(**changes):
    return tiny_build(**{"engine": "vllm", "versions": VERSIONS} | changes)


@pytest.fixture
def host(monkeypatch):
    """Make this host one with other CPU features."""

    def change(features):
        monkeypatch.setattr(engines, "host_features", lambda: frozenset(features))

    return change


def test_one_program_is_planned_for_every_step():
    plan = plan_with(build(serve={"max_num_seqs": 64}), TOOLCHAIN, lambda keys: {})
    [unit] = plan.units
    assert (unit.bucket_name, unit.status) == ("step_any", Status.MISSING)
    assert unit.shape == SymbolicShape(Family.TARGET)
    assert shape_from_document(unit.shape.document()) == unit.shape
    assert plan.counts["by_family"] == {"target": 1}


CHANGES = {
    "toolchain.versions.vllm": {"versions": VERSIONS | {"vllm": "0.33.0"}},
    "toolchain.versions.torch": {"versions": VERSIONS | {"torch": "2.14.0"}},
    "toolchain.target": {"target": "x86-64-v3+amx"},
    "serve.dtype": {"serve": {"dtype": "bfloat16"}},
    "serve.tensor_parallel_size": {"serve": {"tensor_parallel_size": 2}},
    "model.architectures": {"architecture": {"architectures": ["MistralForCausalLM"]}},
}


@pytest.mark.parametrize(("ingredient", "change"), CHANGES.items(), ids=CHANGES)
def test_what_another_program_would_need_is_an_ingredient(ingredient, change):
    before = {"target": "x86-64-v3+avx512"}
    mine, theirs = (
        plan_with(config, TOOLCHAIN, lambda keys: {}).units[0]
        for config in (build(**before), build(**before | change))
    )
    assert mine.key != theirs.key
    assert [path for path, _, _ in difference(mine.recipe, theirs.recipe)] == [ingredient]


def test_sizes_of_batches_are_no_ingredient():
    sizes = {"max_num_seqs": 32, "max_num_batched_tokens": 8192, "num_gpu_blocks_override": 99}
    mine, theirs = (
        plan_with(config, TOOLCHAIN, lambda keys: {}).units[0]
        for config in (build(), build(serve=sizes))
    )
    assert mine.key == theirs.key


def test_variables_of_vllm_are_ingredients_but_for_those_that_no_graph_sees(monkeypatch):
    for name in identity.os.environ:
        if name.startswith("VLLM_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/somewhere")
    monkeypatch.setenv("VLLM_USE_LAYERNAME", "0")
    assert inductor_identity(build()).environment == {"VLLM_USE_LAYERNAME": "0"}
    assert inductor_identity(tiny_build()).environment == {}


KERNELS = {
    "avx2": cpu_level.LEVELS["x86-64-v3"].features,
    "avx512": V4,
    "avx512-bf16": V4 | {"avx512_bf16"},
    "amx": V4 | {"avx512_bf16", "amx_tile", "amx_bf16"},
    "amx-fp16": V4 | {"avx512_bf16", "amx_tile", "amx_fp16"},
}


@pytest.mark.parametrize(("kernels", "features"), KERNELS.items(), ids=KERNELS)
def test_the_kernels_vllm_picks_are_part_of_the_target(host, kernels, features):
    host(features)
    assert host_kernels() == kernels
    assert inductor_identity(build()).target == f"x86-64-v3+{kernels}"
    assert inductor_identity(build(target="x86-64-v3+avx512")).target == "x86-64-v3+avx512"
    assert inductor_identity(tiny_build()).target == "x86-64-v3"


def test_a_plan_for_other_kernels_is_refused_where_it_would_be_compiled(host, monkeypatch):
    monkeypatch.setattr(identity, "installed_versions", lambda: VERSIONS)
    host(KERNELS["avx512"])
    assert TOOLCHAIN.host_refusal(build()) is None
    refusal = TOOLCHAIN.host_refusal(build(target="x86-64-v3+amx"))
    assert refusal == "the plan is for vLLM's amx kernels, on this host it picks avx512"
    platform = inductor_identity(build(target="x86-64-v3+amx")).platform
    monkeypatch.setattr("neffbuild.toolchain.inductor.fit.serving_versions", lambda: VERSIONS)
    assert "avx512 kernels" in str(host_fit(platform).refusal)
    host(KERNELS["amx"])
    assert host_fit(platform).refusal is None
    newer = platform | {"versions": VERSIONS | {"vllm": "0.33.0"}}
    assert host_fit(newer).refusal == "vLLM 0.32.0 is installed here"


def test_unknown_kernels_are_refused_with_those_there_are():
    with pytest.raises(ConfigError, match="amx-fp16, amx, avx512-bf16, avx512, avx2"):
        inductor_identity(build(target="x86-64-v3+neon"))


def test_vllm_that_is_neither_installed_nor_pinned_leaves_units_unresolved(monkeypatch):
    monkeypatch.setattr(identity, "installed_versions", lambda: VERSIONS | {"vllm": "0.32.0"})
    assert inductor_identity(build(versions={})).unresolved == ()
    without = {"torch": "2.13.0", "g++": "12.2.0"}
    monkeypatch.setattr(identity, "installed_versions", lambda: without)
    [unresolved] = inductor_identity(build(versions={})).unresolved
    assert "toolchain.versions.vllm" in unresolved


REFUSED = {
    "tensor_parallel_size is 2": {"serve": {"tensor_parallel_size": 2}},
    "with enforce_eager": {"serve": {"enforce_eager": True}},
    "with enable_lora": {"serve": {"enable_lora": True}},
    "compilation_config.backend is 'inductor'": {
        "serve": {"compilation_config": {"backend": "inductor"}}
    },
    "compilation_config.mode is 3": {"serve": {"compilation_config": {"mode": 3}}},
    "unset toolchain.flags": {"flags": ("cpp.enable_unsafe_math_opt_flag=true",)},
}


@pytest.mark.parametrize(("reason", "change"), REFUSED.items(), ids=REFUSED)
def test_what_vllm_would_not_ask_us_for_is_refused(reason, change):
    assert reason in TOOLCHAIN.refusal(build(**change))


def test_what_the_reference_model_cannot_do_is_vllms_business():
    config = build(
        serve={"quantization": "fp8", "dtype": "float16"},
        architecture={"architectures": ["T5Model"]},
    )
    assert TOOLCHAIN.refusal(config, SymbolicShape(Family.TARGET)) is None
    drafting = speculative_build([0, 1])
    drafting = replace(drafting, toolchain=build().toolchain)
    assert "unset speculative_config" in TOOLCHAIN.refusal(drafting)


def test_steps_of_an_engine_without_buckets_are_not_replayed():
    require_buckets(tiny_build(), TOOLCHAIN)
    with pytest.raises(ToolchainRefusal, match="no buckets to replay"):
        require_buckets(build(), TOOLCHAIN)


def test_the_warm_up_gets_what_a_graph_can_see_and_no_more():
    serve = {
        "port": 8000,
        "served_model_name": "llama",
        "tokenizer": "elsewhere",
        "max_num_seqs": 4,
        "compilation_config": {"custom_ops": ["none"]},
        "an_option_nobody_knows": 7,
    }
    options = warm_up_options(build(serve=serve))
    assert options["compilation_config"] == {
        "custom_ops": ["none"],
        "mode": 2,
        "backend": "neffbuild",
    }
    assert (options["max_num_seqs"], options["an_option_nobody_knows"]) == (4, 7)
    assert (options["load_format"], options["skip_tokenizer_init"]) == ("dummy", True)
    assert (
        not {"port", "served_model_name", "tokenizer", "model", "additional_config"}
        & options.keys()
    )


def test_a_graphs_engine_is_the_owner_of_the_ops_it_calls():
    assert graph_engine([torch.add, torch.ops.aten.mul.Tensor]) == "reference"
    assert graph_engine([torch.add, "vllm.unified_attention_with_output"]) == "vllm"


class Name(OpaqueBase):
    """As vLLM's `LayerName`: a text that torch takes for an opaque value."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return isinstance(other, Name) and self.value == other.value

    def __hash__(self):
        return hash(self.value)

    def __fx_repr__(self):
        return f"Name({self.value!r})", {"Name": Name}


register_opaque_type(Name, typ="value", hoist=True)


@torch.library.custom_op("neffbuild_named::scale", mutates_args=())
def scale(x: torch.Tensor, layer: Name) -> torch.Tensor:
    return x * len(layer.value)


@scale.register_fake
def _(x, layer):
    return torch.empty_like(x)


def graph(name):
    torch._dynamo.reset()
    layer = Name(name)
    return dynamo_graph(lambda x: scale(x, layer) + 1, torch.ones(3))


@pytest.fixture
def known_names(monkeypatch):
    monkeypatch.setattr(opaque, "_NAME_TYPES", frozenset({f"{__name__}.Name"}))
    opaque._named.cache_clear()
    yield
    opaque._named.cache_clear()


def test_names_are_written_into_the_program(known_names):
    module, inputs = graph("layers.0.attn")
    assert len(inputs) == 2
    plain, kept, names = plain_graph(module)
    assert names == ("layers.0.attn",)
    [x] = [inputs[index] for index in kept]
    torch.testing.assert_close(plain(x)[0], torch.full((3,), 14.0))
    captured = capture_graph(module, inputs).graph
    assert captured.twins == ("neffbuild_named__scale",)
    assert len(module.graph.find_nodes(op="placeholder")) == 2, "Dynamo's own graph is untouched"


def test_graphs_that_differ_in_names_alone_can_be_told_apart_and_together(known_names):
    one, other = (graph(name)[0] for name in ("layers.0.attn", "renamed.0.attn"))
    assert graph_digest(one) != graph_digest(other)
    assert nameless_digest(one) == nameless_digest(other)
    assert graph_digest(one) == graph_digest(graph("layers.0.attn")[0])


def test_a_name_that_nothing_uses_does_not_matter(known_names):
    unused = []
    for name in ("layers.0.attn", "renamed.0.attn"):
        module, _ = graph(name)
        [call] = [node for node in module.graph.nodes if "scale" in str(node.target)]
        call.replace_all_uses_with(call.args[0])
        module.graph.erase_node(call)
        unused.append(module)
    assert graph_digest(unused[0]) == graph_digest(unused[1])
    assert plain_graph(unused[0])[2] == ()


def test_an_object_that_is_no_name_is_refused():
    module, inputs = graph("layers.0.attn")
    with pytest.raises(ToolchainRefusal, match="takes a FakeScriptObject"):
        capture_graph(module, inputs)


def test_a_program_whose_ops_are_not_here_is_refused():
    with pytest.raises(ToolchainRefusal, match="vllm::unified_attention_with_output"):
        opaque.register_twins(["vllm__unified_attention_with_output"])


def test_twins_are_in_the_binding_and_bindings_without_any_are_read():
    file = BindingFile(Binding((), ()), Requirements("2.13.0", frozenset(), ("vllm__op",)))
    assert BindingFile.from_json(file.to_json()) == file
    document = json.loads(file.to_json())
    del document["requires"]["twins"]
    assert BindingFile.from_json(json.dumps(document).encode()).requires.twins == ()
    document["requires"]["twins"] = [7]
    with pytest.raises(IntegrityError, match="malformed"):
        BindingFile.from_json(json.dumps(document).encode())


def test_doctor_says_which_kernels_vllm_picks(host, monkeypatch):
    host(KERNELS["avx512-bf16"])
    found = {"torch": "2.13.0", "vllm": "0.32.0+cpu"}
    monkeypatch.setattr("neffbuild.toolchain.inductor.findings.installed_versions", lambda: found)
    [finding] = [finding for finding in TOOLCHAIN.findings() if finding.subject == "vllm"]
    assert finding.detail == "0.32.0+cpu, picks its avx512-bf16 kernels"
