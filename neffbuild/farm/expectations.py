"""What compiling a unit is expected to take: measured, else scaled from its neighbours, else assumed.

The rules are pure and depend on nothing but their arguments, so every machine that knows the same
measurements expects the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import nsmallest
from math import exp, log, log2

from neffbuild.cache.canonical import digest_document
from neffbuild.config.build import BuildConfig
from neffbuild.grid.shapes import DecodeShape, Family, PrefillShape, Shape
from neffbuild.toolchain.base import Expectation, Toolchain, Unit

_OTHER_FAMILY = 4.0
"""How far apart, in doublings, the programs of two families are taken to be."""
_MOST_NEIGHBOURS = 8
_SAME = 0.05
"""Distance of a unit to itself under another version of the toolchain: nearly all of the weight."""

_DEFAULT_SECONDS = 60.0
_DEFAULT_MEMORY = 1 << 30
_DEFAULT_SCRATCH = 256 << 20
_DEFAULT_WORK = 4096.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured figure (seconds or bytes) of a shape of the model in question."""

    shape: Shape
    value: float


def expected_seconds(
    units: Sequence[Unit],
    measured: Mapping[str, float],
    prior: Callable[[Shape], float],
    neighbours: Iterable[Sample] = (),
) -> dict[str, float]:
    """key → expected compile seconds of units of one serve config.

    `measured` are compile seconds by key, of these units or others; `prior` says what a shape takes
    where nothing is known; `neighbours` are measurements of the same model beside those of `units`
    (other shapes, or other versions of the toolchain). Any figure that is positive and scales with the
    shape can be expected the same way.
    """
    samples = [Sample(unit.shape, measured[unit.key]) for unit in units if unit.key in measured]
    scale = scaled_from([*samples, *neighbours], prior)
    return {
        unit.key: measured[unit.key] if unit.key in measured else scale(unit.shape)
        for unit in units
    }


def scaled_from(
    samples: Iterable[Sample], prior: Callable[[Shape], float]
) -> Callable[[Shape], float]:
    """What a shape is expected to take, given what others took.

    The prior says how a figure grows with the shape; how far it is off is read from the nearest samples,
    the nearer the more (inverse square of the distance in doublings of tokens and of context), on a
    logarithmic scale. So beyond the measured part of a grid the prior's growth goes on from its edge,
    and no regression can run away. Without samples it is the prior itself.
    """
    by_shape: dict[Shape, list[float]] = defaultdict(list)
    for sample in samples:
        if sample.value > 0:
            by_shape[sample.shape].append(log(sample.value / prior(sample.shape)))
    known = [(_place(shape), sum(errors) / len(errors)) for shape, errors in by_shape.items()]

    @cache
    def scale(shape: Shape) -> float:
        place = _place(shape)
        near = nsmallest(
            _MOST_NEIGHBOURS, ((_apart(place, other), error) for other, error in known)
        )
        if not near:
            return prior(shape)
        weights = [1 / (apart + _SAME) ** 2 for apart, _ in near]
        total = sum(weight * error for weight, (_, error) in zip(weights, near, strict=True))
        return prior(shape) * exp(total / sum(weights))

    return scale


def distance(one: Shape, other: Shape) -> float:
    """How far apart two shapes are: doublings of tokens and of context between them."""
    return _apart(_place(one), _place(other))


_Place = tuple[float, float, Family]
"""Where a shape lies: doublings of tokens and of context, and its family."""


def _place(shape: Shape) -> _Place:
    tokens, context = _axes(shape)
    return log2(tokens), log2(context), shape.family


def _apart(one: _Place, other: _Place) -> float:
    families = 0.0 if one[2] is other[2] else _OTHER_FAMILY
    return abs(one[0] - other[0]) + abs(one[1] - other[1]) + families


def work(shape: Shape) -> int:
    """Attention scores one step of the shape computes, which compilers unroll and tile over."""
    tokens, context = _axes(shape)
    return tokens * context


def default_prior(config: BuildConfig, shape: Shape) -> Expectation:
    """The prior of a toolchain that has none: a minute for 4096 scores (32 tokens over 128 positions),
    growing with the square root of them; 1 GiB of memory and 256 MiB of scratch for any shape."""
    return Expectation(
        seconds=_DEFAULT_SECONDS * (work(shape) / _DEFAULT_WORK) ** 0.5,
        memory_bytes=_DEFAULT_MEMORY,
        scratch_bytes=_DEFAULT_SCRATCH,
    )


def prior_of(toolchain: Toolchain) -> Callable[[BuildConfig, Shape], Expectation]:
    """The toolchain's own prior, or the default where it has none."""
    own: Callable[[BuildConfig, Shape], Expectation] | None = getattr(toolchain, "prior", None)
    return own or default_prior


def kin(unit: Unit) -> str:
    """A digest that the units of one model for one compiler share, whatever their shapes and the
    compiler's version: their measurements say something about each other."""
    recipe = unit.recipe
    toolchain = recipe["toolchain"]
    return digest_document(
        {
            "model": recipe["model"],
            "tensor_parallel_size": recipe["serve"].get("tensor_parallel_size"),
            "dtype": recipe["serve"].get("dtype"),
            "toolchain": {
                name: toolchain[name] for name in ("toolchain", "route", "target", "flags")
            },
        }
    )


def _axes(shape: Shape) -> tuple[int, int]:
    """Tokens of one step and the KV positions each may attend to."""
    if isinstance(shape, DecodeShape):
        return shape.num_tokens, shape.context_len
    if isinstance(shape, PrefillShape):
        return shape.num_batched_tokens, max(shape.kv_segment, shape.num_batched_tokens)
    return 1, 1  # nothing is unrolled over a size that is not known
