"""In which order units are started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from neffbuild.grid.shapes import DecodeShape, Shape
from neffbuild.toolchain.base import Unit


def longest_first(units: Sequence[Unit], measured: Mapping[str, float]) -> list[Unit]:
    """The units, longest expected compile first: a long one started last would run alone at the end.

    `measured` are compile seconds of earlier runs by key. A unit without any is scaled from those that
    have some by the work of its shape; equal expectations keep the order they came in.
    """
    expected = expected_seconds(units, measured)
    return sorted(units, key=lambda unit: -expected[unit.key])


def expected_seconds(units: Sequence[Unit], measured: Mapping[str, float]) -> dict[str, float]:
    """key → expected compile seconds, in arbitrary units where nothing was measured."""
    works = {unit.key: work(unit.shape) for unit in units}
    rates = [measured[key] / of_shape for key, of_shape in works.items() if key in measured]
    rate = median(rates) if rates else 1.0
    return {key: measured.get(key, rate * of_shape) for key, of_shape in works.items()}


def work(shape: Shape) -> int:
    """Attention scores one step of the shape computes, which compilers unroll and tile over."""
    if isinstance(shape, DecodeShape):
        return shape.num_seqs * shape.query_len * shape.context_len
    return shape.num_batched_tokens * max(shape.kv_segment, shape.num_batched_tokens)
