"""What an AOTInductor compile of a shape is expected to take, before any was measured.

From 12 programs of a Llama with 4 layers of width 256 and its one-layer EAGLE3 draft: 12 to 28 s and
about 860 MiB each on one core. Time grows with the number of layers, each of which becomes kernels of
its own for the C++ compiler; hardly with the sizes in the shape, which are numbers in those kernels.
Weights are inputs of the program and never in memory while it is compiled.
"""

from __future__ import annotations

from neffbuild.config.build import BuildConfig
from neffbuild.grid.shapes import Family, Shape
from neffbuild.toolchain.base import Expectation

_BASE_SECONDS = 8.0
_LAYER_SECONDS = 4.0
_BASE_MEMORY = 800 << 20
_LAYER_MEMORY = 16 << 20
_SCRATCH = 64 << 20
_DRAFTS = frozenset({Family.DRAFT, Family.DRAFT_PREFILL})


def inductor_prior(config: BuildConfig, shape: Shape) -> Expectation:
    """Seconds and bytes by the layers of the model that the shape's family runs."""
    is_draft = shape.family in _DRAFTS and config.draft_model is not None
    layers = 1 if is_draft else config.model.num_hidden_layers
    return Expectation(
        seconds=_BASE_SECONDS + _LAYER_SECONDS * layers,
        memory_bytes=_BASE_MEMORY + _LAYER_MEMORY * layers,
        scratch_bytes=_SCRATCH,
    )
