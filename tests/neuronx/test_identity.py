"""Recipes of the neuronx toolchain: what is in them, from wherever it was said, and what contradicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from neuron_project import BLOCKS, NATIVE, REFERENCE, XLA

from neffbuild.cache.recipe import ToolchainIdentity
from neffbuild.config.build import BuildConfig, ToolchainConfig
from neffbuild.config.errors import ConfigError
from neffbuild.config.model import ModelConfig
from neffbuild.config.serve import ServeConfig
from neffbuild.toolchain.neuronx.command import compile_command, stated_flags
from neffbuild.toolchain.neuronx.identity import identity_in
from neffbuild.toolchain.neuronx.routes import route_of


def config(toolchain: Mapping[str, Any], **serve: Any) -> BuildConfig:
    options = {"num_gpu_blocks_override": BLOCKS, **serve}
    section = {**toolchain, "flags": tuple(toolchain.get("flags", ()))}
    return BuildConfig(
        "tests",
        ServeConfig(model="none", max_model_len=4096, max_num_seqs=4, block_size=32, **options),
        ModelConfig("none", {"model_type": "none"}),
        toolchain=ToolchainConfig(**section),
    )


def identity(
    toolchain: Mapping[str, Any], environment: Mapping[str, str] | None = None, **serve: Any
) -> ToolchainIdentity:
    return identity_in(config(toolchain, **serve), environment or {})


def command(
    toolchain: Mapping[str, Any], environment: Mapping[str, str] | None = None, **serve: Any
) -> str:
    """The command line that a recipe made in one environment gives in an empty one."""
    made = config(toolchain, **serve)
    recipe = identity_in(made, environment or {}).document()
    words = compile_command(route_of(made.toolchain, {}), recipe, stated_flags(made, {}))
    return " ".join(words)


def test_the_native_command_line_is_the_published_one() -> None:
    assert command(NATIVE) == (
        "neuronx-cc compile module.mlir --framework XLA --target trn2 --lnc 2 -O2 "
        "--model-type transformer --auto-cast=none --output module.neff"
    )
    assert command({**REFERENCE, "target": "trn1"}) == (
        "neuronx-cc compile module.mlir --framework XLA --target trn1 --lnc 1 -O2 "
        "--model-type transformer --auto-cast=none --output module.neff"
    )


def test_the_xla_command_line_is_the_published_one() -> None:
    assert command(XLA) == (
        "neuronx-cc compile graph.hlo --framework XLA --target trn2 --output graph.neff "
        "--logfile log-neuron-cc.txt --auto-cast=none --verbose=35 -O1 "
        "--internal-hlo2tensorizer-options=--modular-flow-mac-threshold=10 "
        "--internal-backend-options=--enable-verifier=false --enable-nested-dynamic-loop"
    )
    assert " -O3 " in command(XLA, optimization_level=3)
    assert " -O1 " in command(XLA, optimization_level=0)


def test_the_environments_flags_win_and_come_once() -> None:
    environment = {
        "NEURON_CC_FLAGS": "--auto-cast all --cache_dir=/x --internal-new=1 -O3 --verbose=debug",
        "NEURON_COMPILER_OPT_LEVEL": "-O1",
    }
    flags = ["--auto-cast=matmult", "--hbm-scratchpad-page-size=2048", "--verbose=info"]
    assert command({**NATIVE, "flags": flags}, environment) == (
        "neuronx-cc compile module.mlir --framework XLA --target trn2 --lnc 2 -O3 "
        "--model-type transformer --auto-cast=all --hbm-scratchpad-page-size=2048 "
        "--internal-new=1 --verbose=info --output module.neff"
    )
    assert " -O1 " in command(NATIVE, {"NEURON_COMPILER_OPT_LEVEL": "1"})
    assert " -O3 " in command(XLA | {"flags": ["-O3"]}, {"NEURON_COMPILER_OPT_LEVEL": "2"})


def test_other_groupings_of_cores_are_named_on_both_routes() -> None:
    one = {"NEURON_LOGICAL_NC_CONFIG": "1"}
    assert " --lnc 1 " in command(NATIVE, one)
    assert " --logical-nc-config=1" in command(XLA, one)
    assert "nc-config" not in command(XLA, {"NEURON_LOGICAL_NC_CONFIG": "2"})
    # What the compiler takes there by itself is not published.
    assert " --logical-nc-config=2" in command(XLA | {"target": "trn3"})
    assert identity(NATIVE, one).target == identity(NATIVE | {"flags": ["-lnc", "1"]}).target
    assert identity(NATIVE, one).target == "trn2+lnc1"
    assert identity(NATIVE).target == "trn2"


SAME = [
    ({}, {"NEURON_LOGICAL_NC_CONFIG": "2"}),
    ({}, {"NEURON_PLATFORM_TARGET_OVERRIDE": "trn2"}),
    ({}, {"NEURON_COMPILER_OPT_LEVEL": "-O2"}),
    ({}, {"NEURON_CC_FLAGS": "--cache_dir=/elsewhere --log_level=debug --verbose debug"}),
    ({}, {"NEURON_CC_FLAGS": "--target=trn2 --framework XLA"}),
    ({}, {"VLLM_NEURON_BACKEND": "neuron_native", "VLLM_NEURON_COMPILATION_TIMEOUT": "1800"}),
    ({}, {"HOME": "/elsewhere", "VLLM_CACHE_ROOT": "/x", "NEURON_RT_VISIBLE_CORES": "3"}),
    ({}, {"VLLM_NEURON_BACKEND": ""}),
    # The pool's size is pinned.
    ({}, {"VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION": "0.2", "VLLM_NEURON_MIN_KV_BUDGET_GIB": "2"}),
    ({"versions": {**NATIVE["versions"], "nki": f" {NATIVE['versions']['nki']} "}}, {}),
    ({"route": "native"}, {}),
    ({"engine": "vllm-neuron"}, {}),
    ({"flags": ["--auto-cast", "none"]}, {}),
    ({"flags": ["-O3", "--optlevel=2"]}, {}),
]


@pytest.mark.parametrize(("toolchain", "environment"), SAME)
def test_equal_builds_have_equal_recipes(
    toolchain: dict[str, Any], environment: dict[str, str]
) -> None:
    assert identity(NATIVE | toolchain, environment) == identity(NATIVE)


def test_a_flag_is_the_same_wherever_it_was_said() -> None:
    said = [
        identity(NATIVE | {"flags": ["--internal-a=1 2", "-O1"]}),
        identity(NATIVE, {"NEURON_CC_FLAGS": "-O1 '--internal-a=1 2'"}),
        identity(NATIVE | {"flags": ["--internal-a='1 2'"]}, {"NEURON_COMPILER_OPT_LEVEL": "-O1"}),
    ]
    assert said[0] == said[1] == said[2]


OTHER = [
    ({"target": "trn3"}, {}),
    ({"flags": ["-O1"]}, {}),
    ({"flags": ["--never-heard-of"]}, {}),
    ({"versions": {**NATIVE["versions"], "nki": "0.6.0"}}, {}),
    ({"versions": {**NATIVE["versions"], "neuronx-cc": "2.28.7631.0+5b7a0f21"}}, {}),
    ({}, {"NEURON_LOGICAL_NC_CONFIG": "1"}),
    ({}, {"NEURON_CC_FLAGS": "--enable-saturate-infinity"}),
    ({}, {"NEURON_COMPILER_OPT_LEVEL": "1"}),
    ({}, {"VLLM_NEURON_NEW_SWITCH": "1"}),
    ({}, {"VLLM_NEURON_BACKEND": "not_known_here"}),
]


@pytest.mark.parametrize(("toolchain", "environment"), OTHER)
def test_what_changes_a_neff_changes_the_recipe(
    toolchain: dict[str, Any], environment: dict[str, str]
) -> None:
    assert identity(NATIVE | toolchain, environment) != identity(NATIVE)


def test_for_which_device_a_torch_was_built_is_in_no_recipe() -> None:
    def of(torch: str) -> object:
        return identity(REFERENCE | {"versions": {**REFERENCE["versions"], "torch": torch}})

    assert of("2.13.0+cpu") == of("2.13.0+cu130") == of("2.13.0") == identity(REFERENCE)
    assert of("2.13.0+gitabc") != of("2.13.0")


def test_route_and_engine_are_in_the_recipe() -> None:
    for toolchain, route, engine in (
        (NATIVE, "native", "vllm-neuron"),
        (REFERENCE, "native", "reference"),
        (XLA, "xla", "vllm-neuron"),
    ):
        made = identity(toolchain)
        assert (made.route, made.engine, made.unresolved) == (route, engine, ())
        assert made.versions == toolchain["versions"]
        assert made.platform["route"] == route


def test_what_cannot_be_known_here_is_named_with_what_to_pin() -> None:
    bare = {"name": "neuronx", "target": "trn2"}
    made = identity(bare)
    assert made.versions == {}
    assert made.unresolved == (
        "neuronx-cc, nki, libtorch-neuronx-lite, vllm-neuron are not installed here: pin "
        "toolchain.versions.neuronx-cc, toolchain.versions.nki, "
        "toolchain.versions.libtorch-neuronx-lite, toolchain.versions.vllm-neuron",
    )
    # Our own decoder's pool is as large as it is told.
    assert identity(REFERENCE, num_gpu_blocks_override=None).unresolved == ()


REFUSED = [
    ({"target": None}, {}, "toolchain.target is not set; allowed: trn1, trn1n, inf2, trn2, trn3"),
    ({"target": "trn9"}, {}, "no target 'trn9'; allowed: trn1"),
    ({"route": "tpu"}, {}, "no route 'tpu'; allowed: native, xla"),
    ({"engine": "vllm"}, {}, "no engine 'vllm'; allowed: vllm-neuron, reference, torch-neuronx"),
    ({"versions": {"neuron-cc": "1"}}, {}, "no tool 'neuron-cc' to pin"),
    (
        {"versions": {"neuronx-cc": "+5b7a0f21"}},
        {},
        r"versions.neuronx-cc is '\+5b7a0f21', which names no version",
    ),
    ({}, {"NEURON_PLATFORM_TARGET_OVERRIDE": "trn3"}, "toolchain.target says trn2, NEURON_"),
    ({"flags": ["--target=trn1"]}, {}, "toolchain.target says trn2, the flag --target says trn1"),
    ({}, {"NEURON_CC_FLAGS": "--target trn1"}, "the flag --target says trn1"),
    (
        {"flags": ["--lnc=1"]},
        {"NEURON_LOGICAL_NC_CONFIG": "2"},
        "the flag --lnc says 1, NEURON_LOGICAL_NC_CONFIG says 2",
    ),
    ({"flags": ["-lnc=1"]}, {"NEURON_CC_FLAGS": "--lnc 2"}, "the flag --lnc says 1, the flag"),
    ({"target": "inf2", "flags": ["-lnc 2"]}, {}, "on inf2 one logical core is 1 physical, not 2"),
    ({}, {"NEURON_LOGICAL_NC_CONFIG": "4"}, "on trn2 one logical core is 1 or 2 physical, not 4"),
    ({}, {"NEURON_SCRATCHPAD_PAGE_SIZE": "2048"}, "--hbm-scratchpad-page-size is not given"),
    (
        {"flags": ["--hbm-scratchpad-page-size=1024"]},
        {"NEURON_SCRATCHPAD_PAGE_SIZE": "2048"},
        "--hbm-scratchpad-page-size is 1024: they must match",
    ),
    ({}, {"VLLM_NEURON_BACKEND": "vllm_neuron"}, "which is the route xla; toolchain.route is nat"),
    (
        {"engine": "reference", "route": "xla", "versions": {}},
        {},
        "the reference decoder is captured on the route native only",
    ),
]


@pytest.mark.parametrize(("toolchain", "environment", "why"), REFUSED)
def test_contradictions_are_stated(
    toolchain: dict[str, Any], environment: dict[str, str], why: str
) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        identity(NATIVE | toolchain, environment)
    assert refused.value.field


def test_matching_page_sizes_are_no_contradiction() -> None:
    flags = {"flags": ["--hbm-scratchpad-page-size=2048"]}
    page = {"NEURON_SCRATCHPAD_PAGE_SIZE": "2048"}
    assert identity(NATIVE | flags, page) == identity(NATIVE | flags)
