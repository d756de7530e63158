"""What is checked before an artifact is run, none of it needing a compile."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from neffbuild.config.errors import ConfigError, IntegrityError, ToolchainRefusal
from neffbuild.toolchain.inductor import InductorToolchain, executable
from neffbuild.toolchain.inductor.binding import (
    BINDING_FILE,
    Binding,
    BindingFile,
    InputSpec,
    Requirements,
)
from neffbuild.toolchain.inductor.executable import Executable

BINDING = Binding(
    inputs=(
        InputSpec("weight", 0, "float32", (2, 3), (3, 1)),
        InputSpec("pool", 2, "bfloat16", (None, 4), (4, 1)),
        InputSpec("ids", 3, "int32", (2, 1), (1, None)),
    ),
    outputs=("next", "logits"),
)
V3 = frozenset({"avx", "avx2"})

GOOD = {
    "weight": torch.zeros(2, 3),
    "pool": torch.zeros(7, 4, dtype=torch.bfloat16),
    "ids": torch.zeros(2, 1, dtype=torch.int32),
}


def recipe(torch_version: str = torch.__version__):
    toolchain = {"target": "x86-64-v3", "versions": {"torch": torch_version, "g++": "12"}}
    return {"kind": "unit", "toolchain": toolchain}


def graph_recipe(torch_version: str = torch.__version__):
    return {"kind": "graph", "platform": recipe(torch_version)["toolchain"]}


@pytest.fixture
def artifact(tmp_path):
    """Files of an artifact whose program is no program: reaching it is an error of its own kind."""
    (tmp_path / "program.wrapper.so").write_bytes(b"not ELF")
    file = BindingFile(BINDING, Requirements(torch=torch.__version__, cpu_features=V3))
    (tmp_path / BINDING_FILE).write_bytes(file.to_json())
    return tmp_path


@pytest.mark.parametrize("make_recipe", [recipe, graph_recipe])
def test_another_torch_is_refused(artifact, make_recipe):
    with pytest.raises(ToolchainRefusal, match="this process runs"):
        InductorToolchain().load(artifact, make_recipe("1.0"))


@pytest.mark.parametrize("make_recipe", [recipe, graph_recipe])
def test_a_cpu_without_the_level_is_refused_before_the_program_is_opened(
    artifact, make_recipe, monkeypatch
):
    monkeypatch.setattr(executable, "host_features", lambda: V3 - {"avx2"})
    with pytest.raises(ToolchainRefusal, match="x86-64-v3; this host's CPU lacks avx2"):
        InductorToolchain().load(artifact, make_recipe())


def test_a_program_that_cannot_be_opened_is_refused(artifact):
    with pytest.raises(ToolchainRefusal, match=r"program\.wrapper\.so cannot be loaded"):
        InductorToolchain().load(artifact, recipe())


def test_an_artifact_without_a_binding_is_an_integrity_error(artifact):
    (artifact / BINDING_FILE).unlink()
    with pytest.raises(IntegrityError, match=r"no binding\.json"):
        InductorToolchain().load(artifact, recipe())


sizes = st.lists(st.none() | st.integers(0, 2**40), max_size=4).map(tuple)
specs = st.builds(
    InputSpec, st.text(), st.integers(0, 999), st.sampled_from(["float32", "int64"]), sizes, sizes
)


@given(
    st.builds(
        BindingFile,
        st.builds(
            Binding,
            st.lists(specs, max_size=5).map(tuple),
            st.lists(st.text(), max_size=4).map(tuple),
        ),
        st.builds(Requirements, st.text(), st.frozensets(st.text())),
    )
)
def test_a_binding_survives_its_file(file):
    assert BindingFile.from_json(file.to_json()) == file


@pytest.mark.parametrize("damage", ["schema", "inputs", "outputs", "requires"])
def test_a_damaged_binding_is_an_integrity_error(artifact, damage):
    document = json.loads((artifact / BINDING_FILE).read_bytes())
    for broken in ({**document, damage: 7}, {k: v for k, v in document.items() if k != damage}):
        with pytest.raises(IntegrityError):
            BindingFile.from_json(json.dumps(broken).encode())
    with pytest.raises(IntegrityError):
        BindingFile.from_json(b"{")


def test_inputs_go_in_by_name_and_outputs_come_back_in_the_graphs_order():
    seen = []
    program = Executable(
        BINDING, lambda inputs: [seen.append(inputs), torch.ones(1), torch.ones(2)][1:]
    )
    bound = program.bind(GOOD | {"something else": torch.zeros(9)})
    assert bound.free == ()
    first, last = bound({})
    assert (first.shape, last.shape) == ((1,), (2,))

    partly = program.bind({"weight": GOOD["weight"]})
    assert partly.free == ("pool", "ids")
    partly(GOOD)
    program.call_graph(GOOD["weight"], 7, GOOD["pool"], GOOD["ids"])
    for inputs in seen:
        assert [id(tensor) for tensor in inputs] == [id(GOOD[name]) for name in program.inputs]


WRONG = {
    "dtype": ("ids", torch.zeros(2, 1, dtype=torch.int64)),
    "shape": ("weight", torch.zeros(2, 4)),
    "rank": ("weight", torch.zeros(2, 3, 1)),
    "fixed size beside a free one": ("pool", torch.zeros(7, 5, dtype=torch.bfloat16)),
    "strides": ("weight", torch.zeros(3, 2).T),
}


@pytest.mark.parametrize(("name", "tensor"), WRONG.values(), ids=WRONG)
def test_a_tensor_the_program_does_not_take_never_reaches_it(name, tensor):
    def program(_inputs):
        raise AssertionError("the program would read past the end")

    loaded = Executable(BINDING, program)
    with pytest.raises(ConfigError, match=f"input '{name}' is .* the program takes"):
        loaded.bind({name: tensor})
    with pytest.raises(ConfigError, match=f"input '{name}' is"):
        loaded.bind({})(GOOD | {name: tensor})


def test_a_missing_input_is_named():
    bound = Executable(BINDING, lambda inputs: inputs).bind({"weight": GOOD["weight"]})
    with pytest.raises(ConfigError, match="needs its input 'pool'") as refused:
        bound({"ids": GOOD["ids"]})
    assert refused.value.hint == "pass pool, ids"


def test_a_size_one_dimension_may_have_any_stride():
    sliced = torch.zeros(2, 5, dtype=torch.int32)[:, :1].as_strided((2, 1), (1, 5))
    Executable(BINDING, lambda inputs: inputs[:2]).bind(GOOD | {"ids": sliced})({})
