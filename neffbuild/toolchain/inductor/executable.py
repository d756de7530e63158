"""Loading an artifact and calling it: no Dynamo, no inductor, no C++ compiler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from neffbuild.config.errors import ConfigError, IntegrityError, ToolchainRefusal
from neffbuild.toolchain.inductor.binding import (
    BINDING_FILE,
    Binding,
    BindingFile,
    InputSpec,
    Requirements,
)
from neffbuild.toolchain.inductor.cpu_level import host_features
from neffbuild.toolchain.inductor.opaque import register_twins
from neffbuild.toolchain.inductor.options import PROGRAM

Run = Callable[[list[Tensor]], list[Tensor]]


def load_executable(files: Path, recipe: Mapping[str, Any]) -> Executable:
    """Load the artifact whose files lie in `files` under their names.

    `recipe` is the entry's, of a unit or of a graph. Raises `ToolchainRefusal` when this process's
    torch or this host's CPU is not what the artifact was built for, before any of it is run;
    `IntegrityError` for a binding that is missing or malformed.
    """
    try:
        content = (files / BINDING_FILE).read_bytes()
    except OSError as error:
        raise IntegrityError(f"the artifact in {files} has no {BINDING_FILE}") from error
    file = BindingFile.from_json(content)
    _check_host(file.requires, recipe)
    register_twins(file.requires.twins)
    path = files / f"{PROGRAM}.wrapper.so"
    try:
        runner = torch._C._aoti.AOTIModelContainerRunnerCpu(str(path), 1)
    except RuntimeError as error:
        raise ToolchainRefusal(
            f"{path} cannot be loaded: {str(error).splitlines()[0]}",
            hint="install the library it names; libgomp and libstdc++ are of the host, not of torch",
        ) from error
    return Executable(file.binding, runner.run)


class Executable:
    """A loaded program. `inputs` and `outputs` are names in the program's order."""

    def __init__(self, binding: Binding, run: Run) -> None:
        self._binding = binding
        self._run = run
        self.inputs = tuple(spec.name for spec in binding.inputs)
        self.outputs = binding.outputs

    def bind(self, tensors: Mapping[str, Tensor]) -> BoundExecutable:
        """Fix some inputs, named as in `inputs`; others in `tensors` are passed over, so that a whole
        model's tensors can be given. The tensors are kept, not copied.

        Raises `ConfigError` for one of another dtype, shape or layout than the program takes.
        """
        given = {spec: tensors[spec.name] for spec in self._binding.inputs if spec.name in tensors}
        for spec, tensor in given.items():
            _check_tensor(spec, tensor)
        return BoundExecutable(self._binding, self._run, given)

    def call_graph(self, *placeholders: Any) -> tuple[Tensor, ...]:
        """Call as Dynamo calls what its backend returned: every placeholder of the captured graph by
        position, checked by Dynamo's guards and not again here."""
        inputs = [placeholders[spec.placeholder] for spec in self._binding.inputs]
        return tuple(self._run(inputs))


class BoundExecutable:
    """A program some of whose inputs are fixed; a call gives the rest. `free` names them."""

    def __init__(self, binding: Binding, run: Run, given: Mapping[InputSpec, Tensor]) -> None:
        self._run = run
        self._inputs = [given.get(spec) for spec in binding.inputs]
        self._free = [
            (position, spec) for position, spec in enumerate(binding.inputs) if spec not in given
        ]
        self.free = tuple(spec.name for _, spec in self._free)

    def __call__(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Run once; outputs in the order of `Executable.outputs`.

        Raises `ConfigError` for an input that is missing or not what the program takes: the program
        itself would read past its end.
        """
        inputs: list[Any] = list(self._inputs)
        for position, spec in self._free:
            try:
                tensor = tensors[spec.name]
            except KeyError:
                raise ConfigError(
                    f"the program needs its input {spec.name!r}",
                    field=spec.name,
                    hint=f"pass {', '.join(self.free)}",
                ) from None
            _check_tensor(spec, tensor)
            inputs[position] = tensor
        return tuple(self._run(inputs))


def _check_host(requires: Requirements, recipe: Mapping[str, Any]) -> None:
    platform = recipe["toolchain"] if recipe["kind"] == "unit" else recipe["platform"]
    for built_for in (requires.torch, platform["versions"]["torch"]):
        if built_for != torch.__version__:
            raise ToolchainRefusal(
                f"the artifact is for torch {built_for}, this process runs {torch.__version__}",
                field="toolchain.versions.torch",
                value=built_for,
                hint="serve with the torch it was compiled for, or compile for this one",
            )
    if missing := requires.cpu_features - host_features():
        raise ToolchainRefusal(
            f"the artifact is for {platform['target']}; this host's CPU lacks "
            f"{', '.join(sorted(missing))}",
            field="toolchain.target",
            value=platform["target"],
            hint="compile with a toolchain.target that every serving host has",
        )


def _check_tensor(spec: InputSpec, tensor: Tensor) -> None:
    if (
        str(tensor.dtype) != f"torch.{spec.dtype}"
        or not _matches(spec.shape, tensor.shape)
        or not _matches(spec.strides, tensor.stride())
    ):
        raise ConfigError(
            f"input {spec.name!r} is {tensor.dtype} of shape {list(tensor.shape)} and strides "
            f"{list(tensor.stride())}; the program takes torch.{spec.dtype} of shape "
            f"{_shown(spec.shape)} and strides {_shown(spec.strides)}",
            field=spec.name,
            hint="pass tensors of the shape the program was compiled for",
        )


def _matches(expected: Sequence[int | None], actual: Sequence[int]) -> bool:
    return len(expected) == len(actual) and all(
        size in (None, given) for size, given in zip(expected, actual, strict=True)
    )


def _shown(sizes: Iterable[int | None]) -> str:
    return "[" + ", ".join("any" if size is None else str(size) for size in sizes) + "]"
