"""The shapes of a captured graph's inputs, read from its `graph.hlo` without XLA.

The file is a serialised `HloModuleProto`. Of that only `host_program_shape` is read (field 4): the
parameters of the entry computation, whatever else a release of XLA has added to the message.

Source: OpenXLA, `xla/service/hlo.proto` and `xla/xla_data.proto`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_HOST_PROGRAM_SHAPE = 4
_PARAMETERS = 1
_ELEMENT_TYPE, _DIMENSIONS, _TUPLE_SHAPES = 2, 3, 4
_INTEGERS = frozenset({2, 3, 4, 5, 6, 7, 8, 9})
_DEEPEST = 8


class NoShapes(ValueError):
    """A file that states no shapes. The message says why."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One input of a graph: its dimensions, and whether its elements are integers."""

    dims: tuple[int, ...]
    integer: bool


def parameter_shapes(graph: bytes) -> tuple[Parameter, ...]:
    """The inputs of a captured graph, in order; those of a tuple one after the other.

    Raises `NoShapes` for what is no `HloModuleProto`, and for one without inputs.
    """
    try:
        stated = [
            value
            for number, value in _fields(memoryview(graph))
            if number == _HOST_PROGRAM_SHAPE and isinstance(value, memoryview)
        ]
        if not stated:
            raise NoShapes("it states no host_program_shape")
        found = [
            parameter
            for number, value in _fields(stated[-1])
            if number == _PARAMETERS and isinstance(value, memoryview)
            for parameter in _parameters(value, 0)
        ]
    except IndexError as error:
        raise NoShapes("it is no HloModuleProto, or cut off") from error
    if not found:
        raise NoShapes("it has no inputs")
    return tuple(found)


def _parameters(shape: memoryview, depth: int) -> Iterator[Parameter]:
    if depth > _DEEPEST:
        raise NoShapes("its inputs are tuples of tuples without end")
    element, dims, parts = 0, list[int](), list[memoryview]()
    for number, value in _fields(shape):
        if number == _ELEMENT_TYPE and isinstance(value, int):
            element = value
        elif number == _DIMENSIONS:
            dims += [value] if isinstance(value, int) else _varints(value)
        elif number == _TUPLE_SHAPES and isinstance(value, memoryview):
            parts.append(value)
    if parts:
        for part in parts:
            yield from _parameters(part, depth + 1)
    else:
        yield Parameter(tuple(dims), element in _INTEGERS)


def _fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """(number, value) of each field. Raises `IndexError` for what is cut off or no message."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            value, at = _varint(message, at)
            yield number, value
            continue
        if kind == _BYTES:
            size, at = _varint(message, at)
        elif kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
        else:
            raise IndexError(kind)
        if number == 0 or at + size > len(message):
            raise IndexError(at)
        yield number, message[at : at + size]
        at += size


def _varints(packed: memoryview) -> list[int]:
    at, found = 0, []
    while at < len(packed):
        value, at = _varint(packed, at)
        found.append(value)
    return found


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 70:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise IndexError(at)
