"""What an AOTInductor compile of a shape is expected to take, before any was measured.

From 27 programs of a Llama of width 256 with 4 layers and its EAGLE3 draft with one: 21 to 32 s of one
core and 720 to 770 MiB each, the sizes in the shape (numbers in the generated kernels) without visible
effect; and from that Llama with 24 layers, 83 s and 1 GiB. (The first unit of a farm builds a precompiled
header as well: 20 s and 100 MiB.) Weights are inputs of the program and never in memory while it is
compiled.
"""

from __future__ import annotations

from neffbuild.config.build import BuildConfig
from neffbuild.grid.shapes import Family, Shape
from neffbuild.toolchain.base import Expectation

_BASE_SECONDS = 15.0
_LAYER_SECONDS = 2.8
_BASE_MEMORY = 713 << 20
_LAYER_MEMORY = 13 << 20
_SCRATCH = 64 << 20
_COMMON_LAYERS = 32
_DRAFTS = frozenset({Family.DRAFT, Family.DRAFT_PREFILL})


def inductor_prior(config: BuildConfig, shape: Shape) -> Expectation:
    """Seconds and bytes by the layers of the model that the shape's family runs."""
    is_draft = shape.family in _DRAFTS and config.draft_model is not None
    layers = 1 if is_draft else _layers(config)
    return Expectation(
        seconds=_BASE_SECONDS + _LAYER_SECONDS * layers,
        memory_bytes=_BASE_MEMORY + _LAYER_MEMORY * layers,
        scratch_bytes=_SCRATCH,
    )


def _layers(config: BuildConfig) -> int:
    """An estimate refuses nothing: a model that does not say how many it has gets the layers of a common
    one."""
    stated = config.model.text.get("num_hidden_layers")
    return stated if isinstance(stated, int) and stated > 0 else _COMMON_LAYERS
