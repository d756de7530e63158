"""A TorchNeuron without a device: importing it registers device and backend `neuron`, as the real one does.

It obeys the published variables, calls the neuronx-cc on PATH with the published command line, and files the
NEFF under the published name. Tensors of its device have no memory. How it shall misbehave is in
`torch_neuronx.json` beside the neuronx-cc on PATH, and what it was asked in `torch_neuronx.jsonl`. It imports
nothing of neffbuild.
"""

from __future__ import annotations

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_NO_PROGRAMS = ("aten.empty.memory_format", "aten.empty_strided.default")


def _without_memory(operator, *args, **kwargs):
    if str(operator) == "aten._copy_from.default":
        return args[1]
    if str(operator) not in _NO_PROGRAMS:
        from torch_neuronx import backend

        # An operator by itself is a program of its own.
        backend.compile_text(f"module eager {operator}", "-O1")

    def described(tensor):
        return torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta"
        )

    args, kwargs = tree_map_only(torch.Tensor, described, (args, kwargs))
    if "device" in kwargs:
        kwargs["device"] = "meta"
    return tree_map_only(
        torch.Tensor,
        lambda tensor: torch._C._acc.create_empty_tensor(list(tensor.shape), tensor.dtype),
        operator(*args, **kwargs),
    )


_setup_privateuseone_for_python_backend("neuron")
_library = torch.library.Library("_", "IMPL")
_library.fallback(_without_memory, "PrivateUse1")

from torch_neuronx import backend  # noqa: E402, F401
