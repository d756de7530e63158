"""XLA's CPU compiler as an independent reader of what was captured. jaxlib alone, without jax."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy
import torch
from jaxlib import _jax, xla_client
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo
from torch import Tensor


class _OneDevice(xla_client.SingleDeviceSharding):
    """What jax adds to the class, as far as placing an array asks for it."""

    memory_kind = None

    def _to_xla_hlo_sharding(self, _dimensions: int) -> xla_client.HloSharding:
        return xla_client.HloSharding.replicate()


class XlaProgram:
    """A portable StableHLO artifact, compiled."""

    def __init__(self, artifact: bytes) -> None:
        self._client = xla_client.make_cpu_client()
        self._devices = self._client.local_devices()
        self._sharding = _OneDevice(self._devices[0])
        with ir.Context() as context:
            stablehlo.register_dialect(context)
            self._executable = self._client.compile_and_load(
                stablehlo.deserialize_portable_artifact(context, artifact),
                _jax.DeviceList(tuple(self._devices)),
                xla_client.CompileOptions(),
            )

    @property
    def text(self) -> str:
        """The compiled program, as HLO."""
        return self._executable.get_hlo_text()

    def run(self, arguments: Sequence[Tensor]) -> tuple[list[Tensor], list[int]]:
        """Results, and the positions of the arguments whose memory went to a result."""
        given = [self._placed(tensor) for tensor in arguments]
        results = self._executable.execute_sharded(given)
        arrays = [shards[0] for shards in results.disassemble_into_single_device_arrays()]
        taken = [position for position, array in enumerate(given) if array.is_deleted()]
        return [
            _tensor(numpy.array(array._single_device_array_to_np_array_did_copy()[0]))
            for array in arrays
        ], taken

    def _placed(self, tensor: Tensor) -> Any:
        array = _array(tensor)
        described = SimpleNamespace(
            shape=array.shape, dtype=array.dtype, ndim=array.ndim, weak_type=False
        )
        return xla_client.batched_device_put(
            described,
            self._sharding,
            [array],
            self._devices,
            force_copy=True,
            host_buffer_semantics=xla_client.HostBufferSemantics.IMMUTABLE_ONLY_DURING_CALL,
            enable_x64=True,
        )


def _array(tensor: Tensor) -> numpy.ndarray:
    if tensor.dtype is torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.contiguous().numpy()


def _tensor(array: numpy.ndarray) -> Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(numpy.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
