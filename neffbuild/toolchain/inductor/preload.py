"""What every compile needs imported, imported once in the server that workers are forked from.

One thread: OpenMP's threads do not survive a fork, and one unit is one worker's work.
"""

import torch
import torch._dynamo
import torch._inductor.compile_fx
import torch.export

import neffbuild.toolchain.inductor.capture
import neffbuild.toolchain.inductor.compile  # noqa: F401

torch.set_num_threads(1)
