"""Inputs that are objects: a serving engine hands layer names to its custom ops as opaque objects.

A compiled program takes tensors only, and passes to custom ops what a schema can spell. So the name is
written into the program, and in place of an op that takes an object a *twin* is called: the same op with
a text instead, which makes the object and calls the op. Twins are registered by whoever compiles and by
whoever loads; the program says which.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from torch import fx
from torch._library.fake_class_registry import FakeScriptObject
from torch._ops import OpOverload

from neffbuild.config.errors import ToolchainRefusal

NAMESPACE = "neffbuild_twins"
_NAME_TYPES = frozenset({"vllm.utils.torch_utils.LayerName"})
"""Classes of objects that are a text (`value`) and nothing else."""
_OBJECT = "PyObject"


def bake_names(graph: fx.Graph) -> tuple[str, ...]:
    """Write the names a graph takes as inputs into its calls, in place; the inputs go.

    Returns the names that matter, in the order of their inputs: one that nothing uses is left out.
    Raises `ToolchainRefusal` for an object that is no name.
    """
    names: list[str] = []
    for node in graph.find_nodes(op="placeholder"):
        name = opaque_name(node.meta["example_value"])
        if name is None:
            continue
        if node.users:
            names.append(name)
        for user in list(node.users):
            _call_twin(user, node, name)
        graph.erase_node(node)
    return tuple(names)


def opaque_name(value: object) -> str | None:
    """The text an opaque input stands for; None for a tensor, a size or anything else."""
    if not isinstance(value, FakeScriptObject):
        return None
    real = value.real_obj
    return str(real.value) if _class_name(type(real)) in _NAME_TYPES else None


def twinned_ops(graph: fx.Graph) -> tuple[str, ...]:
    """The twins that a graph calls, as `register_twins` takes them."""
    return tuple(
        sorted(
            {
                str(node.target).removeprefix(f"{NAMESPACE}.").removesuffix(".default")
                for node in graph.nodes
                if isinstance(node.target, OpOverload) and node.target.namespace == NAMESPACE
            }
        )
    )


def register_twins(twins: Iterable[str]) -> None:
    """Make twins known to torch, those that are not yet.

    Raises `ToolchainRefusal` where this process lacks an op that one stands in for.
    """
    for twin in twins:
        _register(*_parts(twin))


def _call_twin(call: fx.Node, name_node: fx.Node, name: str) -> None:
    target = call.target
    if not isinstance(target, torch._ops.OpOverloadPacket | OpOverload):
        raise ToolchainRefusal(
            f"the graph passes the name {name!r} to {target!r}; names can be passed to custom ops only"
        )
    namespace, op = str(target).split(".")[:2]
    # Another name of the same call may have made it a twin already.
    if namespace != NAMESPACE:
        call.target = _register(namespace, op)
    call.args = _replaced(call.args, name_node, name)
    call.kwargs = _replaced(call.kwargs, name_node, name)


def _replaced(arguments: Any, node: fx.Node, name: str) -> Any:
    return fx.map_arg(arguments, lambda argument: name if argument is node else argument)


@cache
def _library() -> Any:
    # Kept for ever: the ops live as long as it does. Torch leaves its methods untyped.
    return torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]


@cache
def _register(namespace: str, op: str) -> OpOverload:
    original = _original(namespace, op)
    twin = _joined(namespace, op)
    positions = [
        (index, argument.name)
        for index, argument in enumerate(original._schema.arguments)
        if str(argument.type) == _OBJECT
    ]
    schema = str(original._schema).replace(f"{_OBJECT} ", "str ")
    library = _library()
    library.define(schema.replace(f"{namespace}::{op}", twin, 1), tags=tuple(original.tags))
    call = partial(_call_original, original, positions)
    library.impl(twin, call, "CompositeExplicitAutograd")
    if original._schema.returns:
        torch.library.register_fake(f"{NAMESPACE}::{twin}", call, lib=library)
    registered: OpOverload = getattr(getattr(torch.ops, NAMESPACE), twin).default
    return registered


def _call_original(
    original: OpOverload, positions: Sequence[tuple[int, str]], *args: Any, **kwargs: Any
) -> Any:
    values = list(args)
    for index, name in positions:
        if index < len(values):
            values[index] = _named(values[index])
        elif name in kwargs:
            kwargs[name] = _named(kwargs[name])
    return original(*values, **kwargs)


@cache
def _named(name: str) -> Any:
    [class_name] = _NAME_TYPES
    module, _, attribute = class_name.rpartition(".")
    return getattr(import_module(module), attribute)(name)


def _original(namespace: str, op: str) -> OpOverload:
    try:
        original: OpOverload = getattr(getattr(torch.ops, namespace), op).default
    except AttributeError as error:
        raise ToolchainRefusal(
            f"the program calls the custom op {namespace}::{op}, which this process does not have",
            hint="load it in the serving engine it was compiled for",
        ) from error
    return original


def _joined(namespace: str, op: str) -> str:
    return f"{namespace}__{op}"


def _parts(twin: str) -> tuple[str, str]:
    namespace, _, op = twin.partition("__")
    return namespace, op


def _class_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
