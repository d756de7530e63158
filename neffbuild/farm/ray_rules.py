"""What a unit asks of a Ray cluster, and whether any of its nodes could ever give it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

DEVICE = "neuron_cores"
"""Ray's own name for the cores of Neuron devices; it finds them by itself on a node that has some."""

_WHOLE = ("memory", "CPU")
_OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
"""Resources that Ray takes as options of their own, by the names its nodes report them under."""


@dataclass(frozen=True, slots=True)
class Node:
    """A living node: its id, host name, and what all of it has (memory in bytes)."""

    id: str
    host: str
    resources: Mapping[str, float]


def asked(
    *, cpus: int, needs_device: bool, memory: int | None, own: Mapping[str, float]
) -> dict[str, float]:
    """Resource → amount that one unit asks for: `cpus`, `memory` bytes where that is known, a core of
    a device where it needs one; `own`, the config's, is added and wins."""
    resources = {"CPU": float(cpus)}
    if needs_device:
        resources[DEVICE] = 1.0
    if memory is not None:
        resources["memory"] = float(memory)
    return {**resources, **own}


def alone_on(resources: Mapping[str, float], nodes: Sequence[Node]) -> dict[str, float]:
    """What a unit that needs `resources` asks for so that nothing runs beside it: all cores and memory of
    the node with most memory that has the rest, even if that is less than it is expected to need (it has
    failed with less). The same `resources` where no node has the rest."""
    others = {name: n for name, n in resources.items() if name != "memory"}
    able = [node for node in nodes if not _lacking(others, node)]
    if not able:
        return dict(resources)
    largest = max(able, key=lambda node: [node.resources.get(name, 0.0) for name in _WHOLE])
    return {**resources, **{name: largest.resources.get(name, 0.0) for name in _WHOLE}}


def task_options(resources: Mapping[str, float]) -> dict[str, Any]:
    """The same as options of a Ray task."""
    custom = {name: amount for name, amount in resources.items() if name not in _OPTIONS}
    named = {_OPTIONS[name]: amount for name, amount in resources.items() if name in _OPTIONS}
    return {"num_cpus": 0, **named, "resources": custom}


def living_nodes(listed: Iterable[Mapping[str, Any]]) -> list[Node]:
    """What `ray.nodes()` lists, without the dead."""
    return [
        Node(node["NodeID"], node["NodeManagerHostname"], node["Resources"])
        for node in listed
        if node["Alive"]
    ]


def shortfall(resources: Mapping[str, float], nodes: Sequence[Node]) -> str | None:
    """Why no node could hold this even when idle, naming what is short; None where one could."""
    if not nodes:
        return "the cluster has no living node"
    lacking = [_lacking(resources, node) for node in nodes]
    if not all(lacking):
        return None
    for name, amount in resources.items():
        if all(name in missing for missing in lacking):
            most = max(node.resources.get(name, 0.0) for node in nodes)
            has = f"the largest has {_amount(name, most)}" if most else "none has any"
            return f"it asks for {_amount(name, amount)} of {name} on one node; {_of(nodes)}, {has}"
    wanted = " and ".join(f"{_amount(name, n)} of {name}" for name, n in resources.items())
    return f"it asks for {wanted} on one node; {_of(nodes)}, none has all of it"


def _lacking(resources: Mapping[str, float], node: Node) -> set[str]:
    return {name for name, n in resources.items() if node.resources.get(name, 0.0) < n}


def _of(nodes: Sequence[Node]) -> str:
    return "of 1 living node" if len(nodes) == 1 else f"of {len(nodes)} living nodes"


def _amount(name: str, amount: float) -> str:
    # Object stores and heaps are counted in bytes, everything else in pieces.
    return f"{amount / 2**30:.1f} GiB" if name.endswith("memory") else f"{amount:g}"
