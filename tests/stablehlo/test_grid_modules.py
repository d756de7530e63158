"""What is captured of every shape of a three-family grid: digests, form, and what it computes."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch_mlir", reason="needs torch-mlir: make test-stablehlo")
pytest.importorskip("jaxlib", reason="needs jaxlib: make test-stablehlo")

import torch
from step_samples import Reference, grid, quickstart, unit
from xla_cpu import XlaProgram

import neffbuild
from neffbuild.grid.shapes import Family
from neffbuild.models.layers import RMSNorm
from neffbuild.toolchain.neuronx.stablehlo import capture, module_text

GRID = grid(quickstart())
OTHER_USER = ("unshare", "--user", "--map-user=65534", "--map-group=65534")


def test_three_families_over_two_batches_and_two_contexts():
    shapes = GRID.values()
    assert len(shapes) == 12
    assert {shape.family for shape in shapes} == {
        Family.TARGET_WITH_SPEC,
        Family.TARGET_WITHOUT_SPEC,
        Family.DRAFT,
    }
    assert {(shape.num_seqs, shape.context_len) for shape in shapes} == {
        (batch, context) for batch in (1, 2) for context in (128, 512)
    }


def test_every_shape_has_a_digest_of_its_own(captured):
    assert len({found.graph_digest for found in captured.values()}) == len(GRID)
    for found in captured.values():
        assert found.graph_digest == hashlib.sha256(found.graph.module).hexdigest()


@pytest.mark.skipif(
    subprocess.run([*OTHER_USER, "true"], capture_output=True).returncode != 0,
    reason="needs user namespaces",
)
def test_another_user_in_another_folder_captures_the_same_bytes(captured, tmp_path):
    """Process, user, home, working directory, the folder neffbuild lies in, hash seed and order of the
    shapes: all differ at once."""
    package = Path(neffbuild.__file__).parent
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(package, tmp_path / "elsewhere" / "neffbuild", ignore=ignored)
    shutil.copytree(package.parent / "configs", tmp_path / "configs")
    tests = tmp_path / "tests" / "stablehlo"
    shutil.copytree(Path(__file__).parent, tests, ignore=ignored)
    home = tmp_path / "home"
    home.mkdir()
    done = subprocess.run(
        [*OTHER_USER, sys.executable, "-W", "ignore", tests / "grid_digests.py"],
        cwd=home,
        env={
            "HOME": str(home),
            "LOGNAME": "somebody",
            "PATH": os.environ["PATH"],
            "PYTHONHASHSEED": "4711",
            "PYTHONPATH": str(tmp_path / "elsewhere"),
            "TMPDIR": str(home),
        },
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    said = json.loads(done.stdout)
    assert Path(said["package"]).is_relative_to(tmp_path)
    assert said["user"] == 65534 != os.getuid()
    assert list(said["digests"]) == list(reversed(GRID))
    assert said["digests"] == {name: found.graph_digest for name, found in captured.items()}


@pytest.mark.parametrize("name", GRID)
def test_a_module_is_stablehlo_alone(captured, name):
    graph = captured[name].graph
    text = module_text(graph.module)
    [entry] = re.findall(r"func\.func (?:\w+ )?@(\w+)\(", text)
    assert entry == "main"
    operations = re.findall(r'(?:= |^ +)"?(\w+)\.\w+', text, re.MULTILINE)
    assert set(operations) == {"stablehlo", "func"}
    assert "f64" not in text
    assert "dynamic" not in text
    assert "?" not in text, "a size that is not fixed"
    here = Path(__file__).parents[2]
    for trace in (b"neffbuild", b".py", b"models", bytes(here), bytes(Path.home()), b"kv_caches"):
        assert trace not in graph.module


@pytest.mark.parametrize("name", GRID)
def test_every_weight_and_table_is_an_argument(captured, name):
    """What is in a checkpoint, and the table that config.json alone gives (`inv_freq`), comes from outside:
    a module holds numbers, of which config.json says each, and no table of them."""
    graph = captured[name].graph
    assert set(Reference(quickstart(), GRID[name]).weights) <= set(graph.inputs)
    assert any("inv_freq" in argument for argument in graph.inputs)
    constants = re.findall(r"dense<([^>]*)>", module_text(graph.module))
    assert constants
    assert not [constant for constant in constants if "[" in constant or '"' in constant]
    assert "dense_resource" not in module_text(graph.module)


def test_no_weight_can_be_read_while_a_step_is_captured(monkeypatch):
    """So none can become a number in it either."""
    monkeypatch.setattr(RMSNorm, "forward", lambda self, hidden: hidden * float(self.weight[0]))
    with pytest.raises(RuntimeError, match=r"(?i)data.dependent|unbacked"):
        capture(unit(quickstart(), GRID["decode_b1_s1_ctx128"]))


@pytest.mark.parametrize("name", GRID)
def test_xla_computes_what_the_reference_model_does(captured, name):
    config, graph = quickstart(), captured[name].graph
    reference = Reference(config, GRID[name])
    program = XlaProgram(graph.module)
    pool = {name: tensor.clone() for name, tensor in reference.pool.items()}
    weights = reference.weights
    for inputs in reference.steps():
        before = {name: tensor.clone() for name, tensor in pool.items()}
        given = inputs | pool | weights
        results, taken = program.run([given[name] for name in graph.inputs])
        found = dict(zip(graph.outputs, results, strict=True))
        expected = reference.run(inputs)
        tokens = reference.model.output_names[0]
        assert torch.equal(found.pop(tokens), expected.pop(tokens))
        torch.testing.assert_close(found, expected | reference.pool, rtol=0, atol=1e-4)
        assert all(not torch.equal(found[name], before[name]) for name in pool)
        # The memory of the old pool, and nothing else, went to the new one.
        assert [graph.inputs[position] for position in taken] == list(pool)
        pool = {name: found[name] for name in pool}


def test_aliases_pair_each_tensor_of_the_pool_with_its_update(captured):
    for found in captured.values():
        graph = found.graph
        pairs = [
            (graph.outputs[result], graph.inputs[argument]) for result, argument in graph.aliases
        ]
        assert pairs == [(name, name) for name in graph.inputs if name.startswith("kv_caches.")]
        assert pairs
        stated = re.findall(
            r"%arg(\d+): [^%]*?\{tf\.aliasing_output = (\d+)", module_text(graph.module)
        )
        assert [(int(result), int(argument)) for argument, result in stated] == list(graph.aliases)


def test_bfloat16_with_a_tied_head_over_a_pool_of_a_given_size(captured):
    config = quickstart(dtype="bfloat16", num_gpu_blocks_override=77)
    tied = replace(
        config.model, architecture={**config.model.architecture, "tie_word_embeddings": True}
    )
    config, shape = replace(config, model=tied), GRID["decode_b2_s1_ctx128"]
    found = capture(unit(config, shape))
    assert found.graph_digest not in {other.graph_digest for other in captured.values()}
    assert "lm_head.weight" not in found.graph.inputs
    text = module_text(found.graph.module)
    assert "f64" not in text
    assert "tensor<77x32x2x64xbf16>" in text
    reference = Reference(config, shape)
    program = XlaProgram(found.graph.module)
    for inputs in reference.steps():
        given = inputs | reference.pool | reference.weights
        results, _ = program.run([given[name] for name in found.graph.inputs])
        expected = reference.run(inputs) | reference.pool
        # Values are of the order of ten: four of bfloat16's eight bits.
        for name, result in zip(found.graph.outputs, results, strict=True):
            if name != "next_token_ids":
                torch.testing.assert_close(result, expected[name], rtol=0, atol=0.5)


def test_a_pool_larger_than_memory_is_captured_without_allocating_it():
    config = quickstart(num_gpu_blocks_override=4_000_000)
    before = _virtual_bytes()
    found = capture(unit(config, GRID["draft_b1_s4_ctx128"]))
    assert "tensor<4000000x32x2x64xf32>" in module_text(found.graph.module)
    assert _virtual_bytes() - before < 8 << 30, "its keys alone are 61 GiB"


def _virtual_bytes() -> int:
    """The most address space this process ever had."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmPeak:\s+(\d+) kB", status)[1]) << 10
