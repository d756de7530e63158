"""Which unit a graph is of, by what it takes; what a start is told; what cannot be started."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import pytest
from engine_project import UNITS, EngineProject
from hypothesis import given
from hypothesis import strategies as st

from neffbuild.config.build import BuildConfig, ToolchainConfig
from neffbuild.config.model import ModelConfig
from neffbuild.config.serve import AdditionalConfig, NeuronConfig, ServeConfig, SpeculativeConfig
from neffbuild.grid.engine_entries import EngineEntry, Unread
from neffbuild.grid.shapes import DecodeShape, Family, PrefillShape, Shape
from neffbuild.toolchain.neuronx import NeuronxToolchain
from neffbuild.toolchain.neuronx.engine_config import (
    Row,
    engine_environment,
    engine_options,
    row_of,
)
from neffbuild.toolchain.neuronx.engine_entries import GraphInputs, RowUnits, fitting, signature
from neffbuild.toolchain.neuronx.engine_start import Ended, engine_failure
from neffbuild.toolchain.neuronx.hlo_shapes import NoShapes, Parameter, parameter_shapes

# What XLA itself writes for a graph of i32[8], i32[8, 32] and f32[2, 65, 1, 4, 8], computations left out.
BY_XLA = base64.b64decode(
    "CgVqaXRfZhIGbWFpbi4zIloKEBAEGgEIKgYKAQCAAQEyAQAKExAEGgIIICoHCgIBAIABATICAAAKHBALGgUCQQEECCoKCgUEAwIBAIAB"
    "ATIFAAAAAAASBxALKgOAAQEaAnAwGgJwMRoCcDIoCjAD"
)
BLOCKS = 600
LAYERS, DRAFT_LAYERS = 8, 1
WINDOW = 1024


def build_config(
    *,
    rows: tuple[int, ...] = (1, 2, 4),
    contexts: tuple[int, ...] | None = (1024,),
    block_size: int = 32,
    spec_tokens: int = 0,
    windows: str = "none",
    **serve: Any,
) -> BuildConfig:
    kinds = {
        "none": {},
        "half": {"layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2)},
        "all": {"layer_types": ["sliding_attention"] * LAYERS},
    }
    window = {"sliding_window": WINDOW} if windows != "none" else {}
    model = {"num_hidden_layers": LAYERS, **window, **kinds[windows]}
    speculation = (
        SpeculativeConfig(method="eagle3", model="draft", num_speculative_tokens=spec_tokens)
        if spec_tokens
        else None
    )
    neuron = NeuronConfig(num_seqs_buckets=rows, decode_context_length_buckets=contexts)
    options = {"max_num_batched_tokens": 2048, "num_gpu_blocks_override": 7, **serve}
    return BuildConfig(
        source="test",
        serve=ServeConfig(
            model="model",
            max_model_len=4096,
            max_num_seqs=rows[-1],
            block_size=block_size,
            speculative_config=speculation,
            additional_config=AdditionalConfig(neuron_config=neuron),
            **options,
        ),
        model=ModelConfig("model", model),
        draft_model=ModelConfig("draft", {"num_hidden_layers": DRAFT_LAYERS})
        if spec_tokens
        else None,
        toolchain=ToolchainConfig(name="neuronx", route="xla", target="trn2"),
    )


def row_units(config: BuildConfig, row: Row) -> RowUnits:
    return RowUnits.of(config, NeuronxToolchain.capabilities, row, BLOCKS)


def taken(shape: Shape, units: RowUnits, config: BuildConfig, tensors: int) -> list[Parameter]:
    """What the engine's graph of a shape takes: `tensors` KV caches for each layer."""
    mark = signature(shape, config, units.bucketer)
    integers = [
        (mark.tokens,),
        (mark.num_seqs,),
        (mark.num_seqs + 1,),
        *((mark.num_seqs, width) for width in mark.tables or {128}),
    ]
    # Matrices with other numbers of rows are no block tables.
    integers += [(mark.num_seqs + 2, width) for _, other in units.units for width in other.tables]
    if isinstance(shape, PrefillShape):
        integers.append((1, 1))
    pool = (2, BLOCKS, 1, 32, 16)
    return [
        Parameter((1024, 256), integer=False),
        *(Parameter(dims, integer=True) for dims in integers),
        *[Parameter(pool, integer=False)] * (mark.layers * tensors),
    ]


@given(
    rows=st.sets(st.integers(1, 40), min_size=1, max_size=4),
    contexts=st.sets(st.integers(1, 31), max_size=5),
    block_size=st.sampled_from([16, 32, 128, 256]),
    spec_tokens=st.integers(0, 6),
    windows=st.sampled_from(["none", "half", "all"]),
    tensors=st.sampled_from([1, 2]),
    data=st.data(),
)
def test_a_graph_is_of_the_unit_that_takes_what_it_takes(
    rows: set[int],
    contexts: set[int],
    block_size: int,
    spec_tokens: int,
    windows: str,
    tensors: int,
    data: st.DataObject,
) -> None:
    config = build_config(
        rows=tuple(sorted(rows)),
        contexts=tuple(sorted(128 * context for context in contexts)) or None,
        block_size=block_size,
        spec_tokens=spec_tokens,
        windows=windows,
    )
    row = data.draw(st.sampled_from([Row(None), *map(Row, sorted(rows))]))
    units = row_units(config, row)
    marks = dict(units.units)
    assert all(row_of(shape) == row for shape in marks)
    for shape, mark in marks.items():
        found = fitting(GraphInputs.of(taken(shape, units, config, tensors), BLOCKS), units.units)
        assert shape in found
        for other in found:
            # Told apart wherever what they take differs, but for a row of two tokens and its offsets.
            assert marks[other] == mark or {marks[other].tokens, mark.tokens} == {1, 2}


def test_what_cannot_be_told_apart_is_not_guessed() -> None:
    def found(config: BuildConfig, inputs: GraphInputs) -> set[str]:
        units = row_units(config, Row(1))
        return {shape.bucket_name for shape in fitting(inputs, units.units)}

    # Two tokens with a draft, or one token and the two offsets of its query.
    twofold = build_config(contexts=(1024,), spec_tokens=1)
    assert found(twofold, GraphInputs(frozenset({1, 2}), frozenset({(1, 32)}), LAYERS)) == {
        "decode_b1_s1_ctx1024",
        "decode_b1_s2_ctx1024",
    }
    # A window's table is as wide as that of the context of 1152, which has but one table.
    config = build_config(contexts=(1152, 2048), windows="half")
    tables = frozenset({(1, 36), (1, 64)})
    assert found(config, GraphInputs(frozenset({1, 2}), tables, LAYERS)) == {"decode_b1_ctx2048"}
    # With windows alone, contexts beyond them have one program.
    config = build_config(contexts=(512, 2048), windows="all")
    tables = frozenset({(1, 36)})
    assert found(config, GraphInputs(frozenset({1, 2}), tables, LAYERS)) == {
        "decode_b1_ctx2048",
        "decode_b1_ctx4096",
    }


def test_names_tell_more_than_shapes() -> None:
    config = build_config(spec_tokens=5)
    units = row_units(config, Row(2))
    texts = EngineEntry(
        "0" * 32,
        example_inputs="Input 0:\n  Shape: (12,)\nInput 1:\n  Shape: (2, 32)\nInput 2:\n  Shape: (2, 128)",
        graph="placeholder[target=L_input_ids_]\nplaceholder[target=block_table_tensor]\n"
        "placeholder[target=full_block_table_tensor]",
    )
    [shape] = units.shapes_of(texts, None)
    assert shape == DecodeShape(Family.TARGET_WITH_SPEC, 2, 6, 1024)
    # By shapes alone the table of a whole context may be the one that is read.
    inputs = GraphInputs(frozenset({12}), frozenset({(2, 32), (2, 128)}), LAYERS)
    found = {shape.bucket_name for shape in fitting(inputs, units.units)}
    assert found == {"decode_b2_s6_ctx1024", "decode_b2_s6_ctx4096"}
    assert not row_units(config, Row(4)).shapes_of(texts, None)
    with pytest.raises(Unread, match=r"it has no example_inputs.txt; of graph.hlo, it states no"):
        units.shapes_of(EngineEntry("e"), b"")


def test_a_proto_that_xla_wrote_is_read() -> None:
    assert parameter_shapes(BY_XLA) == (
        Parameter((8,), integer=True),
        Parameter((8, 32), integer=True),
        Parameter((2, 65, 1, 4, 8), integer=False),
    )


@given(st.one_of(st.binary(), st.integers(0, len(BY_XLA) - 1).map(lambda end: BY_XLA[:end])))
def test_what_is_no_graph_states_no_shapes(data: bytes) -> None:
    try:
        found = parameter_shapes(data)
    except NoShapes:
        return
    assert found


def test_a_row_is_narrowed_to_and_nothing_else_is() -> None:
    config = build_config(contexts=(1024, 2048), spec_tokens=5, gpu_memory_utilization=0.7)
    options = engine_options(config, Row(2), BLOCKS, "/m", "/d")
    whole = engine_options(config, Row(None), BLOCKS, "/m", "/d")
    assert options["speculative_config"]["model"] == "/d"
    assert (whole["max_num_seqs"], whole["num_gpu_blocks_override"]) == (4, BLOCKS)
    neuron = options["additional_config"]["neuron_config"]
    assert neuron == {**whole["additional_config"]["neuron_config"], "num_seqs_buckets": [2]}
    assert {
        name: (options[name], value) for name, value in whole.items() if options[name] != value
    }.keys() == {"max_num_seqs", "additional_config"}


def test_older_releases_have_other_names() -> None:
    def names(release: tuple[int, int]) -> set[str]:
        return set(engine_environment(Row(1), "trn2", release, "/r", on_device=False))

    moved = {"PARALLEL_COMPILE_WORKERS", "COMPILATION_TIMEOUT"}
    assert names((0, 23)) - names((0, 24)) == {f"VLLM_NEURON_{name}" for name in moved}
    assert names((0, 24)) - names((0, 23)) == {f"NEURON_LIBTORCH_{name}" for name in moved}
    beside = engine_environment(Row(None), "trn2", (0, 24), "/r", on_device=True)
    assert "VLLM_NEURON_CPU_COMPILE" not in beside


def test_the_last_words_count() -> None:
    assert engine_failure(Ended(0, "FATAL: no")) is None
    failure = engine_failure(
        Ended(1, "NCC_EVRF007: too many\nneuronx-cc compilation failed with 70.")
    )
    assert failure is not None
    assert "NCC_EVRF007" in failure.message
    failure = engine_failure(Ended(1, "starting\nModuleNotFoundError: No module named 'vllm'\n"))
    assert failure is not None
    assert failure.message.endswith("with exit code 1: ModuleNotFoundError: No module named 'vllm'")
    failure = engine_failure(Ended(-11, ""))
    assert failure is not None
    assert (failure.failure.value, failure.message) == (
        "signal",
        "vLLM Neuron ended by signal 11: it printed nothing",
    )


EAGLE3 = {"method": "eagle3", "model": "draft", "num_speculative_tokens": 5}
PINNED = {"neuronx-cc": "2.28.7631.0", "nki": "0.6.0", "torch-neuronx": "2.9.0.2.14.1"}


@pytest.mark.parametrize(
    ("toolchain", "serve", "said"),
    [
        ({"route": "native"}, {}, "route native without a device is not documented"),
        (
            {"versions": {"vllm-neuron": "0.29.0.1.2.0"}},
            {},
            "vLLM Neuron 0.29.0.1.2.0 is planned, and which VLLM_NEURON_BACKEND",
        ),
        ({"flags": ["--optlevel=3"]}, {}, "unset toolchain.flags"),
        ({}, {"data_parallel_size": 2, "enable_expert_parallel": True}, "data_parallel_size is 2"),
    ],
)
def test_what_cannot_be_started_is_refused_with_the_reason(
    project: EngineProject, toolchain: dict[str, Any], serve: dict[str, Any], said: str
) -> None:
    config = project.configure(toolchain=toolchain, **serve)
    plan = project.run("plan", config, "--json")
    assert said in plan.document["refusal"]
    compiled = project.run("compile", config, "--json")
    assert compiled.status == 2
    assert said in compiled.error["message"]
    assert project.starts() == []


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("NEURON_CC_FLAGS", "-O3 --cache_dir=/c", "NEURON_CC_FLAGS has --optlevel=3, and"),
        ("NEURON_CC_FLAGS", "--cache_dir=/c --verbose=35 --target trn2", None),
        ("NEURON_LOGICAL_NC_CONFIG", "1", "NEURON_LOGICAL_NC_CONFIG is 1, and"),
        ("NEURON_LOGICAL_NC_CONFIG", "2", None),
    ],
)
def test_what_the_engines_own_command_line_has_not_is_in_no_key(
    project: EngineProject, name: str, value: str, said: str | None
) -> None:
    config = project.configure()
    before = project.call("plan", config, "--json").document
    project.environment[name] = value
    after = project.call("plan", config, "--json").document
    if said is None:
        assert after["units"] == before["units"]
        assert after["refusal"] is None
    else:
        assert said in after["refusal"]
        assert project.run("compile", config, "--json").status == 2
        assert project.starts() == []


def test_a_shard_has_whole_rows(project: EngineProject) -> None:
    config = project.configure()
    parts = []
    for number in range(1, 5):
        ran = project.call("plan", config, "--json", "--shard", f"{number}/4")
        parts.append([unit["bucket_name"] for unit in ran.document["units"]])
    assert sorted(name for part in parts for name in part) == UNITS
    rows = [{name.partition("_ctx")[0] for name in part} for part in parts]
    assert sorted(len(row) for row in rows) == [0, 1, 1, 1]


def test_recurrent_state_is_refused() -> None:
    config = replace(
        build_config(), model=ModelConfig("mamba", {"num_hidden_layers": 4, "state_size": 16})
    )
    toolchain = config.toolchain.model_copy(
        update={"versions": {**PINNED, "vllm-neuron": "0.24.0.1.1.0"}}
    )
    reason = NeuronxToolchain().refusal(replace(config, toolchain=toolchain))
    assert reason is not None
    assert "mamba keeps recurrent state for each slot, sized by max_num_seqs" in reason


def test_another_release_than_planned_is_no_host_for_it(project: EngineProject) -> None:
    config = project.configure(toolchain={"versions": {"vllm-neuron": "0.23.0.1.0.0"}})
    ran = project.run("compile", config, "--json")
    assert ran.status == 2
    assert "vllm-neuron 0.23.0.1.0.0 is planned, 0.24.0.1.1.0 is installed" in ran.error["message"]
    ran = project.run("compile", project.configure(), "--json", env={"VLLM_NEURON_CPU_MODE": "1"})
    assert ran.status == 2
    assert "VLLM_NEURON_CPU_MODE is set" in ran.error["message"]


def test_speculation_needs_a_device_and_says_so(project: EngineProject) -> None:
    config = project.configure(speculative_config=EAGLE3)
    plan = project.run("plan", config, "--json").document
    assert {unit["needs"] for unit in plan["units"]} == {"neuron"}
    assert "needs: neuron" in project.run("plan", config).out
    ran = project.run("compile", config, "--json", "--only", "*_b1_s1_ctx4096")
    assert ran.status == 1
    [unit] = ran.document["units"]
    assert unit["cause_kind"] == "refused"
    assert "this host has none (/dev/neuron*)" in unit["cause"]
    assert project.starts() == []
    plain = project.run("plan", project.configure(), "--json").document
    assert {unit["needs"] for unit in plain["units"]} == {None}
