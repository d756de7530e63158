"""Lowering what the reference decoder does not do: any graph becomes StableHLO without f64, or is
refused."""

from __future__ import annotations

import tempfile

import pytest

pytest.importorskip("torch_mlir", reason="needs torch-mlir: make test-stablehlo")
pytest.importorskip("jaxlib", reason="needs jaxlib: make test-stablehlo")

import torch
from torch import nn
from torch_mlir import ir
from torch_mlir.dialects import torch as torch_dialect
from xla_cpu import XlaProgram

from neffbuild.config.errors import ToolchainRefusal
from neffbuild.toolchain.neuronx.lowering import lower
from neffbuild.toolchain.neuronx.portable import portable_artifact

NUMBERS = torch.arange(-13, 14)


class Program(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *tensors):
        return self.function(*tensors)


def test_integers_are_divided_as_python_does_it():
    divisors = torch.tensor([4, -4, 7] * 9)

    def divided(x, y):
        return x // 16, x % 16, x // -3, x % -3, x // y, x % y

    graph = lower(Program(divided), {"x": NUMBERS, "y": divisors}, list("abcdef"))
    results, _ = XlaProgram(graph.module).run([NUMBERS, divisors])
    for found, expected in zip(results, divided(NUMBERS, divisors), strict=True):
        assert torch.equal(found, expected)


def test_integers_too_large_for_a_float_are_divided_exactly():
    large = torch.tensor([2**62 + 1, 2**53 + 1, -(2**62) - 1])
    graph = lower(Program(lambda x: (x // 3,)), {"x": large}, ["a"])
    [found], _ = XlaProgram(graph.module).run([large])
    assert torch.equal(found, large // 3)


def test_arguments_that_are_not_written_to_are_not_aliased():
    def program(x, y):
        y.add_(x)
        return x + 1, y.sum()

    given = {"x": NUMBERS, "y": NUMBERS.clone()}
    graph = lower(Program(program), given, ["next", "sum"])
    assert (graph.outputs, graph.aliases) == (("y", "next", "sum"), ((0, 1),))
    results, taken = XlaProgram(graph.module).run(list(given.values()))
    assert [result.tolist() for result in results] == [
        (2 * NUMBERS).tolist(),
        (NUMBERS + 1).tolist(),
        0,
    ]
    assert taken == [1]


class Holding(nn.Module):
    """A module with a tensor of its own, registered or not."""

    def __init__(self, values, *, kind):
        super().__init__()
        if kind == "parameter":
            self.held = nn.Parameter(values)
        elif kind == "buffer":
            self.register_buffer("held", values)
        else:
            self.held = values

    def forward(self, x):
        return (x * self.held,)


@pytest.mark.parametrize("values", [torch.tensor(1.5), torch.tensor([1.5, 2.5])])
@pytest.mark.parametrize("kind", ["parameter", "buffer", "attribute"])
def test_values_of_a_tensor_that_is_no_argument_are_refused(kind, values):
    with pytest.raises(ToolchainRefusal, match=r"hold the values of the tensor '\w+'"):
        lower(Holding(values, kind=kind), {"x": torch.ones(2)}, ["a"])


def test_values_written_in_the_code_are_refused_where_they_are_a_tensor():
    with pytest.raises(ToolchainRefusal, match="which are in no key"):
        lower(Program(lambda x: (x + torch.tensor([1, 2, 3] * 9),)), {"x": NUMBERS}, ["a"])


def test_f64_is_refused():
    with pytest.raises(ToolchainRefusal, match=r"f64 \(stablehlo\.\w+\).*ESPP004"):
        lower(Program(lambda x: ((x.double() * 2).int(),)), {"x": NUMBERS}, ["a"])


def test_f64_arguments_are_refused():
    with pytest.raises(ToolchainRefusal, match="ESPP004"):
        lower(Program(lambda x: (x > 0,)), {"x": NUMBERS.double()}, ["a"])


def test_what_torch_mlir_cannot_lower_is_refused_in_its_own_words(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ToolchainRefusal, match=r"failed to legalize .*_linalg_svd") as refusal:
        lower(Program(lambda x: torch.linalg.svd(x.float()[None])), {"x": NUMBERS}, ["u", "s", "v"])
    assert "native route" in refusal.value.hint
    assert not list(tmp_path.iterdir())
    assert "legalize" not in capfd.readouterr().err


def test_an_op_of_another_dialect_is_refused_by_its_name():
    context = ir.Context()
    torch_dialect.register_dialect(context)
    added = "%1 = arith.addi %0, %0 : tensor<2xi64> return %1 : tensor<2xi64>"
    text = f"func.func @main(%0: tensor<2xi64>) -> tensor<2xi64> {{ {added} }}"
    with pytest.raises(ToolchainRefusal, match=r"left an? arith\.addi in it"):
        portable_artifact(ir.Module.parse(text, context), ())


def test_an_op_younger_than_the_format_is_refused():
    with pytest.raises(ToolchainRefusal, match=r"no StableHLO of version 1\.0\.0"):
        lower(Program(lambda x: (x.tan(),)), {"x": NUMBERS.float()}, ["a"])
