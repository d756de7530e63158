"""From the reference decoder's step to a StableHLO module: `torch.export`, then torch-mlir."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export.graph_signature import ExportGraphSignature, InputKind, OutputKind
from torch.func import functional_call
from torch_mlir import ir
from torch_mlir.dialects import torch as torch_dialect
from torch_mlir.extras.fx_decomp_util import get_decomposition_table
from torch_mlir.extras.fx_importer import FxImporter
from torch_mlir.passmanager import PassManager

from neffbuild.config.build import BuildConfig
from neffbuild.config.errors import ToolchainRefusal
from neffbuild.grid.kv_blocks import num_kv_blocks
from neffbuild.grid.shapes import DecodeShape
from neffbuild.models.decode import (
    Inputs,
    allocate_kv_caches,
    build_program,
    model_dtype,
    named_inputs,
    named_kv_caches,
)
from neffbuild.toolchain.neuronx.portable import portable_artifact
from neffbuild.toolchain.neuronx.stablehlo import ENTRY, StableHLOGraph

_PIPELINES = (
    "builtin.module(torchdynamo-export-to-torch-backend-pipeline)",
    "builtin.module(torch-backend-to-stablehlo-backend-pipeline)",
)


def lower_step(config: BuildConfig, shape: DecodeShape) -> StableHLOGraph:
    """One decode step of the config's model. No weight and no KV pool is allocated.

    Raises as `neffbuild.toolchain.neuronx.stablehlo.capture` does.
    """
    with FakeTensorMode():
        model, inputs = build_program(config, shape)
        pool = named_kv_caches(
            allocate_kv_caches(
                model.architecture,
                model_dtype(config),
                num_kv_blocks(config.serve),
                config.serve.block_size,
                allocate=torch.empty,
            )
        )
    # A tied head is one tensor: one argument, under its first name.
    weights = dict(model.named_parameters()) | dict(model.named_buffers())
    arguments = named_inputs(inputs) | pool | weights
    step = _Step(model, inputs, len(pool), tuple(weights))
    return lower(step, arguments, model.output_names)


def lower(
    step: nn.Module, arguments: Mapping[str, Tensor], output_names: Sequence[str]
) -> StableHLOGraph:
    """A module without state of its own, called with the values of `arguments` in their order; it may
    write to them. `output_names` are of what it returns.

    Raises `ToolchainRefusal` for what is not StableHLO in the end, has f64 in it, or holds a tensor that
    is none of its arguments.
    """
    program = torch.export.export(step, tuple(arguments.values()))
    program = program.run_decompositions(_decompositions())
    _refuse_contents(program.graph_signature)
    names = tuple(arguments)
    outputs, aliases = _results(program.graph_signature, names, output_names)
    module = _stablehlo(program)
    return StableHLOGraph(
        module=portable_artifact(module, aliases), inputs=names, outputs=outputs, aliases=aliases
    )


def _stablehlo(program: torch.export.ExportedProgram) -> ir.Module:
    """As `torch_mlir.fx.export_and_import` does it, which on an error leaves a file in the folder for
    temporary ones and tells the cause to the terminal alone."""
    context = ir.Context()
    torch_dialect.register_dialect(context)
    importer = FxImporter(context=context)
    importer.import_frozen_program(program, func_name=ENTRY)
    said: list[str] = []

    def hear(diagnostic: ir.Diagnostic) -> bool:
        said.append(diagnostic.message)
        return True

    context.attach_diagnostic_handler(hear)
    # A pass may complain and succeed; what the bindings keep of it would then end the process.
    context.emit_error_diagnostics = True
    try:
        with context:
            for pipeline in _PIPELINES:
                PassManager.parse(pipeline).run(importer.module.operation)
    except ir.MLIRError as error:
        raise ToolchainRefusal(
            f"torch-mlir cannot lower the graph to StableHLO: {said[0] if said else error}",
            hint="a model that torch-mlir does not lower cannot take the native route",
        ) from error
    return importer.module


class _Step(nn.Module):
    """A model's step as a function of flat tensors; the model's own weights are not in it."""

    def __init__(
        self, model: nn.Module, inputs: Inputs, pool: int, weight_names: tuple[str, ...]
    ) -> None:
        super().__init__()
        # In a tuple, so that its weights are not registered and do not become the module's state.
        self._model = (model,)
        # How many tensors each input is of; None for one that is a tensor itself.
        self._parts = [len(value) if isinstance(value, tuple) else None for value in inputs]
        self._pool, self._weight_names = pool, weight_names

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        left = iter(tensors)
        inputs = [
            next(left) if parts is None else tuple(islice(left, parts)) for parts in self._parts
        ]
        pool = tuple(islice(left, self._pool))
        caches = list(zip(pool[::2], pool[1::2], strict=True))
        weights = dict(zip(self._weight_names, left, strict=True))
        results: tuple[Tensor, ...] = functional_call(self._model[0], weights, (*inputs, caches))
        return results


def _refuse_contents(signature: ExportGraphSignature) -> None:
    """A tensor that is no argument would be in the program with its values, and those are in no key: they
    may be a checkpoint's."""
    for spec in signature.input_specs:
        if spec.kind is not InputKind.USER_INPUT:
            raise ToolchainRefusal(
                f"the graph would hold the values of the tensor {spec.target!r}, which are in no key",
                hint="make it a parameter or buffer of the model, which are arguments, or compute it in the "
                "graph from what config.json states",
            )


def _results(
    signature: ExportGraphSignature, arguments: Sequence[str], returned: Sequence[str]
) -> tuple[tuple[str, ...], tuple[tuple[int, int], ...]]:
    """Names of the program's results and its aliases (result, argument), from what `torch.export` says
    each result is."""
    taken = {name: position for position, name in enumerate(signature.user_inputs)}
    remaining = iter(returned)
    names, aliases = [], []
    for result, spec in enumerate(signature.output_specs):
        if spec.kind is OutputKind.USER_INPUT_MUTATION:
            argument = taken[spec.target]
            names.append(arguments[argument])
            aliases.append((result, argument))
        else:
            names.append(next(remaining))
    return tuple(names), tuple(aliases)


def _decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """torch-mlir's table, and integer division its own way: torch-mlir divides integers in f64, and its
    remainder has the sign of the dividend."""
    aten = torch.ops.aten
    return dict(get_decomposition_table()) | {
        aten.floor_divide.default: _floor_divide,
        aten.floor_divide.Scalar: _floor_divide,
        aten.remainder.Scalar: _remainder,
        aten.remainder.Tensor: _remainder,
    }


def _floor_divide(dividend: Tensor, divisor: Tensor | int) -> Any:
    if not _are_integers(dividend, divisor):
        return NotImplemented  # leaves it as it is
    quotient = torch.div(dividend, divisor, rounding_mode="trunc")
    rest = dividend - quotient * divisor
    if isinstance(divisor, Tensor):
        rounded_up = ((rest < 0) & (divisor > 0)) | ((rest > 0) & (divisor < 0))
    else:
        rounded_up = rest < 0 if divisor > 0 else rest > 0
    return quotient - rounded_up.to(quotient.dtype)


def _remainder(dividend: Tensor, divisor: Tensor | int) -> Any:
    if not _are_integers(dividend, divisor):
        return NotImplemented
    return dividend - _floor_divide(dividend, divisor) * divisor


def _are_integers(*operands: Tensor | float) -> bool:
    return not any(
        operand.is_floating_point() if isinstance(operand, Tensor) else isinstance(operand, float)
        for operand in operands
    )
