"""Artifacts as the compiler makes them: right, contained, repeatable, and within their CPU level."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from dynamo_samples import dynamo_graph, with_dynamic
from toolchain_samples import decode, speculative_build, tiny_build, unit

from neffbuild.cache.canonical import digest_file
from neffbuild.config.build import BuildConfig
from neffbuild.config.errors import ToolchainRefusal
from neffbuild.grid.shapes import DecodeShape, Family
from neffbuild.models.decode import (
    allocate_kv_caches,
    build_decoder,
    model_dtype,
    named_kv_caches,
    named_tensors,
    step_inputs,
)
from neffbuild.toolchain.inductor import InductorToolchain
from neffbuild.toolchain.inductor.capture import capture_graph
from neffbuild.toolchain.inductor.compile import compile_graph
from neffbuild.toolchain.inductor.cpu_level import LEVELS, host_features

pytestmark = pytest.mark.slow

TOOLCHAIN = InductorToolchain()
PLAIN = tiny_build(target="x86-64-v3")
PLAIN_SHAPE = decode(1, 1, 128)
WIDE = speculative_build([0, 2], serve={"dtype": "bfloat16"}, target="x86-64-v4")
WIDE_SHAPE = decode(2, 3, 64, Family.TARGET_WITH_SPEC)


@dataclass(frozen=True)
class Built:
    """An artifact's files in a folder of their own, the compile's scratch gone."""

    config: BuildConfig
    shape: DecodeShape
    files: Path
    recipe: dict

    def load(self):
        return TOOLCHAIN.load(self.files, self.recipe)


def build(config: BuildConfig, shape: DecodeShape, folder: Path, shared: Path | None) -> Built:
    scratch, files = folder / "scratch", folder / "files"
    scratch.mkdir(parents=True)
    files.mkdir()
    work = unit(config, shape)
    artifact = TOOLCHAIN.compile(work, TOOLCHAIN.capture(work), scratch, shared=shared)
    for name, path in artifact.files.items():
        assert path.is_relative_to(scratch)
        shutil.copy(path, files / name)
    shutil.rmtree(scratch)
    return Built(config, shape, files, dict(work.recipe))


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Built:
    """One row, one query, float32, x86-64-v3, with precompiled headers."""
    folder = tmp_path_factory.mktemp("plain")
    shared = folder / "shared"
    built = build(PLAIN, PLAIN_SHAPE, folder, shared)
    headers = list(shared.rglob("*.gch"))
    assert len(headers) == 2, "wrapper and kernel headers are shared by the units of a farm"
    shutil.rmtree(shared)
    return built


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> Built:
    """Two rows of three queries with auxiliary states, bfloat16, x86-64-v4."""
    return build(WIDE, WIDE_SHAPE, tmp_path_factory.mktemp("wide"), None)


@cache
def disassembly(program: Path) -> str:
    return subprocess.run(
        ["objdump", "--disassemble", "--no-show-raw-insn", str(program)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def ragged_inputs(shape: DecodeShape, block_size: int, start: int):
    """A step at positions from `start`, rows of different lengths (the last is the longest)."""
    inputs = step_inputs(shape, block_size)
    blocks = torch.arange(1, inputs.block_table.numel() + 1, dtype=torch.int32)
    inputs.block_table.copy_(blocks.view_as(inputs.block_table))
    inputs.input_ids.random_(0, 256)
    for row in range(shape.num_seqs):
        inputs.query_lens[row] = max(1, shape.query_len - shape.num_seqs + 1 + row)
        for query in range(shape.query_len):
            position = start + query
            block = int(inputs.block_table[row, position // block_size])
            inputs.positions[row, query] = position
            inputs.slot_mapping[row, query] = block * block_size + position % block_size
    return inputs


def check_against_eager(built: Built, tolerance: float) -> None:
    """Steps through the loaded program and through the model: equal outputs, equal pools, for two
    sizes of the pool."""
    torch.manual_seed(0)
    model = build_decoder(built.config, built.shape.family)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    program = built.load().bind(named_tensors(model))
    for num_blocks in (17, 300):
        pools = [
            allocate_kv_caches(model.architecture, model_dtype(built.config), num_blocks, 16)
            for _ in range(2)
        ]
        for start in (0, 14, 15, 30, 40):
            inputs = ragged_inputs(built.shape, 16, start)
            got = program(inputs._asdict() | named_kv_caches(pools[0]))
            with torch.inference_mode():
                expected = model(*inputs, pools[1])
            assert len(got) == len(expected)
            live = inputs.query_lens[:, None] > torch.arange(built.shape.query_len)
            for ours, theirs in zip(got[1:], expected[1:], strict=True):
                torch.testing.assert_close(ours[live], theirs[live], rtol=tolerance, atol=tolerance)
            assert torch.equal(got[0], torch.where(live, got[1].argmax(-1), -1).int())
        for name, tensor in named_kv_caches(pools[0]).items():
            expected_tensor = named_kv_caches(pools[1])[name]
            torch.testing.assert_close(tensor, expected_tensor, rtol=tolerance, atol=tolerance)
            assert tensor.any()


def test_a_batch_of_one_equals_eager(plain):
    check_against_eager(plain, 1e-4)


@pytest.mark.skipif(
    not LEVELS["x86-64-v4"].features <= host_features(), reason="this CPU lacks x86-64-v4"
)
def test_a_ragged_speculative_step_with_auxiliary_states_equals_eager(wide):
    check_against_eager(wide, 0.1)


def test_the_artifact_is_small_and_holds_no_weights(plain):
    names = {path.name for path in plain.files.iterdir()}
    assert names == {"program.wrapper.so", "program.wrapper_metadata.json", "binding.json"}
    assert (plain.files / "program.wrapper.so").stat().st_size < 1 << 20
    assert {"model.layers.1.mlp.down_proj.weight", "lm_head.weight"} <= set(plain.load().inputs)


def test_v3_holds_no_instruction_of_avx512(plain):
    metadata = json.loads((plain.files / "program.wrapper_metadata.json").read_text())
    assert metadata["AOTI_CPU_ISA"] == "AVX2"
    text = disassembly(plain.files / "program.wrapper.so")
    assert text.count("%ymm") > 50, "vectorised for the level"
    assert "%zmm" not in text
    assert not re.search(r"%[xy]mm(1[6-9]|2\d|3[01])\b|%k[0-7]\b", text)


def test_v4_holds_avx512_and_nothing_beyond(wide):
    metadata = json.loads((wide.files / "program.wrapper_metadata.json").read_text())
    assert metadata["AOTI_CPU_ISA"] == "AVX512"
    text = disassembly(wide.files / "program.wrapper.so")
    assert text.count("%zmm") > 50, "vectorised for the level"
    beyond = re.findall(
        r"\bvpdp\w+|\bv\w*bf16\w*|\bvcvtne\w+|\bvdpbf\w+|\bv\w+ph\b(?<!vcvtps2ph)|\bvpmadd52\w+"
        r"|\bvpopcnt\w+|\bvpshld\w+|\bvpcompressb\w*|\btdp\w+",
        text,
    )
    assert not beyond


REBUILD = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from toolchain_samples import decode, tiny_build, unit
from neffbuild.toolchain.inductor import InductorToolchain
toolchain, work = InductorToolchain(), unit(tiny_build(target="x86-64-v3"), decode(1, 1, 128))
scratch = Path(sys.argv[2])
artifact = toolchain.compile(work, toolchain.capture(work), scratch)
assert all(path.parent == scratch / "program" for path in artifact.files.values())
"""


def test_a_rebuild_elsewhere_is_the_same_to_the_bit_and_leaves_nothing_outside(plain, tmp_path):
    """Other user, HOME, folders, hash seed and number of threads; headers not precompiled."""
    homes = {name: tmp_path / name for name in ("HOME", "TMPDIR", "cwd")}
    scratch = tmp_path / "other" / "scratch"
    for folder in (*homes.values(), scratch):
        folder.mkdir(parents=True)
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(homes["HOME"]),
        "TMPDIR": str(homes["TMPDIR"]),
        "USER": "somebody-else",
        "PYTHONHASHSEED": "17",
        "OMP_NUM_THREADS": "2",
    }
    subprocess.run(
        [sys.executable, "-c", REBUILD, str(Path(__file__).parent), str(scratch)],
        cwd=homes["cwd"],
        env=environment,
        check=True,
    )
    for name in ("program.wrapper.so", "program.wrapper_metadata.json", "binding.json"):
        assert digest_file(scratch / "program" / name) == digest_file(plain.files / name), name
    left = [path for folder in homes.values() for path in folder.rglob("*") if not path.is_dir()]
    assert left == []


RUN_BARE = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from toolchain_samples import decode, tiny_build
import torch
from neffbuild.models.decode import *
from neffbuild.toolchain.registry import load_toolchain
program = load_toolchain("inductor").load(Path(sys.argv[2]), json.loads(sys.argv[3]))
config, shape = tiny_build(), decode(1, 1, 128)
model = build_decoder(config, shape.family)
pool = allocate_kv_caches(model.architecture, torch.float32, 9, 16)
tensors = named_tensors(model) | named_kv_caches(pool) | step_inputs(shape, 16)._asdict()
[next_ids, _] = program.bind(tensors)({})
assert next_ids.tolist() == [[-1]]
for name in ("torch._dynamo", "torch._inductor", "sympy"):
    assert name not in sys.modules, name
"""


def test_it_runs_without_dynamo_inductor_or_a_compiler(plain, tmp_path):
    subprocess.run(
        [
            sys.executable,
            "-c",
            RUN_BARE,
            str(Path(__file__).parent),
            str(plain.files),
            json.dumps(plain.recipe),
        ],
        cwd=tmp_path,
        env={"PATH": str(tmp_path)},
        check=True,
    )


def test_a_dynamo_graph_with_a_symbolic_batch_is_compiled_and_called_by_position(tmp_path):
    """What the torch.compile backend does with a graph it meets."""

    def program(table, rows, others):
        return rows @ table / rows.shape[0], others.mean(dim=0)

    received = []

    def backend(module, example_inputs):
        captured = capture_graph(module, example_inputs)
        artifact = compile_graph(captured.graph, LEVELS["x86-64-v3"], (), tmp_path)
        [folder] = {path.parent for path in artifact.files.values()}
        platform = {"target": "x86-64-v3", "versions": {"torch": torch.__version__}}
        received.append(TOOLCHAIN.load(folder, {"kind": "graph", "platform": platform}))
        return received[0].call_graph

    table = torch.rand(8, 8)
    compiled = torch.compile(program, backend=backend, dynamic=False, fullgraph=True)
    for batch in (5, 2, 9):
        inputs = table, with_dynamic(torch.rand(batch, 8)), with_dynamic(torch.rand(3, 2))
        for ours, theirs in zip(compiled(*inputs), program(*inputs), strict=True):
            torch.testing.assert_close(ours, theirs)
    [loaded] = received
    # Dynamo's guards keep batch 1 away from a symbolic program; the program itself is right for it.
    inputs = {"table": table, "rows": torch.rand(1, 8), "others": torch.rand(1, 2)}
    for ours, theirs in zip(loaded.bind(inputs)({}), program(**inputs), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_an_environment_that_would_change_the_program_is_refused(tmp_path, monkeypatch):
    module, inputs = dynamo_graph(lambda x: x + 1, torch.ones(3))
    monkeypatch.setenv("TORCHINDUCTOR_CPP_MIN_CHUNK_SIZE", "7")
    with pytest.raises(ToolchainRefusal, match="the environment sets TORCHINDUCTOR_CPP_MIN"):
        compile_graph(capture_graph(module, inputs).graph, LEVELS["x86-64-v3"], (), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_unit_planned_for_another_host_is_refused(tmp_path):
    work = unit(PLAIN, PLAIN_SHAPE)
    work.recipe["toolchain"]["target"] = "native-0000000000000000"
    with pytest.raises(ToolchainRefusal, match="recipe says target 'native-0"):
        TOOLCHAIN.compile(work, None, tmp_path)
    with pytest.raises(ToolchainRefusal, match="is planned, 2"):
        TOOLCHAIN.compile(unit(tiny_build(versions={"torch": "1.0"}), PLAIN_SHAPE), None, tmp_path)


def test_a_folder_the_compiler_cannot_be_told_of_is_refused(tmp_path):
    scratch = tmp_path / "with a space"
    scratch.mkdir()
    module, inputs = dynamo_graph(lambda x: x + 2, torch.ones(3))
    with pytest.raises(ToolchainRefusal, match="with a space"):
        compile_graph(capture_graph(module, inputs).graph, LEVELS["x86-64-v3"], (), scratch)
