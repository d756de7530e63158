"""Replay of decode steps: a synthetic workload that crosses every bucket boundary, and its tally.

Pure arithmetic over shapes. Whether the steps are run or only counted is the caller's choice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from neffbuild.grid.bucketer import Bucketer
from neffbuild.grid.kv_blocks import KVTraffic, kv_traffic
from neffbuild.grid.select import StepShapes, select_shapes, step_state
from neffbuild.grid.shapes import DecodeShape, Shape
from neffbuild.grid.step import Row, Step

SCHEMA = "neffbuild.replay/1"


@dataclass(frozen=True, slots=True)
class Stretch:
    """Some steps of the same rows, across one context boundary; `contexts` are the computed tokens of
    each row in the first of them. In the steps `joins` every row is a request that has just joined."""

    contexts: tuple[int, ...]
    steps: int
    joins: tuple[int, ...]


def replay_stretches(bucketer: Bucketer, steps: int) -> list[Stretch]:
    """`steps` decode steps whose rows grow, across the context boundaries.

    One stretch per num_seqs bucket (largest first) and context boundary, of equal lengths, half of it
    on either side; with fewer steps than two per stretch the last ones are left out. All rows of the
    bucket are live, the longest at the boundary, the others down to half as long; half-way beyond it
    others take their places.
    """
    crossings = _crossings(bucketer)[: max(1, steps // 2)]
    length, longer = divmod(steps, len(crossings))
    stretches = []
    for index, (num_seqs, boundary) in enumerate(crossings):
        count = length + (index < longer)
        start = max(1, boundary - (count + 1) // 2)
        spread = start // (2 * num_seqs)
        contexts = tuple(start - row * spread for row in range(num_seqs))
        stretches.append(Stretch(contexts, count, (0, count - count // 4)))
    return stretches


def replay_steps(bucketer: Bucketer, steps: int) -> Iterator[Step]:
    """The steps of `replay_stretches` when rows grow by one position each.

    With speculation every row brings as many drafts as there may be, none when it has just joined, and
    none is accepted. A context that reaches `max_model_len` starts over.
    """
    longest = max(1, bucketer.max_model_len - 2)
    for stretch in replay_stretches(bucketer, steps):
        for step in range(stretch.steps):
            drafts = 0 if step in stretch.joins else bucketer.num_speculative_tokens
            yield Step(
                [
                    Row((context + step - 1) % longest + 1, num_drafts=drafts)
                    for context in stretch.contexts
                ]
            )


def simulate_replay(
    bucketer: Bucketer, kv_bytes_per_position: int, steps: int, stored: Collection[Shape]
) -> dict[str, Any]:
    """The `neffbuild.replay/1` document of the synthetic workload, nothing run: a step whose shapes are
    not all `stored` is a miss."""
    stored = frozenset(stored)
    tally = ReplayTally(bucketer, kv_bytes_per_position)
    hits = 0
    for step in replay_steps(bucketer, steps):
        shapes = select_shapes(bucketer, step_state(bucketer, step))
        tally.add(step, shapes)
        hits += stored.issuperset(step_programs(shapes))
    return tally.document(compiles=0, hits=hits, misses=steps - hits)


def step_programs(shapes: StepShapes) -> list[DecodeShape]:
    """The programs a step runs: the target's, then the draft's."""
    return [shape for shape in (shapes.target, shapes.draft) if shape is not None]


class ReplayTally:
    """Adds up steps: per program, transitions from one target program to another, KV traffic of the
    target. `kv_bytes_per_position` is that of the target's KV caches."""

    def __init__(self, bucketer: Bucketer, kv_bytes_per_position: int) -> None:
        self._bucketer = bucketer
        self._kv_bytes = kv_bytes_per_position
        self._steps = 0
        self._traffic = KVTraffic()
        self._programs: Counter[str] = Counter()
        self._transitions: list[dict[str, Any]] = []
        self._last: str | None = None

    def add(self, step: Step, shapes: StepShapes) -> None:
        """Count one step that ran in `shapes`. A step without a target program has no traffic."""
        self._programs.update(shape.bucket_name for shape in step_programs(shapes))
        if shapes.target is not None:
            name = shapes.target.bucket_name
            if name != self._last:
                self._transitions.append({"step": self._steps, "from": self._last, "to": name})
                self._last = name
            tokens = (row.num_computed_tokens for row in step.rows)
            self._traffic = self._traffic.plus(kv_traffic(self._bucketer, shapes.target, tokens))
        self._steps += 1

    def document(self, *, compiles: int, hits: int, misses: int) -> dict[str, Any]:
        """The `neffbuild.replay/1` document so far."""
        return {
            "schema": SCHEMA,
            "steps": self._steps,
            "compiles": compiles,
            "hits": hits,
            "misses": misses,
            "kv_bytes_read": self._traffic.read * self._kv_bytes,
            "kv_bytes_full_length": self._traffic.full_length * self._kv_bytes,
            "amplification": self._traffic.amplification,
            "amplification_full_length": self._traffic.amplification_full_length,
            "units": [
                {"bucket_name": name, "steps": count} for name, count in self._programs.items()
            ],
            "transitions": self._transitions,
        }


def _crossings(bucketer: Bucketer) -> list[tuple[int, int]]:
    """(live sequences, context need at a boundary) of every stretch."""
    ladders = bucketer.decode[bucketer.families[0]]
    contexts = ladders.context_len.rungs
    boundaries = contexts[:-1] or (contexts[-1] // 2,)
    return list(product(reversed(ladders.num_seqs.rungs), boundaries))
