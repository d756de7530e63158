"""Graphs as Dynamo hands them to a backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from neffbuild.toolchain.graph_digest import graph_digest


def dynamo_graph(
    function: Callable[..., Any], *inputs: Any
) -> tuple[fx.GraphModule, Sequence[Any]]:
    """What `torch.compile(function)` gives its backend for these inputs."""
    received = []

    def backend(module, example_inputs):
        received.append((module, example_inputs))
        return module.forward

    torch.compile(function, backend=backend, dynamic=False, fullgraph=True)(*inputs)
    [graph] = received
    return graph


def digest_of(function: Callable[..., Any], *inputs: Any) -> str:
    return graph_digest(dynamo_graph(function, *inputs)[0])


def with_dynamic(tensor: torch.Tensor, dimension: int = 0) -> torch.Tensor:
    torch._dynamo.mark_dynamic(tensor, dimension)
    return tensor
