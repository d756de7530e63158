"""A lowered module made portable: StableHLO alone, no f64, no locations, aliases stated; as bytes."""

from __future__ import annotations

from collections.abc import Sequence

from torch_mlir import ir
from torch_mlir._mlir_libs import _stablehlo
from torch_mlir.passmanager import PassManager

from neffbuild.config.errors import ToolchainRefusal
from neffbuild.toolchain.neuronx.stablehlo import ENTRY, TARGET_VERSION

_DIALECTS = frozenset({"builtin", "func", "stablehlo"})


def portable_artifact(module: ir.Module, aliases: Sequence[tuple[int, int]]) -> bytes:
    """The module as a portable artifact; `aliases` are pairs (result, argument) of its entry function.
    The module itself is changed on the way.

    Raises `ToolchainRefusal` for a module with f64 or an op of another dialect left in it.
    """
    with module.context, ir.Location.unknown():
        for rewrite in (_constant, _iota, _narrow_constant):
            for operation in _operations(module):
                rewrite(operation)
        _state_aliases(module, aliases)
        PassManager.parse("builtin.module(canonicalize,cse,strip-debuginfo)").run(module.operation)
        _refuse_what_is_left(module)
        try:
            artifact: bytes = _stablehlo.serialize_portable_artifact(module, TARGET_VERSION)
        except ValueError as error:
            raise ToolchainRefusal(
                f"the lowered graph is no StableHLO of version {TARGET_VERSION}: {error}",
                hint="keep ops out of the model that StableHLO had no name for then",
            ) from error
    return artifact


def deserialised(artifact: bytes) -> ir.Module:
    """The module of a portable artifact."""
    context = ir.Context()
    _stablehlo.register_dialect(context)
    return _stablehlo.deserialize_portable_artifact(context, artifact)


def _operations(module: ir.Module) -> list[ir.Operation]:
    """Every operation, regions included, as they are now: safe to change while they are gone through."""
    found: list[ir.Operation] = []

    def add(operation: ir.Operation) -> ir.WalkResult:
        found.append(operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(add)
    return found


def _constant(operation: ir.Operation) -> None:
    if operation.name == "arith.constant":
        _replace(operation, "stablehlo.constant", value=operation.attributes["value"])


def _iota(operation: ir.Operation) -> None:
    """torch-mlir computes the size of a range in f64, though its result's type already has it."""
    if operation.name == "stablehlo.dynamic_iota" and operation.result.type.has_static_shape:
        _replace(operation, "stablehlo.iota", iota_dimension=operation.attributes["iota_dimension"])


def _narrow_constant(operation: ir.Operation) -> None:
    """torch-mlir makes each Python float an f64 constant and converts that where it is used."""
    if operation.name != "stablehlo.convert" or not _is_double(operation.operands[0].type):
        return
    source, to = operation.operands[0].owner, operation.result.type
    if not isinstance(source, ir.Operation | ir.OpView) or source.name != "stablehlo.constant":
        return
    values = source.attributes["value"]
    if values.is_splat and isinstance(to.element_type, ir.FloatType):
        value = ir.FloatAttr.get(to.element_type, values.get_splat_value().value)
        _replace(operation, "stablehlo.constant", value=ir.DenseElementsAttr.get_splat(to, value))


def _replace(operation: ir.Operation, name: str, **attributes: ir.Attribute) -> None:
    """By an operation without operands that has the same result."""
    new = ir.Operation.create(
        name,
        results=[operation.result.type],
        attributes=attributes,
        ip=ir.InsertionPoint(operation),
    )
    operation.result.replace_all_uses_with(new.result)
    operation.erase()


def _state_aliases(module: ir.Module, aliases: Sequence[tuple[int, int]]) -> None:
    [entry] = (operation for operation in module.body.operations if operation.name.value == ENTRY)
    results = {argument: result for result, argument in aliases}
    number = ir.IntegerType.get_signless(32)
    entry.arg_attrs = ir.ArrayAttr.get(
        [
            ir.DictAttr.get(
                {"tf.aliasing_output": ir.IntegerAttr.get(number, results[argument])}
                if argument in results
                else {}
            )
            for argument in range(len(entry.arguments))
        ]
    )


def _refuse_what_is_left(module: ir.Module) -> None:
    for operation in _operations(module):
        if operation.name.partition(".")[0] not in _DIALECTS:
            raise ToolchainRefusal(
                f"the graph is no StableHLO: torch-mlir left a {operation.name} in it",
                hint="a model that torch-mlir does not lower cannot take the native route",
            )
        blocks = (block for region in operation.regions for block in region.blocks)
        values = [*operation.results, *(value for block in blocks for value in block.arguments)]
        if any(_is_double(value.type) for value in values):
            raise ToolchainRefusal(
                f"the graph computes in f64 ({operation.name}), which neuronx-cc refuses (ESPP004)",
                hint="keep float64 tensors and float64 arithmetic out of the model",
            )


def _is_double(type_: ir.Type) -> bool:
    element = type_.element_type if isinstance(type_, ir.ShapedType) else type_
    return isinstance(element, ir.F64Type)
