"""Symbolic sizes: inputs of a Dynamo graph, but not of a compiled program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from neffbuild.config.errors import ToolchainRefusal


def read_sizes_off_tensors(graph: fx.Graph) -> None:
    """Let the graph read each symbolic size off a tensor that carries it, in place; the inputs go.

    Raises `ToolchainRefusal` for a size no tensor input has, and for an input that is neither a tensor
    nor a size.
    """
    placeholders = list(graph.find_nodes(op="placeholder"))
    tensors = {
        node: example
        for node in placeholders
        if isinstance(example := node.meta["example_value"], torch.Tensor)
    }
    body = next(node for node in graph.nodes if node.op != "placeholder")
    for node in placeholders:
        if node in tensors:
            continue
        size = node.meta["example_value"]
        if not isinstance(size, torch.SymInt):
            raise ToolchainRefusal(
                f"the graph takes a {type(size).__qualname__} as its input {node.name!r}; "
                "the inductor toolchain builds graphs of tensors and their sizes",
                hint="make it a constant of the compiled function",
            )
        if node.users:
            carrier = _carrier(size, tensors)
            with graph.inserting_before(body):
                read = graph.call_function(torch.ops.aten.sym_size.int, carrier)
            read.meta["example_value"] = size
            node.replace_all_uses_with(read)
        graph.erase_node(node)


def symbolic_dimensions(tensor: torch.Tensor) -> dict[int, torch.SymInt]:
    """Dimensions of a fake tensor whose size may vary, with that size."""
    sizes: tuple[Any, ...] = tuple(tensor.shape)
    return {index: size for index, size in enumerate(sizes) if isinstance(size, torch.SymInt)}


def _carrier(size: torch.SymInt, tensors: Mapping[fx.Node, torch.Tensor]) -> tuple[fx.Node, int]:
    expression = size.node.expr
    for node, tensor in tensors.items():
        for dimension, candidate in symbolic_dimensions(tensor).items():
            if candidate.node.expr == expression:
                return node, dimension
    raise ToolchainRefusal(
        f"the graph depends on the size {expression}, which no tensor input has",
        hint="pass a tensor of that size, or make the size static",
    )
