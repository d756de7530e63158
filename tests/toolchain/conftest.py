"""One thread: on a busy machine OpenMP's spinning makes tiny tensors a hundred times slower."""

import torch

torch.set_num_threads(1)
