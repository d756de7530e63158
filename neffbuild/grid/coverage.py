"""Coverage: which steps that can occur have no program.

A state is (family, live sequences, context need). States are checked by interval, one program's worth at a
time, and counted without being listed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from neffbuild.grid.bucketer import Bucketer
from neffbuild.grid.expand import Need, WarmUp, expand
from neffbuild.grid.kv_blocks import blocks_for_all
from neffbuild.grid.phases import Phase
from neffbuild.grid.reach import Reach, overlap, reachable
from neffbuild.grid.shapes import DecodeShape, Family, Shape, SymbolicShape


@dataclass(frozen=True, slots=True)
class UncoveredStates:
    """States that lack `missing`: `num_seqs` live sequences and `context_need` KV positions, both
    inclusive intervals."""

    family: Family
    num_seqs: tuple[int, int]
    context_need: tuple[int, int]
    missing: Shape
    reason: str

    def document(self) -> dict[str, Any]:
        """`uncovered_states[]` of `neffbuild.verify/1`."""
        return {
            "family": self.family.value,
            "num_seqs": list(self.num_seqs),
            "context_need": list(self.context_need),
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True)
class Coverage:
    """`prefill_gaps` are for information: a deployment may rule prefill out, the grid cannot."""

    states_checked: int
    uncovered: tuple[UncoveredStates, ...]
    prefill_gaps: tuple[UncoveredStates, ...]


def plan_coverage(
    bucketer: Bucketer, planned: Iterable[Shape], available: Collection[Shape]
) -> Coverage:
    """Check every decode state that can occur against those of the `planned` shapes that are
    `available`. A symbolic one covers whatever step comes, prefill included."""
    symbolic = [shape for shape in planned if isinstance(shape, SymbolicShape)]
    if not symbolic:
        return check_coverage(bucketer, available)
    reaches = {family: list(reachable(bucketer, family)) for family in bucketer.families}
    uncovered = tuple(
        UncoveredStates(
            family,
            (reach.num_seqs.start, reach.num_seqs.stop - 1),
            (reach.context_needs.start, reach.context_needs.stop - 1),
            shape,
            f"{shape.bucket_name} is missing",
        )
        for shape in symbolic
        if shape not in available
        for family, of_family in reaches.items()
        for reach in of_family
        if reach.num_seqs and reach.context_needs
    )
    return Coverage(sum(map(_count_states, reaches.values())), uncovered, ())


def check_coverage(bucketer: Bucketer, available: Collection[Shape]) -> Coverage:
    """Check every decode state that can occur against the `available` shapes. On a worker that only
    prefills none does."""
    available = frozenset(available)
    states_checked = 0
    uncovered: list[UncoveredStates] = []
    for family in bucketer.families if Phase.DECODE in bucketer.phases else ():
        reaches = reachable(bucketer, family)
        states_checked += _count_states(reaches)
        uncovered += _uncovered(bucketer, family, reaches, available)
    return Coverage(states_checked, tuple(uncovered), tuple(prefill_gaps(bucketer, available)))


def _count_states(reaches: Iterable[Reach]) -> int:
    """Distinct (live sequences, context need) in boxes whose ranges of sequences are equal or
    disjoint: steps of several query lengths are one state."""
    needs: defaultdict[range, list[range]] = defaultdict(list)
    for reach in reaches:
        needs[reach.num_seqs].append(reach.context_needs)
    return sum(len(num_seqs) * _union_size(ranges) for num_seqs, ranges in needs.items())


def _union_size(ranges: Iterable[range]) -> int:
    size, seen = 0, 0
    for one in sorted(ranges, key=lambda one: one.start):
        size += len(range(max(one.start, seen), one.stop))
        seen = max(seen, one.stop)
    return size


def _uncovered(
    bucketer: Bucketer, family: Family, reaches: Iterable[Reach], available: frozenset[Shape]
) -> list[UncoveredStates]:
    ladders = bucketer.decode[family]
    found: dict[tuple[DecodeShape, range], range] = {}
    for reach in reaches:
        for num_seqs, rows_covered in ladders.num_seqs.cells():
            rows = overlap(reach.num_seqs, rows_covered)
            if not rows:
                continue
            for query_len, widths_covered in ladders.query_len.cells():
                if not overlap(reach.query_lens, widths_covered):
                    continue
                for context_len, needs_covered in ladders.context_len.cells():
                    needs = overlap(reach.context_needs, needs_covered)
                    shape = DecodeShape(
                        family, num_seqs, query_len, context_len, bucketer.context_bucketed
                    )
                    if not needs or shape in available:
                        continue
                    before = found.setdefault((shape, rows), needs)
                    found[shape, rows] = range(
                        min(before.start, needs.start), max(before.stop, needs.stop)
                    )
    return [
        UncoveredStates(
            family,
            (rows.start, rows.stop - 1),
            (needs.start, needs.stop - 1),
            shape,
            f"{shape.bucket_name} is missing",
        )
        for (shape, rows), needs in found.items()
    ]


def prefill_gaps(bucketer: Bucketer, available: Collection[Shape]) -> list[UncoveredStates]:
    """One per family that lacks a shape: a prefill step of any size may come at any context.

    A pool that holds every sequence at full length makes preemption impossible; whether the pool is that
    large the engine decides, so it is stated, never assumed.
    """
    needed = expand(bucketer, WarmUp.REACHABLE, (Phase.PREFILL,)).with_need(Need.REQUIRED)
    enough = blocks_for_all(bucketer)
    missing: defaultdict[Family, list[Shape]] = defaultdict(list)
    for shape in needed:
        if shape not in available:
            missing[shape.family].append(shape)
    return [
        UncoveredStates(
            family,
            (1, 1),
            (1, bucketer.max_model_len - 1),
            shapes[0],
            f"{', '.join(shape.bucket_name for shape in shapes)} missing: new prompts need prefill, and "
            "on a decode-only role so does a request whose KV load failed or that was preempted (which "
            f"{enough} KV blocks or more rule out)",
        )
        for family, shapes in missing.items()
    ]
