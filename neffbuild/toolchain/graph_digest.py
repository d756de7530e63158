"""The digest of a captured FX graph: equal for equal programs, whoever traced them and where.

In it, in order: of every node its op, what it calls, its arguments (other nodes by position) and its
value's description: of a tensor shape, strides, dtype and device; of a symbolic size its expression,
symbols renamed in order of appearance; of anything opaque its value, unless it is an input that nothing
uses. Not in it: names of inputs and nodes, comments, stack traces, paths, example values' contents, how
large a symbolic size happened to be.

What a graph calls is in it by name alone, which says what is computed where the name is torch's own, whose
version is in every key, or where the program calls the op as a whole when it runs. Any other function's
body would be traced into the program behind a name that stays the same when the body changes: refused.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx
from torch._library.fake_class_registry import FakeScriptObject
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from neffbuild.cache.canonical import digest_bytes, digest_document
from neffbuild.config.errors import ToolchainRefusal

SCHEMA = "neffbuild.graph/1"

_VERSIONED = frozenset({"torch", "builtins", "_operator", "operator", "math", "_functools"})
"""Packages whose functions are what the versions in the key say: torch's and Python's own."""
_BUILT_IN = frozenset({"aten", "prim", "prims"})


def graph_digest(module: fx.GraphModule) -> str:
    """SHA-256 of the canonical walk of a graph as Dynamo hands it to a backend (every placeholder has
    its fake value in `meta["example_value"]`).

    Raises `ToolchainRefusal` for a graph that holds a value with no stable description.
    """
    return digest_document({"schema": SCHEMA, "nodes": _Walk().nodes(module)})


def nameless_digest(module: fx.GraphModule) -> str:
    """The digest without the values of opaque inputs: two graphs that share it differ in those alone."""
    return digest_document({"schema": SCHEMA, "nodes": _Walk(_opaque_kind).nodes(module)})


class _Walk:
    """Describes one graph and its subgraphs as a JSON document. State: positions of the nodes met and
    canonical names of the symbols met."""

    def __init__(self, opaque: Callable[[FakeScriptObject], Any] = lambda value: value) -> None:
        """`opaque` gives what stands for an opaque input."""
        self._opaque = opaque
        self._symbols: dict[sympy.Basic, sympy.Symbol] = {}
        self._positions: dict[fx.Node, int] = {}

    def nodes(self, module: fx.GraphModule) -> list[Any]:
        return [self._node(module, node) for node in module.graph.nodes]

    def _node(self, module: fx.GraphModule, node: fx.Node) -> list[Any]:
        self._positions[node] = len(self._positions)
        return [
            node.op,
            self._target(module, node),
            self._value(node.args),
            self._value(node.kwargs),
            self._example(node),
        ]

    def _target(self, module: fx.GraphModule, node: fx.Node) -> Any:
        match node.op:
            case "placeholder" | "output":
                return None
            case "call_method":
                return node.target
            case "get_attr" | "call_module":
                return self._attribute(operator.attrgetter(str(node.target))(module))
            case _:
                return _callable_name(node.target)

    def _attribute(self, attribute: object) -> Any:
        """A subgraph or a constant that the graph carries."""
        if isinstance(attribute, fx.GraphModule):
            return ["graph", self.nodes(attribute)]
        if isinstance(attribute, torch.Tensor):
            content = attribute.detach().contiguous().reshape(-1).view(torch.uint8)
            return [*self._tensor(attribute), digest_bytes(content.numpy().tobytes())]
        return self._value(attribute)

    def _example(self, node: fx.Node) -> Any:
        if "example_value" in node.meta:
            value = node.meta["example_value"]
            if node.op == "placeholder" and isinstance(value, FakeScriptObject):
                value = self._opaque(value) if node.users else _opaque_kind(value)
            return self._value(value)
        if node.op == "placeholder":
            raise ToolchainRefusal(
                f"the graph's input {node.name!r} has no example value: it was not captured by Dynamo"
            )
        return None

    def _tensor(self, tensor: torch.Tensor) -> list[Any]:
        sizes = [self._value(size) for size in tensor.shape]
        strides = [self._value(stride) for stride in tensor.stride()]
        return ["tensor", sizes, strides, str(tensor.dtype), str(tensor.device)]

    def _value(self, value: Any) -> Any:
        """Tagged, so that values of different types never describe alike."""
        if isinstance(value, fx.Node):
            return ["node", self._positions[value]]
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return ["symbol", self._expression(value.node.expr)]
        return self._container(value)

    def _container(self, value: Any) -> Any:
        if isinstance(value, slice):
            return ["slice", *(self._value(part) for part in (value.start, value.stop, value.step))]
        if isinstance(value, Mapping):
            return ["map", *([self._value(k), self._value(v)] for k, v in value.items())]
        if isinstance(value, Sequence) and not isinstance(value, str | bytes):
            kind = "list" if isinstance(value, list) else "tuple"
            return [kind, *(self._value(item) for item in value)]
        return _plain(value)

    def _expression(self, expression: sympy.Basic) -> str:
        # In the order of their appearance in the graph; those new here by their own name, which
        # Dynamo derives from where a size comes from, not from a counter or an address.
        for symbol in sorted(expression.free_symbols, key=str):
            if symbol not in self._symbols:
                self._symbols[symbol] = sympy.Symbol(f"s{len(self._symbols)}", integer=True)
        return str(expression.xreplace(self._symbols))


def _opaque_kind(value: FakeScriptObject) -> Any:
    return "opaque", _callable_name(type(value.real_obj))


def _plain(value: Any) -> Any:
    """A value that is no container: a constant, or an opaque object by its own representation."""
    if isinstance(value, FakeScriptObject):
        value = value.real_obj
    # An enum may be an int or a str too.
    if isinstance(value, enum.Enum):
        return ["enum", type(value).__qualname__, value.name]
    if value is None or value is Ellipsis:
        return repr(value)
    if isinstance(value, bool | int | str):
        return [type(value).__name__, value]
    if isinstance(value, float | complex | bytes):
        return [type(value).__name__, repr(value)]
    if isinstance(value, torch.dtype | torch.device | torch.layout | torch.memory_format):
        return [type(value).__name__, str(value)]
    # The protocol of torch's opaque value types: an expression that rebuilds the object.
    if hasattr(value, "__fx_repr__"):
        return ["opaque", type(value).__qualname__, value.__fx_repr__()[0]]
    if callable(value):
        return ["callable", _callable_name(value)]
    raise ToolchainRefusal(
        f"the graph holds a {type(value).__module__}.{type(value).__qualname__}, which has no stable "
        "description: two different graphs could get one digest",
        hint="register it as an opaque value type (torch._library.opaque_object) or keep it out of "
        "the compiled function",
    )


def _callable_name(target: Any) -> str:
    """Where a function is found, without addresses.

    Raises `ToolchainRefusal` for one whose body is traced into the program and is not torch's.
    """
    if isinstance(target, OpOverload | OpOverloadPacket):
        _refuse_decomposed(target)
        return str(target)
    if isinstance(target, HigherOrderOperator):
        return str(target)
    if (name := getattr(target, "__qualname__", None)) is None:
        raise ToolchainRefusal(f"the graph calls {target!r}, which has no name")
    module = _home(target)
    # A class is a kind of value, not a body.
    if module.partition(".")[0] not in _VERSIONED and not isinstance(target, type):
        raise ToolchainRefusal(
            f"the graph calls {module}.{name}, whose code would become part of the program and is not in "
            "its key: a later version of the function would be served the old program",
            value=f"{module}.{name}",
            hint="let torch.compile trace it (no allow_in_graph), or make it an op with "
            "torch.library.custom_op, which the program calls when it runs",
        )
    return f"{module}.{name}"


def _refuse_decomposed(op: OpOverload | OpOverloadPacket) -> None:
    """An op of somebody else's that torch takes apart: what is compiled is what it is made of."""
    packet = op.overloadpacket if isinstance(op, OpOverload) else op
    namespace, _, name = str(packet).partition(".")
    if namespace in _BUILT_IN:
        return
    names = packet.overloads()
    overloads = [op] if isinstance(op, OpOverload) else [getattr(packet, one) for one in names]
    for overload in overloads:
        registered = overload.name()
        if torch._C._dispatch_has_kernel_for_dispatch_key(registered, "CompositeImplicitAutograd"):
            raise ToolchainRefusal(
                f"the graph calls the custom op {namespace}::{name}, which torch takes apart: its body "
                "would become part of the program and is not in its key",
                value=registered,
                hint="implement the op for CompositeExplicitAutograd or for a device, with a fake "
                "implementation for tracing, so that the program calls it when it runs",
            )


def _home(target: Any) -> str:
    module = getattr(target, "__module__", None) or getattr(
        getattr(target, "__objclass__", None), "__module__", "builtins"
    )
    return str(module)
