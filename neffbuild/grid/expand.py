"""Grid expansion: every shape a serve config enumerates, each with whether a step needs it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import StrEnum

from neffbuild.grid.bucketer import Bucketer
from neffbuild.grid.phases import Phase
from neffbuild.grid.reach import overlap, reachable
from neffbuild.grid.shapes import DecodeShape, Family, PrefillShape, Shape, SymbolicShape


class Need(StrEnum):
    """Whether a shape is needed: some step reaches it; none does but the engine warms it all the same;
    none does and nothing asks for it."""

    REQUIRED = "required"
    ENUMERATED_ONLY = "enumerated_only"
    CANNOT_OCCUR = "cannot_occur"


class WarmUp(StrEnum):
    """What the serving engine loads at start-up: every shape of the product of its lists, or, as our
    own runtime does, the shapes some step reaches."""

    FULL_PRODUCT = "full_product"
    REACHABLE = "reachable"


@dataclass(frozen=True, slots=True)
class GridShape:
    """`reason` says why no step reaches the shape; None when one does."""

    shape: Shape
    need: Need
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Grid:
    """The shapes a serve config enumerates."""

    shapes: tuple[GridShape, ...]

    def with_need(self, *needs: Need) -> list[Shape]:
        return [gridded.shape for gridded in self.shapes if gridded.need in needs]

    @property
    def unreached(self) -> dict[str, int]:
        """Reason → how many shapes no step reaches for it."""
        return dict(Counter(gridded.reason for gridded in self.shapes if gridded.reason))


def expand(bucketer: Bucketer, warm_up: WarmUp, phases: Collection[Phase] | None = None) -> Grid:
    """Enumerate the grid of some phases, by default those the worker serves: per family, sequences in the
    outer loop, context in the inner, ascending.

    A shape no step reaches is enumerated only where the engine warms the full product, and cannot occur
    otherwise. A path's floor shortens the product itself, so a shape below it cannot occur either way.
    """
    phases = bucketer.phases if phases is None else phases
    shapes: list[GridShape] = []
    unreached = Need.ENUMERATED_ONLY if warm_up is WarmUp.FULL_PRODUCT else Need.CANNOT_OCCUR
    if Phase.DECODE in phases:
        for family in bucketer.families:
            shapes += _decode_shapes(bucketer, family, unreached)
    if Phase.PREFILL in phases:
        for family in bucketer.prefill:
            shapes += _prefill_shapes(bucketer, family, unreached)
    return Grid(tuple(shapes))


def symbolic_grid() -> Grid:
    """The grid of an engine in which one program serves every step."""
    return Grid((GridShape(SymbolicShape(Family.TARGET), Need.REQUIRED),))


def _decode_shapes(bucketer: Bucketer, family: Family, unreached: Need) -> Iterator[GridShape]:
    ladders = bucketer.decode[family]
    reaches = reachable(bucketer, family)
    below_floor = f"{family} runs from {ladders.num_seqs.floor} live sequences up"
    contexts = ladders.context_len.cells()
    for num_seqs, rows in ladders.num_seqs.cells():
        for query_len, widths in ladders.query_len.cells():
            steps = [
                reach.context_needs
                for reach in reaches
                if overlap(reach.num_seqs, rows) and overlap(reach.query_lens, widths)
            ]
            for context_len, needs in contexts:
                shape = DecodeShape(
                    family, num_seqs, query_len, context_len, bucketer.context_bucketed
                )
                if not rows:
                    yield GridShape(shape, Need.CANNOT_OCCUR, below_floor)
                elif any(overlap(step, needs) for step in steps):
                    yield GridShape(shape, Need.REQUIRED)
                else:
                    yield GridShape(
                        shape, unreached, _why_unreached(bucketer, family, steps, needs)
                    )


def _why_unreached(bucketer: Bucketer, family: Family, steps: list[range], needs: range) -> str:
    limit = (
        f"the draft's limit is {bucketer.draft_limit} positions"
        if family is Family.DRAFT
        else f"max_model_len is {bucketer.max_model_len}, where a request is stopped"
    )
    occurring = [step for step in steps if step]
    if not occurring:
        return f"no {family} step can occur: {limit}"
    least = min(step.start for step in occurring)
    most = max(step.stop for step in occurring) - 1
    if needs.start > most:
        return f"no {family} step needs more than {most} positions: {limit}"
    return f"every {family} step needs at least {least} positions"


def _prefill_shapes(bucketer: Bucketer, family: Family, unreached: Need) -> Iterator[GridShape]:
    ladders = bucketer.prefill[family]
    longest_prompt = bucketer.max_model_len - 1
    for segment in ladders.kv_segments:
        for tokens, chunk in ladders.num_batched_tokens.cells():
            shape = PrefillShape(family, tokens, segment)
            if chunk.start <= longest_prompt:
                yield GridShape(shape, Need.REQUIRED)
            else:
                reason = f"a prompt has at most {longest_prompt} tokens"
                yield GridShape(shape, unreached, reason)
