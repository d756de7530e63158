"""The programs as the dispatcher knows them, computed without compiling: what a loader hands out."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, inference_mode
from torch.func import functional_call

from neffbuild.config.build import BuildConfig
from neffbuild.grid.shapes import DecodeShape
from neffbuild.models.decode import (
    allocate_kv_caches,
    build_program,
    model_dtype,
    named_inputs,
    named_kv_caches,
    named_tensors,
)


class EagerLoader:
    """Stands where `Loader` does."""

    def __init__(self, config: BuildConfig) -> None:
        self._config = config

    def load(self, shape: DecodeShape) -> EagerExecutable:
        return EagerExecutable(self._config, shape)


class EagerExecutable:
    """One shape's step of the reference models, inputs by the names a compiled program has."""

    def __init__(self, config: BuildConfig, shape: DecodeShape) -> None:
        self.model, example = build_program(config, shape)
        caches = allocate_kv_caches(
            self.model.architecture, model_dtype(config), 1, config.serve.block_size
        )
        self.weights = tuple(named_tensors(self.model))
        self.caches = tuple(named_kv_caches(caches))
        self.fields = {
            field: [f"{field}.{index}" for index in range(len(value))]
            if isinstance(value, tuple)
            else field
            for field, value in example._asdict().items()
        }
        self.step = tuple(named_inputs(example))
        self.shapes = {name: tensor.shape for name, tensor in named_inputs(example).items()}
        self.inputs = (*self.weights, *self.caches, *self.step)
        self.outputs = self.model.output_names

    def bind(self, tensors: Mapping[str, Tensor]) -> BoundEager:
        for name, size in self.shapes.items():
            assert tensors[name].shape == size, name
            assert tensors[name].is_contiguous()
        return BoundEager(self, {name: tensors[name] for name in self.inputs if name in tensors})


class BoundEager:
    def __init__(self, executable: EagerExecutable, given: Mapping[str, Tensor]) -> None:
        self.free = tuple(name for name in executable.inputs if name not in given)
        if self.free:
            return
        pool = [given[name] for name in executable.caches]
        self._model = executable.model
        self._weights = {name: given[name] for name in executable.weights}
        self._arguments = (
            *(
                given[names] if isinstance(names, str) else [given[name] for name in names]
                for names in executable.fields.values()
            ),
            list(zip(pool[::2], pool[1::2], strict=True)),
        )

    def __call__(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        with inference_mode():
            return functional_call(self._model, self._weights, self._arguments)
