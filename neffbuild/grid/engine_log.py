"""What a serving engine says in its log of the programs it compiles.

Two engines are understood: vLLM Neuron, which lists every bucket it traces and warms up, and vLLM itself,
which prints its compilation config and, in its own mode, the ranges of token counts it compiles for.
Lines of several processes may be interleaved, carry colours and prefixes of whatever collected them, be
cut off, or be no text at all; what is not understood is passed over. The order of lines means nothing,
except that a line with an engine's config may begin another start: logs are appended to, and what an earlier
start said is no matter to the last.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from neffbuild.grid.engine_failures import (
    FAILURE_WORDS,
    Breakdown,
    Failure,
    Pair,
    breakdowns,
    target_failures,
)
from neffbuild.grid.engine_lines import Message, at_start, messages_of
from neffbuild.grid.engine_settings import Settings, read_settings

LOOKED_FOR = (
    'of vLLM Neuron "Extracting … decode compile targets", "Warming up … decode compile targets", '
    '"[i/n] Warming up decode (batch=…, seq=…)", "Extracting graphs for … prefill buckets"; of vLLM '
    '"Initializing a V1 LLM engine", "… compile range …"'
)


@dataclass(frozen=True, slots=True)
class Targets:
    """What the engine says it compiles of one phase.

    `lists` are the whole lists that processes named, each once; ranks of one engine name the same.
    `others` are targets met outside them: of a process whose list was cut off, say, of which `told` says
    how many targets the engine has (None where it does not say).
    """

    lists: frozenset[frozenset[Pair]] = frozenset()
    others: frozenset[Pair] = frozenset()
    told: int | None = None

    @property
    def named(self) -> bool:
        return bool(self.lists or self.others)

    @property
    def all(self) -> frozenset[Pair]:
        """Every target that some process named."""
        return self.others.union(*self.lists)


@dataclass(frozen=True, slots=True)
class EngineLog:
    """All that was understood of the last start. `keys`, `hits` and `misses` are names of entries in the
    engine's own cache; `drafts` says whether a drafter's graphs were captured; `ranges` are vLLM's compile
    ranges; `starts` counts the starts in the log, the last one included; `together` counts those that are
    taken together, for it cannot be told whether they are of one replica."""

    decode: Targets = field(default_factory=Targets)
    prefill: Targets = field(default_factory=Targets)
    failures: tuple[Failure, ...] = ()
    breakdowns: tuple[Breakdown, ...] = ()
    keys: frozenset[str] = frozenset()
    hits: frozenset[str] = frozenset()
    misses: frozenset[str] = frozenset()
    drafts: bool = False
    settings: tuple[Settings, ...] = ()
    ranges: frozenset[Pair] = frozenset()
    starts: int = 1
    together: int = 0


# Numbers are bounded: what a log claims is no reason to compute with a million digits.
_N = r"([0-9]{1,9})"
_PAIR = re.compile(rf"\( ?{_N}, ?{_N} ?\)")
_LISTS = {
    "decode": re.compile(
        rf"(?:Extracting|Warming up) {_N} decode compile targets: \[([^\]]*)(\])?"
    ),
    "prefill": re.compile(rf"Extracting graphs for {_N} prefill buckets: \[([^\]]*)(\])?"),
}
_ITEMS = {
    "decode": re.compile(
        rf"\[{_N}/{_N}\] (?:Extracting graph for|Warming up) decode \(batch={_N}, seq={_N}\)"
    ),
    "prefill": re.compile(
        rf"\[{_N}/{_N}\] (?:Extracting|Warming up) for prefill: bucket_size={_N}, kv_segment_size={_N}"
    ),
}
_KEY = re.compile(r"Compilation cache key: ([0-9a-f]{32})\b")
_HIT = re.compile(r"Local cache hit for key: ([0-9a-f]{32})\b")
_MISS = re.compile(r"(?:local|remote) compile cache miss for key:? ([0-9a-f]{32})\b")
_DRAFTS = re.compile(r"Capturing EAGLE3 (?:decode|prefill) graphs for ")
_RANGE = re.compile(
    rf"(?:Compiling a|Cache the|Directly load the) [\w ()-]{{1,40}} compile range \({_N}, {_N}\)"
)
_OF_A_REPLICA = re.compile(r"_DP[0-9]")


def read_engine_log(lines: Iterable[str], replicas: int = 1) -> EngineLog:
    """What a log says of the last engine start in it, from its lines, in any order but that of each
    process's own.

    `replicas` is how many engines, each one to itself, may have written it. Starts of processes that are not
    named by their replica are then one another's neighbours as well as one another's successors: they are
    taken together.
    """
    start, starts = _Start(replicas), 1
    for message in _messages(lines):
        settings = read_settings(message.text)
        if settings is not None and start.is_over(message.name, settings):
            start, starts = _Start(replicas), starts + 1
        start.read(message, settings)
    return start.result(starts)


def _messages(lines: Iterable[str]) -> Iterator[Message]:
    for line in lines:
        # A serving engine's log is mostly other things, and may be large.
        if any(word in line for word in _WORDS):
            yield from messages_of(line)


class _Start:
    """What is said from one start of an engine to the next."""

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self._phases = {"decode": _Phase(), "prefill": _Phase()}
        self._failures: dict[tuple[str, Pair, str], Failure] = {}
        self._breakdowns: dict[str, Breakdown] = {}
        self._found: dict[str, set[str]] = {"keys": set(), "hits": set(), "misses": set()}
        self._drafts = False
        self._settings: dict[Settings, None] = {}
        self._ranges: set[Pair] = set()
        self._configs: Counter[str] = Counter()

    def is_over(self, name: str, settings: Settings) -> bool:
        """Whether a config that a process of this name prints is that of another start. An engine's
        processes print it once each, before they compile anything."""
        if self._replicas > 1 and not (self._configs and _OF_A_REPLICA.search(name)):
            return False
        if not self._configs:  # the log begins in the middle of a start
            return bool(self._ranges or self._failures or self._breakdowns) or any(
                phase.named for phase in self._phases.values()
            )
        return self._configs[name] >= (1 if name else settings.data_parallel_size)

    def read(self, message: Message, settings: Settings | None) -> None:
        """`settings` is the config in the message, if it is one's."""
        text = message.text
        for name, phase in self._phases.items():
            phase.read(name, text, message.process)
        self._read_failures(text)
        for name, pattern in (("keys", _KEY), ("hits", _HIT), ("misses", _MISS)):
            if found := at_start(pattern, text):
                self._found[name].add(found[1])
        self._drafts = self._drafts or at_start(_DRAFTS, text) is not None
        if found := at_start(_RANGE, text):
            self._ranges.add((int(found[1]), int(found[2])))
        if settings is not None:
            self._settings[settings] = None
            self._configs[message.name] += 1

    def _read_failures(self, text: str) -> None:
        # Each is said more than once, as a log line and as the error that ends the engine.
        failures = target_failures(text)
        for one in failures:
            self._failures.setdefault((one.phase, one.target, one.stage), one)
        if not failures and not at_start(_MISS, text):
            for broken in breakdowns(text):
                self._breakdowns.setdefault(broken.said, broken)

    def result(self, starts: int) -> EngineLog:
        failures = tuple(self._failures.values())
        return EngineLog(
            decode=self._phases["decode"].targets(),
            prefill=self._phases["prefill"].targets(),
            failures=failures,
            breakdowns=tuple(
                one
                for one in self._breakdowns.values()
                if not any(one.said in failure.message for failure in failures)
            ),
            keys=frozenset(self._found["keys"]),
            hits=frozenset(self._found["hits"]),
            misses=frozenset(self._found["misses"]),
            drafts=self._drafts,
            settings=tuple(self._settings),
            ranges=frozenset(self._ranges),
            starts=starts,
            together=max(
                (n for name, n in self._configs.items() if not _OF_A_REPLICA.search(name)),
                default=0,
            )
            if self._replicas > 1
            else 0,
        )


_WORDS = (
    *FAILURE_WORDS,
    "compile targets",
    "cache key: ",
    "cache hit for key",
    "cache miss for key",
    "EAGLE3",
    "compile range",
    "Initializing a V1",
)


class _Phase:
    """The targets of one phase, by process: ranks write into one log side by side."""

    def __init__(self) -> None:
        self._lists: set[frozenset[Pair]] = set()
        self._single: defaultdict[str, set[Pair]] = defaultdict(set)
        self._told: defaultdict[str, set[int]] = defaultdict(set)

    @property
    def named(self) -> bool:
        return bool(self._lists or self._told)

    def read(self, name: str, line: str, process: str) -> None:
        if found := at_start(_LISTS[name], line):
            pairs = _pairs(found[2])
            if found[3] and len(pairs) == int(found[1]):
                self._lists.add(pairs)
            else:  # cut off, or another process wrote into it
                self._single[process] |= pairs
                self._told[process].add(int(found[1]))
        if found := at_start(_ITEMS[name], line):
            self._single[process].add((int(found[3]), int(found[4])))
            self._told[process].add(int(found[2]))

    def targets(self) -> Targets:
        whole = {
            frozenset(pairs)
            for process, pairs in self._single.items()
            if {len(pairs)} == self._told[process]
        }
        lists = frozenset(self._lists | whole)
        others = frozenset().union(*self._single.values()).difference(*lists)
        return Targets(lists, others, max(set[int]().union(*self._told.values()), default=None))


def _pairs(text: str) -> frozenset[Pair]:
    return frozenset((int(first), int(second)) for first, second in _PAIR.findall(text))
