"""`binding.json`: how to call an artifact. A file of its own, so equal programs share theirs.

A captured program takes its inputs in the order the graph first uses them, weights and activations
interleaved. The binding gives each a stable name, and what must be true of a tensor passed for it: the
program itself does not check.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from neffbuild.cache.canonical import canonical_json
from neffbuild.config.errors import IntegrityError

SCHEMA = "neffbuild.inductor-binding/1"
BINDING_FILE = "binding.json"


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One input: its name, which placeholder of the captured graph it was, and the tensor it takes.

    `dtype` as torch names it (`float32`); a size or stride of None may be anything.
    """

    name: str
    placeholder: int
    dtype: str
    shape: tuple[int | None, ...]
    strides: tuple[int | None, ...]

    def document(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "placeholder": self.placeholder,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "strides": list(self.strides),
        }


@dataclass(frozen=True, slots=True)
class Binding:
    """Inputs and names of outputs, each in the program's order. Placeholders of symbolic sizes are no
    inputs: the program reads sizes off the tensors."""

    inputs: tuple[InputSpec, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Requirements:
    """What a process must have to load the program: an exact torch version, CPU features as
    `/proc/cpuinfo` names them, twins of custom ops (`neffbuild.toolchain.inductor.opaque`)."""

    torch: str
    cpu_features: frozenset[str]
    twins: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BindingFile:
    """The whole of `binding.json`."""

    binding: Binding
    requires: Requirements

    def to_json(self) -> bytes:
        return canonical_json(
            {
                "schema": SCHEMA,
                "inputs": [spec.document() for spec in self.binding.inputs],
                "outputs": list(self.binding.outputs),
                "requires": {
                    "torch": self.requires.torch,
                    "cpu_features": sorted(self.requires.cpu_features),
                    "twins": list(self.requires.twins),
                },
            }
        )

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Raises `IntegrityError` for anything that `to_json` does not write."""
        try:
            document = json.loads(data)
            if document["schema"] != SCHEMA:
                raise IntegrityError(
                    f"{BINDING_FILE} has schema {document['schema']!r}, expected {SCHEMA}",
                    hint="compile the unit again with this version of neffbuild",
                )
            requires = document["requires"]
            return cls(
                binding=Binding(
                    inputs=tuple(_input_spec(spec) for spec in document["inputs"]),
                    outputs=tuple(_text(name) for name in document["outputs"]),
                ),
                requires=Requirements(
                    torch=str(requires["torch"]),
                    cpu_features=frozenset(requires["cpu_features"]),
                    # Programs of before there were any have none.
                    twins=tuple(_text(twin) for twin in requires.get("twins", ())),
                ),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise IntegrityError(f"{BINDING_FILE} is malformed: {error!r}") from error


def _input_spec(document: Mapping[str, Any]) -> InputSpec:
    return InputSpec(
        name=str(document["name"]),
        placeholder=int(document["placeholder"]),
        dtype=str(document["dtype"]),
        shape=_sizes(document["shape"]),
        strides=_sizes(document["strides"]),
    )


def _text(name: Any) -> str:
    if not isinstance(name, str):
        raise TypeError(f"name {name!r}")
    return name


def _sizes(values: Iterable[Any]) -> tuple[int | None, ...]:
    return tuple(None if value is None else int(value) for value in values)
