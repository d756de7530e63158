"""What an engine compiles, compared with the plan.

The plan is what is expected: a program is *missing* when it is planned and the engine does not compile it,
*extra* when the engine compiles it and it is not planned, and of *other width* when each has it in a size
that the other has not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from neffbuild.config.serve import ServeConfig
from neffbuild.grid.bucketer import Bucketer
from neffbuild.grid.shapes import DecodeShape, PrefillShape, Shape, SymbolicShape

Shapes = frozenset[Shape]
Kind = Literal["missing", "extra", "other_width", "setting", "failed"]
KINDS: tuple[Kind, ...] = ("missing", "extra", "other_width", "setting", "failed")


@dataclass(frozen=True, slots=True)
class Difference:
    """`name` is a bucket name; of a `setting` the option, or `version`; of what `failed` also a key in the
    engine's cache, or what broke down. `plan` and `engine` are the shapes, where there are any; `detail` is
    for a person."""

    kind: Kind
    name: str
    detail: str
    plan: Shape | None = None
    engine: Shape | None = None


@dataclass(frozen=True, slots=True)
class Conformance:
    """`matching` counts programs that are planned and compiled; `not_covered` names what the engine
    compiles of a phase that the plan leaves out; `unread` says of entries in an engine's cache why it
    cannot be told what they are."""

    matching: int
    differences: tuple[Difference, ...]
    not_covered: tuple[str, ...] = ()
    unread: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def counts(self) -> dict[str, int]:
        """`counts` of `neffbuild.diff/1`."""
        counts = {"matching": self.matching}
        for kind in KINDS:
            counts[kind] = sum(one.kind == kind for one in self.differences)
        return counts | {"not_covered": len(self.not_covered), "unread": len(self.unread)}


@dataclass(frozen=True, slots=True)
class Expected:
    """The programs of a plan; `cannot_occur` are the shapes it leaves out, with the reason; `versions` are
    those of the tools in its keys, as far as they are known."""

    serve: ServeConfig
    bucketer: Bucketer
    shapes: frozenset[Shape]
    cannot_occur: Mapping[Shape, str]
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def symbolic(self) -> SymbolicShape | None:
        return next((one for one in self.shapes if isinstance(one, SymbolicShape)), None)

    @property
    def decode(self) -> frozenset[Shape]:
        """All but those of prefill."""
        return self.shapes - self.prefill

    @property
    def prefill(self) -> frozenset[Shape]:
        return frozenset(one for one in self.shapes if isinstance(one, PrefillShape))


def shape_differences(
    expected: Expected, planned: Shapes, compiled: Sequence[Shapes], others: Shapes
) -> list[Difference]:
    """The planned shapes and those an engine compiles.

    `compiled` has a set for each process that named all of its own, and none where no process did: then
    nothing is known to be missing. `others` are shapes it compiles beside those.
    """
    everywhere = frozenset[Shape].intersection(*compiled) if compiled else planned
    anywhere = others.union(*compiled)
    missing, extra = set(planned - everywhere), set(anywhere - planned)
    differences = []
    for key in _SAME_BUT_FOR_A_WIDTH:
        for plan, engine in _pairs(missing, extra, key):
            missing.remove(plan)
            extra.remove(engine)
            differences.append(
                Difference("other_width", plan.bucket_name, _width(plan, engine), plan, engine)
            )
    differences += [
        Difference(
            "missing",
            one.bucket_name,
            "planned, and not compiled by the engine"
            + (" in every process" if one in anywhere else ""),
            plan=one,
        )
        for one in missing
    ]
    differences += [
        Difference("extra", one.bucket_name, _why_extra(expected, one), engine=one) for one in extra
    ]
    return sorted(
        differences, key=lambda one: (KINDS.index(one.kind), _order(one.plan or one.engine))
    )


def _pairs(
    missing: Iterable[Shape], extra: Iterable[Shape], key: Callable[[Shape], Hashable]
) -> list[tuple[Shape, Shape]]:
    """Missing and extra shapes that have a key alone with one another. Two of either could be paired
    both ways, and are left as they are."""
    of_plan, of_engine = _grouped(missing, key), _grouped(extra, key)
    return [
        (plans[0], of_engine[value][0])
        for value, plans in of_plan.items()
        if len(plans) == len(of_engine.get(value, ())) == 1
    ]


def _grouped(
    shapes: Iterable[Shape], key: Callable[[Shape], Hashable]
) -> dict[Hashable, list[Shape]]:
    groups: defaultdict[Hashable, list[Shape]] = defaultdict(list)
    for shape in shapes:
        groups[key(shape)].append(shape)
    return groups


def _without_query_len(shape: Shape) -> Hashable:
    if isinstance(shape, DecodeShape):
        return shape.family, shape.num_seqs, shape.context_len
    if isinstance(shape, PrefillShape):
        return shape.family, shape.num_batched_tokens
    return shape


def _without_context_len(shape: Shape) -> Hashable:
    if isinstance(shape, DecodeShape):
        return shape.family, shape.num_seqs, shape.query_len
    return shape


_SAME_BUT_FOR_A_WIDTH = (_without_query_len, _without_context_len)


def _width(plan: Shape, engine: Shape) -> str:
    mine, theirs = _widths(plan), _widths(engine)
    differing = [name for name in mine if mine[name] != theirs[name]]
    planned, has = (
        ", ".join(f"{name} {widths[name]}" for name in differing) for widths in (mine, theirs)
    )
    return f"planned with {planned}; the engine has {has}"


def _widths(shape: Shape) -> dict[str, object]:
    if isinstance(shape, DecodeShape):
        return {
            "query_len": shape.query_len,
            "context_len": shape.context_len,
            "decode_context_length_buckets": "set" if shape.context_bucketed else "not set",
        }
    assert isinstance(shape, PrefillShape)
    return {"kv_segment": shape.kv_segment}


def _why_extra(expected: Expected, shape: Shape) -> str:
    reason = expected.cannot_occur.get(shape)
    return "compiled by the engine, and not planned" + (f": {reason}" if reason else "")


def _order(shape: Shape | None) -> tuple[str, int, int, int]:
    if isinstance(shape, DecodeShape):
        return shape.family.value, shape.num_seqs, shape.query_len, shape.context_len
    if isinstance(shape, PrefillShape):
        return shape.family.value, shape.num_batched_tokens, shape.kv_segment, 0
    return "", 0, 0, 0


def bucket_names(shapes: Iterable[Shape]) -> tuple[str, ...]:
    """The bucket names of shapes, in order."""
    return tuple(one.bucket_name for one in sorted(shapes, key=_order))


def covered(
    shapes: Collection[Shape], compiled: Iterable[Shapes], differences: Iterable[Difference]
) -> int:
    """How many of the shapes are compiled, by every process that should."""
    anywhere = frozenset[Shape]().union(*compiled)
    return len(
        anywhere.intersection(shapes).difference(one.plan for one in differences if one.plan)
    )
