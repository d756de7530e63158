"""Compiles one step of the reference decoder through TorchNeuron, and ends. A program of its own: the first
argument is a file that names config and shape; where NEFFs go, the environment says.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

_DEVICE = "neuron"


def main(path: str) -> None:
    """Compile what the file `path` names; of what else was compiled on the way no NEFF is left."""
    import torch
    from torch.utils._pytree import tree_map

    from neffbuild.grid.kv_blocks import num_kv_blocks
    from neffbuild.models.decode import allocate_kv_caches, build_program, model_dtype
    from neffbuild.toolchain.neuronx.torch_neuronx import requested

    # Registers the device and the backend.
    import_module("torch_neuronx")
    config, shape = requested(Path(path).read_bytes())
    model, inputs = build_program(config, shape)
    # No operator runs on the device for it: each would be a program of its own to compile.
    _move_empty(model)
    inputs = tree_map(lambda tensor: tensor.to(_DEVICE), inputs)
    kv_caches = allocate_kv_caches(
        model.architecture,
        model_dtype(config),
        num_kv_blocks(config.serve),
        config.serve.block_size,
        allocate=partial(torch.empty, device=_DEVICE),
    )
    for neff in Path(os.environ["TORCH_NEURONX_NEFF_CACHE_DIR"]).glob("*/*/*.neff"):
        neff.unlink()
    step = torch.compile(model, backend="neuron", fullgraph=True, dynamic=False)
    with torch.no_grad():
        step(*inputs, kv_caches)


def _move_empty(model: nn.Module) -> None:
    """A tied head stays one tensor, and one argument of the program, which `to_empty` makes two."""
    named = list(model.named_parameters(remove_duplicate=False))
    first = {parameter: name for name, parameter in reversed(named)}
    model.to_empty(device=_DEVICE)
    for name, parameter in named:
        if name != first[parameter]:
            folder, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(folder), leaf, model.get_parameter(first[parameter]))


if __name__ == "__main__":
    main(sys.argv[1])
