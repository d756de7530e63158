"""Static shards: which of a config's units each of n machines compiles, worked out alike on every one of
them without talking.

So nothing here may depend on what a machine has in its cache or has measured: the parts are cut from the
config's units in the order of the plan, by what the toolchain's prior expects of their shapes.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from neffbuild.config.errors import ConfigError

FORMS = "3/8 (the third of eight), auto, or auto/8 where the machine is not told how many there are"
TOTAL_VARIABLE = "NEFFBUILD_SHARDS"
_MOST_SHARDS = 100_000
_NUMBER = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class Shard:
    """The `index`-th of `count` shards, the first being 1."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def document(self) -> dict[str, int]:
        """`shard` of a JSON document."""
        return {"index": self.index, "count": self.count}


@dataclass(frozen=True, slots=True)
class _Scheduler:
    """How a scheduler tells a machine which of how many it is, in environment variables.

    `first` is the number of its first machine, or the variable that holds it; `last` and `step` the
    variables that hold the number of the last one and how far apart numbers are.
    """

    name: str
    index: str
    total: str | None
    first: int | str = 0
    last: str | None = None
    step: str | None = None


_SCHEDULERS = (
    _Scheduler("AWS Batch", "AWS_BATCH_JOB_ARRAY_INDEX", "AWS_BATCH_JOB_ARRAY_SIZE"),
    _Scheduler(
        "Slurm",
        "SLURM_ARRAY_TASK_ID",
        "SLURM_ARRAY_TASK_COUNT",
        first="SLURM_ARRAY_TASK_MIN",
        last="SLURM_ARRAY_TASK_MAX",
        step="SLURM_ARRAY_TASK_STEP",
    ),
    _Scheduler("a Kubernetes Indexed Job", "JOB_COMPLETION_INDEX", None),
    _Scheduler("GitLab CI", "CI_NODE_INDEX", "CI_NODE_TOTAL", first=1),
    _Scheduler("CircleCI", "CIRCLE_NODE_INDEX", "CIRCLE_NODE_TOTAL"),
    _Scheduler("Buildkite", "BUILDKITE_PARALLEL_JOB", "BUILDKITE_PARALLEL_JOB_COUNT"),
)


def parse_shard(text: str, environment: Mapping[str, str]) -> Shard:
    """The shard that `--shard` names: `I/N`, or `auto` and `auto/N` as `environment` says.

    The total comes from `auto/N`, the scheduler's own variable or `$NEFFBUILD_SHARDS`, which have to agree
    as far as they are there. Raises `ConfigError` for anything else, and where what the environment says
    is missing, ambiguous or contradicts itself.
    """
    first, slash, total = text.partition("/")
    count = _whole(total) if slash else None
    if slash and count is None:
        raise _refusal(f"--shard {text!r} names no shard", text)
    if first == "auto":
        return _detected(environment, count, text)
    index = _whole(first)
    if index is None or count is None:
        raise _refusal(f"--shard {text!r} names no shard", text)
    return _checked(index, count, text, f"--shard {text}")


def shard_of_groups(
    seconds: Sequence[float], groups: Sequence[str | None], shard: Shard
) -> list[int]:
    """`shard_members` where units of the same of `groups` come of one compile and stay together; those
    of None are each by themselves."""
    parts: dict[object, list[int]] = {}
    for place, group in enumerate(groups):
        parts.setdefault(place if group is None else group, []).append(place)
    whole = list(parts.values())
    members = shard_members([sum(seconds[one] for one in part) for part in whole], shard)
    return sorted(place for member in members for place in whole[member])


def shard_members(seconds: Sequence[float], shard: Shard) -> list[int]:
    """The places of a shard's units in `seconds`, the expected compile seconds of all units, ascending.

    Every unit is in exactly one of the shards. Longest first, each unit goes to the shard that has least
    to do so far (R. L. Graham, "Bounds on Multiprocessing Timing Anomalies", 1969: at most a third
    longer than the best split); between equals to the one with fewer units, then to the first.
    """
    # Whole milliseconds: their sums are exact, and the last bit of a logarithm or a root, in which the C
    # libraries of two machines may differ, is rounded away.
    costs = [max(1, round(each * 1000)) for each in seconds]
    loads = [(0, 0, index) for index in range(1, shard.count + 1)]
    members: list[int] = []
    for place in sorted(range(len(costs)), key=lambda place: (-costs[place], place)):
        load, units, index = loads[0]
        heapq.heapreplace(loads, (load + costs[place], units + 1, index))
        if index == shard.index:
            members.append(place)
    return sorted(members)


def _detected(environment: Mapping[str, str], given: int | None, text: str) -> Shard:
    found = {
        one.name: _told(one, environment, given, text)
        for one in _SCHEDULERS
        if environment.get(one.index)
    }
    if not found:
        variables = ", ".join(one.index for one in _SCHEDULERS)
        raise ConfigError(
            f"--shard {text}: no scheduler says which shard this is (none of {variables} is set)",
            field="--shard",
            value=text,
            hint="name it: --shard 3/8",
        )
    if len(set(found.values())) > 1:
        said = ", ".join(f"shard {shard} by {name}" for name, shard in found.items())
        raise ConfigError(
            f"--shard {text}: schedulers disagree which shard this is: {said}",
            field="--shard",
            value=text,
            hint="name the shard: --shard 3/8",
        )
    return next(iter(found.values()))


def _told(one: _Scheduler, environment: Mapping[str, str], given: int | None, text: str) -> Shard:
    """The shard by the variables of one scheduler."""
    totals = {
        f"--shard {text}": given,
        str(one.total): _variable(environment, one.total) if one.total else None,
        TOTAL_VARIABLE: _variable(environment, TOTAL_VARIABLE),
    }
    said = {source: number for source, number in totals.items() if number is not None}
    if len(set(said.values())) > 1:
        numbers = ", ".join(f"{number} by {source}" for source, number in said.items())
        raise ConfigError(
            f"--shard {text}: it is not clear how many shards there are: {numbers}",
            field="--shard",
            value=text,
            hint="start as many as the split is made for, or name the shard: --shard 3/8",
        )
    total = next(iter(said.values()), None)
    if total is None:
        missing = f"{one.total} is not set" if one.total else "it sets no variable for that"
        raise ConfigError(
            f"--shard {text}: {one.name} does not say how many shards there are ({missing})",
            field="--shard",
            value=text,
            hint=f"say how many: --shard auto/8, or {TOTAL_VARIABLE}=8",
        )
    number = _required(environment, one.index)
    first = one.first if isinstance(one.first, int) else _required(environment, one.first)
    step = _variable(environment, one.step) if one.step else None
    what = f"{one.name} says {one.index}={number}"
    place, off = divmod(number - first, step or 1)
    if off or step == 0:
        raise ConfigError(
            f"--shard {text}: {what}, which is no step of {step} from {first}",
            field="--shard",
            value=text,
            hint="name the shard: --shard 3/8",
        )
    if one.last is not None:
        last = _required(environment, one.last)
        if (last - first) // (step or 1) + 1 != total:
            # Numbers with holes: some parts would be nobody's, and some machines have none.
            raise ConfigError(
                f"--shard {text}: {one.name} counts {total} tasks, whose numbers are not all those from "
                f"{first} to {last}" + (f" in steps of {step}" if step and step > 1 else ""),
                field="--shard",
                value=text,
                hint="number them without holes (--array=1-8), or name the shard: --shard 3/8",
            )
    return _checked(place + 1, total, text, f"--shard {text}: {what}, shard {place + 1} of {total}")


def _checked(index: int, count: int, text: str, what: str) -> Shard:
    if not 1 <= count <= _MOST_SHARDS:
        raise _refusal(f"{what}: there are 1 to {_MOST_SHARDS} shards, not {count}", text)
    if not 1 <= index <= count:
        raise _refusal(f"{what}: shards are numbered from 1 to {count}, not {index}", text)
    return Shard(index, count)


def _variable(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    return _required(environment, name) if text else None


def _required(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    number = _whole(text)
    if number is None:
        raise ConfigError(
            f"--shard auto: {name} is {text!r}; allowed: a whole number",
            field=name,
            value=text,
            hint="name the shard: --shard 3/8",
        )
    return number


def _whole(text: str) -> int | None:
    return int(text) if _NUMBER.fullmatch(text) else None


def _refusal(message: str, text: str) -> ConfigError:
    return ConfigError(message, field="--shard", value=text, hint=f"allowed: {FORMS}")
