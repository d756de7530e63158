"""One reduce a step, so that every data-parallel rank runs it in the same programs.

A rank that picked another program than its peers would meet another collective in it, and corrupt or
hang the busy ones. So what selection depends on, a `StepState`, is reduced by elementwise MAX, and every
later choice uses the result and configuration only. The step's number goes with it, so that ranks that
prepare different steps learn it from the same reduce.
"""

from __future__ import annotations

import contextlib
import operator
from typing import Self

import torch
import torch.distributed as dist

from neffbuild.config.build import BuildConfig
from neffbuild.config.errors import ConfigError, NeffbuildError
from neffbuild.config.values import shown
from neffbuild.grid.ranks import steps_are_synced
from neffbuild.grid.select import IDLE, StepState

_MOST = torch.iinfo(torch.int32).max
_NUMBERS = _MOST + 1
"""Step numbers are compared modulo this: they go on for ever, the vector is of int32."""


class RankLost(NeffbuildError):
    """The reduce of a step failed: a peer is gone, or does not run the same steps."""

    kind = "rank_lost"


class StepSync:
    """The synced state of each step, over a CPU group of the data-parallel ranks.

    `group` None: this rank's own state is the step's, and nothing is ever sent. `collectives` counts the
    reduces.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.collectives = 0
        self._group = group
        self._number = -1
        self._state = IDLE
        # Behind the state the step's number and its negative: the largest and the smallest over the ranks.
        self._buffer = torch.zeros(len(IDLE) + 2, dtype=torch.int32)
        self._lost: RankLost | None = None

    @property
    def active(self) -> bool:
        """Whether steps are reduced over other ranks."""
        return self._group is not None

    @classmethod
    def from_config(cls, config: BuildConfig, group: dist.ProcessGroup | None) -> Self:
        """The sync of a serving rank; `group` is not used where the configuration has no step synced.

        Raises `ConfigError` where it is needed and missing, has another size than
        `data_parallel_size`, or cannot reduce tensors in host memory.
        """
        serve = config.serve
        if not steps_are_synced(serve):
            return cls(None)
        if group is None:
            raise ConfigError(
                f"data_parallel_size is {serve.data_parallel_size} and the ranks' programs hold "
                "collectives across them, but no process group was handed in",
                field="group",
                hint="hand in a CPU group of the data-parallel ranks: "
                "torch.distributed.new_group(ranks, backend='gloo')",
            )
        if not isinstance(group, dist.ProcessGroup):
            raise ConfigError(
                f"what was handed in as process group is {shown(group)}: no group that this rank is in",
                field="group",
                hint="hand in the group of this rank's own data-parallel ranks: torch.distributed.new_group "
                "gives a group to its members only",
            )
        if group.size() != serve.data_parallel_size:
            raise ConfigError(
                f"the process group has {group.size()} ranks; allowed: data_parallel_size, "
                f"{serve.data_parallel_size}",
                field="group",
                value=group.size(),
            )
        if (backend := _backend(group)) == dist.Backend.NCCL:
            raise ConfigError(
                f"the process group is of backend {backend}, which reduces no tensor in host memory",
                field="group",
                value=backend,
                hint="hand in a group of backend gloo",
            )
        return cls(group)

    def prepare(self, number: int, state: StepState = IDLE) -> StepState:
        """The synced state of step `number`, of which this rank contributes `state` (nothing to do:
        `IDLE`).

        Blocks until every rank has prepared the step. Steps are numbered upwards, alike on every rank.
        Preparing one again (an engine that schedules ahead does, when it knows the tokens) gives what
        was reduced the first time, whatever `state` is by then: peers do not reduce twice.

        Raises `ConfigError` for a step before the last or the first; `RankLost` when a peer is gone, on
        every rank when they prepare different steps, and from then on.
        """
        if self._lost is not None:
            # Whether the peers still wait in the reduce that failed, nobody knows.
            raise self._lost
        with contextlib.suppress(TypeError):
            number = operator.index(number)
        if not isinstance(number, int) or number < 0:
            raise ConfigError(
                f"step {shown(number)} is no number of a step; allowed: integers from 0",
                field="number",
                value=number,
            )
        if number == self._number:
            return self._state
        if number < self._number:
            raise ConfigError(
                f"step {number} was prepared after step {self._number}: its peers' states are gone, and "
                "a second reduce would pair with another step of theirs",
                field="number",
                value=number,
                hint="number steps upwards, alike on every rank, idle ones included",
            )
        self._state = state if self._group is None else self._reduced(self._group, number, state)
        self._number = number
        return self._state

    def _reduced(self, group: dist.ProcessGroup, number: int, state: StepState) -> StepState:
        buffer, place = self._buffer, number % _NUMBERS
        # No ladder goes as far as int32. A rank that failed here would leave its peers waiting; like this
        # all of them are told that the step fits no program.
        buffer.numpy()[:] = [*(min(value, _MOST) for value in state), place, -place]
        self.collectives += 1
        try:
            dist.all_reduce(buffer, op=dist.ReduceOp.MAX, group=group)
        except RuntimeError as error:
            self._lost = RankLost(
                f"the ranks' states of a step could not be reduced: {error}",
                hint="a data-parallel rank has ended or does not take part; restart all of them",
            )
            raise self._lost from error
        *synced, highest, negative = buffer.tolist()
        if highest != -negative:
            self._lost = RankLost(
                f"the ranks prepare different steps: this one step {number}, and all of them (modulo "
                f"{_NUMBERS}) steps {-negative} to {highest}",
                value=number,
                hint="a rank left out a step, or prepared one more: number steps upwards, alike on every "
                "rank, idle ones included; restart all of them",
            )
            raise self._lost
        return StepState(*synced)


def _backend(group: dist.ProcessGroup) -> str | None:
    """None for a group that was made without the default one, as vLLM's data-parallel group is: torch does
    not know what it called it."""
    try:
        return dist.get_backend(group)
    except ValueError:
        return None
