"""What capturing the reference decoder needs imported, imported once in the server that workers are forked
from; nothing where it is not installed, and only captured graphs are compiled.

One thread: OpenMP's threads do not survive a fork, and one unit is one worker's work.
"""

from importlib.util import find_spec

if find_spec("torch_mlir") is not None and find_spec("torch") is not None:
    import torch

    import neffbuild.toolchain.neuronx.lowering  # noqa: F401

    torch.set_num_threads(1)
