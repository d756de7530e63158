"""One data-parallel rank over gloo, as the tests of step sync start it.

Steps are random and rank-dependent, but every process can work out what any rank has of any step: only
the *choice* has to go through the sync. Prints a JSON document: the shapes of every step, the number of
collectives, and how many steps the rank's own state would have run in other shapes.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from neffbuild.config.errors import AboveLadder
from neffbuild.grid.bucketer import Bucketer
from neffbuild.grid.select import IDLE, StepShapes, select_shapes, step_state
from neffbuild.grid.step import Row, Step
from neffbuild.runtime.step_sync import StepSync

SPEC_TOKENS = 3
MAX_MODEL_LEN = 4096
MAX_NUM_SEQS = 8


def step_of(rank: int, number: int, ranks: int) -> Step | None:
    """What a rank has of a step; None when it is idle."""
    scene = random.Random(number)
    busy = scene.choice(["all", "some", "one", "none", "all", "some"])
    near_limit, received = scene.randrange(4 * ranks), scene.randrange(4 * ranks)
    own = random.Random(1000 * number + rank)
    idle = {
        "all": False,
        "some": own.random() < 0.4,
        "one": rank != number % ranks,
        "none": True,
    }[busy]
    if idle:
        return None
    longest = MAX_MODEL_LEN - 1 if rank == near_limit else own.choice([100, 500, 2000, 3500])
    rows = [
        Row(
            own.randint(max(1, longest - 6) if rank == near_limit else 1, longest),
            num_drafts=own.choice([0, own.randint(0, SPEC_TOKENS)]),
            post_transfer=rank == received and own.random() < 0.5,
            wants_to_propose=own.random() < 0.9,
        )
        for _ in range(own.randint(1, MAX_NUM_SEQS))
    ]
    if own.random() < 0.03:
        rows[0] = Row(0, num_new_tokens=64)  # a prompt
    return Step(rows, force_without_spec=own.random() < 0.05)


def chosen(shapes: StepShapes) -> list[Any]:
    return [
        shapes.target and shapes.target.bucket_name,
        shapes.draft and shapes.draft.bucket_name,
        shapes.target_reason,
        shapes.draft_reason,
    ]


class Calls:
    """Of every collective of torch's, whoever makes them; what `StepSync` counts itself must be as many."""

    NAMES = ("all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "barrier")

    def __init__(self) -> None:
        self.made = 0
        for name in self.NAMES:
            setattr(dist, name, self._counted(getattr(dist, name)))

    def _counted(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.made += 1
            return collective(*args, **kwargs)

        return call


def run(
    bucketer: Bucketer,
    sync: StepSync,
    rank: int,
    ranks: int,
    steps: int,
    dies_at: int | None = None,
    leaves_out: int | None = None,
) -> dict[str, Any]:
    synced, diverged, calls = [], 0, Calls()
    for number in range(steps):
        if number == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == leaves_out:
            continue
        step = step_of(rank, number, ranks)
        own = IDLE if step is None else step_state(bucketer, step)
        try:
            shapes = chosen(select_shapes(bucketer, sync.prepare(number, own)))
        except AboveLadder as error:
            shapes = [error.kind]
        if number % 7 == 0:
            # Prepared again with what is known by then: the first result stands.
            again = own._replace(num_computed_tokens=own.num_computed_tokens + 1)
            assert chosen(select_shapes(bucketer, sync.prepare(number, again))) == shapes
        synced.append(shapes)
        diverged += chosen(select_shapes(bucketer, own)) != shapes
    assert calls.made == sync.collectives
    return {"shapes": synced, "collectives": calls.made, "own_differs": diverged}


def main(
    rank: int,
    ranks: int,
    steps: int,
    rendezvous: str,
    verify: list[int] | None,
    dies_at: int | None,
    leaves_out: int | None,
) -> None:
    from step_sync_samples import bucketer_of, config_of

    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    config = config_of(ranks, verify=verify)
    sync = StepSync.from_config(config, dist.group.WORLD)
    last = rank == ranks - 1
    bucketer = bucketer_of(config, verify)
    faults = (dies_at, leaves_out) if last else (None, None)
    try:
        document = run(bucketer, sync, rank, ranks, steps, *faults)
    finally:
        # Left to the interpreter's end, gloo may abort the process when a peer closes first.
        dist.destroy_process_group()
    json.dump(document, sys.stdout)


if __name__ == "__main__":
    number, count, of_steps = (int(word) for word in sys.argv[1:4])
    main(number, count, of_steps, sys.argv[4], *map(json.loads, sys.argv[5:8]))
