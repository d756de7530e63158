"""The native route's graph: one decode step as portable StableHLO, what neuronx-cc is given.

The way there is that of Neuron's own native route, `torch.export` and torch-mlir, though not byte for
byte what vLLM Neuron's own lowering emits. What holds of the module:

- One function, `main`. Arguments: the step's inputs as the model's `forward` takes them, the KV pool
  (keys and values of each layer), every weight and buffer once. No weight is read while capturing, so
  the module does not depend on any. All sizes are fixed, the pool's too (`num_kv_blocks`).
- The KV pool is updated by value and aliased: each updated tensor is a result, and its argument carries
  `tf.aliasing_output`, the number of that result, which XLA turns into its input-output alias. A
  consumer that ignores the attribute computes the same and pays a copy of the pool.
- No f64: neuronx-cc refuses it (ESPP004). i64 stays where the model has it (positions, slots).
- StableHLO alone, serialised as an artifact of version `TARGET_VERSION`, which every consumer that
  knows a newer version reads. No source location, path or name of an input is in it.

The graph digest is the SHA-256 of those bytes: they are what the compiler reads, and their format is
fixed by their version, whereas the text depends on the printer of the day.
"""

from __future__ import annotations

from dataclasses import dataclass

from neffbuild.cache.canonical import digest_bytes
from neffbuild.config.errors import MissingExtra, ToolchainRefusal
from neffbuild.grid.shapes import DecodeShape
from neffbuild.toolchain.base import Captured, Unit

TARGET_VERSION = "1.0.0"
"""Of the StableHLO format: the oldest with a promise that later ones read it. Fixed, so that another
torch-mlir does not of itself change the bytes."""

ENTRY = "main"


@dataclass(frozen=True, slots=True)
class StableHLOGraph:
    """A module ready to compile.

    `module` is the portable artifact. `inputs` and `outputs` name its arguments and results, in order;
    an updated tensor of the KV pool has the name of the argument it replaces. `aliases` are pairs
    (result, argument), by position: the result is the argument's updated value and may take its memory.
    """

    module: bytes
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    aliases: tuple[tuple[int, int], ...]


def capture(unit: Unit) -> Captured:
    """Capture the unit's step; `Captured.graph` is a `StableHLOGraph`.

    Raises `ToolchainRefusal` for a shape other than a decode step and for a graph that cannot be
    lowered, `ConfigError` for a model the reference decoder does not compute, `MissingExtra` without
    torch-mlir.
    """
    if not isinstance(unit.shape, DecodeShape):
        raise ToolchainRefusal(
            f"the reference decoder has decode steps only, {unit.shape.bucket_name} is a "
            f"{unit.shape.family} one"
        )
    _need_torch_mlir()
    from neffbuild.toolchain.neuronx.lowering import lower_step

    graph = lower_step(unit.config, unit.shape)
    return Captured(graph_digest=digest_bytes(graph.module), graph=graph)


def module_text(module: bytes) -> str:
    """A portable artifact as StableHLO text, for reading. Raises `MissingExtra`."""
    _need_torch_mlir()
    from neffbuild.toolchain.neuronx.portable import deserialised

    return str(deserialised(module))


def _need_torch_mlir() -> None:
    try:
        import torch_mlir.fx  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"capturing for Neuron's native route needs {error.name}, which is not installed",
            hint="pip install 'neffbuild[neuron]'",
        ) from error
