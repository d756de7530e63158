"""Capturing a graph the way `torch.compile` does, so that both ways lead to the same digest."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn

from neffbuild.config.build import BuildConfig
from neffbuild.config.errors import ToolchainRefusal
from neffbuild.grid.shapes import DecodeShape
from neffbuild.models.decode import (
    allocate_kv_caches,
    build_program,
    mark_num_blocks_symbolic,
    model_dtype,
)
from neffbuild.toolchain.base import Captured
from neffbuild.toolchain.graph_digest import graph_digest, nameless_digest
from neffbuild.toolchain.inductor.binding import Binding, InputSpec
from neffbuild.toolchain.inductor.opaque import bake_names, twinned_ops
from neffbuild.toolchain.inductor.symbols import read_sizes_off_tensors

_EXAMPLE_NUM_BLOCKS = 64
"""Size of the pool a step is traced with: any will do, the program keeps it symbolic."""

_MODULE_ATTRIBUTE = re.compile(
    r"L\['(?P<root>\w+)'\](?P<path>(\._modules\['[^']+'\])*)\._(parameters|buffers)\['(?P<leaf>[^']+)'\]"
)
_ARGUMENT = re.compile(r"L\['(?P<root>\w+)'\](?P<path>(\[\d+\])*)")


@dataclass(frozen=True, slots=True)
class InductorGraph:
    """A graph ready to compile: its inputs are tensors, one example for each.

    `names` are the layer names written into it, `twins` the ops it calls by them; `nameless_digest` is
    its digest but for the names.
    """

    module: fx.GraphModule
    example_inputs: tuple[Tensor, ...]
    binding: Binding
    names: tuple[str, ...]
    twins: tuple[str, ...]
    nameless_digest: str


class _Stop(BaseException):
    """Raised in place of running the captured graph; no handler on the way may take it for an error."""


def capture_unit(config: BuildConfig, shape: DecodeShape) -> Captured:
    """Capture one decode step of the config's model.

    Weights and KV pool are allocated without being touched, so a model needs no memory for being
    captured. Raises `ConfigError` for a model or dtype the reference decoder does not compute.
    """
    model, inputs = build_program(config, shape)
    kv_caches = allocate_kv_caches(
        model.architecture,
        model_dtype(config),
        _EXAMPLE_NUM_BLOCKS,
        config.serve.block_size,
        allocate=torch.empty,
    )
    mark_num_blocks_symbolic(kv_caches)
    received: list[tuple[fx.GraphModule, Sequence[Any]]] = []

    def backend(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., NoReturn]:
        received.append((module, example_inputs))
        return _stop

    step = torch.compile(one_shape_callable(model), backend=backend, dynamic=False, fullgraph=True)
    with torch.no_grad(), suppress(_Stop):
        step(*inputs, kv_caches)
    [(module, example_inputs)] = received
    return capture_graph(module, example_inputs, model.output_names)


def one_shape_callable(model: nn.Module) -> Callable[..., Any]:
    """The model's `forward` as a function of its own, to be compiled for one shape.

    Dynamo counts recompiles per code object and gives up at eight: with a copy of the code for every
    shape no number of shapes comes near that.
    """
    forward = type(model).forward
    own = FunctionType(
        forward.__code__.replace(),
        forward.__globals__,
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    own.__kwdefaults__ = forward.__kwdefaults__
    return MethodType(own, model)


def capture_graph(
    module: fx.GraphModule, example_inputs: Sequence[Any], output_names: Sequence[str] | None = None
) -> Captured:
    """What a Dynamo backend was called with, digested and ready to compile.

    `output_names` in the graph's order; without them outputs are named by position. Raises
    `ToolchainRefusal` for a graph that cannot be digested or compiled ahead of time: training,
    autocast, inputs other than tensors, sizes and layer names, outputs other than tensors.
    """
    _refuse_modes(example_inputs)
    plain, kept, baked = plain_graph(module)
    sources = [node._dynamo_source.name for node in module.graph.find_nodes(op="placeholder")]
    names = _input_names([sources[index] for index in kept])
    nodes = plain.graph.find_nodes(op="placeholder")
    return Captured(
        graph_digest=graph_digest(module),
        graph=InductorGraph(
            module=plain,
            # Export leaves marks on the tensors it is given; Dynamo guards on the caller's own.
            example_inputs=tuple(example_inputs[index].detach() for index in kept),
            binding=Binding(
                inputs=tuple(
                    _input_spec(name, index, node.meta["example_value"])
                    for name, index, node in zip(names, kept, nodes, strict=True)
                ),
                outputs=_outputs(plain, output_names),
            ),
            names=baked,
            twins=twinned_ops(plain.graph),
            nameless_digest=nameless_digest(module),
        ),
    )


def plain_graph(module: fx.GraphModule) -> tuple[fx.GraphModule, list[int], tuple[str, ...]]:
    """A copy of a Dynamo graph that takes tensors only; the positions of the placeholders that are left,
    in order; the layer names that were written into it. Raises as `capture_graph` does."""
    graph = copy.deepcopy(module.graph)
    placeholders = list(graph.find_nodes(op="placeholder"))
    read_data = torch._C._autograd._get_data_attr  # type: ignore[attr-defined]
    for node in graph.find_nodes(op="call_function", target=read_data):
        # `.data`: the same tensor to a program that computes no gradients, and nothing export traces.
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
    names = bake_names(graph)
    read_sizes_off_tensors(graph)
    left = frozenset(graph.find_nodes(op="placeholder"))
    kept = [index for index, node in enumerate(placeholders) if node in left]
    return fx.GraphModule(module, graph), kept, names


def _stop(*_inputs: Any) -> NoReturn:
    raise _Stop


def _refuse_modes(example_inputs: Sequence[Any]) -> None:
    """Modes the graph does not show, under which it would compute something else."""
    if torch.is_autocast_enabled("cpu"):
        raise ToolchainRefusal(
            "a graph met under autocast cannot be compiled ahead of time: the program would not cast",
            hint="convert the model to the dtype it shall run in",
        )
    if torch.is_grad_enabled() and any(
        isinstance(value, Tensor) and value.requires_grad for value in example_inputs
    ):
        raise ToolchainRefusal(
            "a graph whose inputs require gradients cannot be compiled ahead of time",
            hint="run the model under torch.inference_mode() or torch.no_grad()",
        )


def _input_names(sources: Sequence[str]) -> list[str]:
    """Stable names of inputs from where Dynamo found them: `L['self']._modules['norm']
    ._parameters['weight']` is `norm.weight`, `L['kv_caches'][0][1]` is `kv_caches.0.1`, anything else
    stays what it is."""
    names = [_input_name(source) for source in sources]
    return names if len(set(names)) == len(names) else list(sources)


def _input_name(source: str) -> str:
    if attribute := _MODULE_ATTRIBUTE.fullmatch(source):
        path = re.findall(r"'([^']+)'", attribute["path"])
        root = [] if attribute["root"] == "self" else [attribute["root"]]
        return ".".join([*root, *path, attribute["leaf"]])
    if argument := _ARGUMENT.fullmatch(source):
        return ".".join([argument["root"], *re.findall(r"\d+", argument["path"])])
    return source


def _input_spec(name: str, placeholder: int, example: Tensor) -> InputSpec:
    return InputSpec(
        name=name,
        placeholder=placeholder,
        dtype=str(example.dtype).removeprefix("torch."),
        shape=tuple(_static(size) for size in example.shape),
        # The stride of a dimension of size 1 is never walked.
        strides=tuple(
            None if size == 1 else _static(stride)
            for size, stride in zip(example.shape, example.stride(), strict=True)
        ),
    )


def _static(size: int | torch.SymInt) -> int | None:
    return None if isinstance(size, torch.SymInt) else size


def _outputs(module: fx.GraphModule, names: Sequence[str] | None) -> tuple[str, ...]:
    [values] = module.graph.output_node().args
    assert isinstance(values, Sequence)
    for value in values:
        if not isinstance(value, fx.Node) or not isinstance(value.meta["example_value"], Tensor):
            raise ToolchainRefusal(f"the graph returns {value!r}; only tensors can be returned")
    if names is None:
        return tuple(str(index) for index in range(len(values)))
    assert len(names) == len(values)
    return tuple(names)
