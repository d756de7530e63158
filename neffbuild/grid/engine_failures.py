"""What vLLM Neuron says failed while it traced, compiled or warmed up, from lines of its log.

The words are those of its published sources. Each of them ends the engine, which tries nothing a second time
in another way: a trace that fails in one of its forks is not repeated without forks. What it recovers from
(a remote cache that cannot be read, a lock whose holder is gone) it says in other words than these.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from neffbuild.grid.engine_lines import at_start

Pair = tuple[int, int]
"""(num_seqs, context_len) of a decode target; (num_batched_tokens, kv_segment) of a prefill bucket."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A target whose tracing or warm-up the engine says failed, in its words."""

    phase: str
    target: Pair
    stage: str
    message: str


@dataclass(frozen=True, slots=True)
class Breakdown:
    """A failure for which the engine names no target. `name` is the key in its cache, where it says one, or
    what broke down; `said` are the words that it is known by, `more` is what follows them."""

    name: str
    said: str
    more: str = ""


FAILURE_WORDS = (
    "decode (batch",
    "prefill",
    "Parallel trace fork failed",
    "neuronx-cc compilation failed",
    "Cache key mismatch",
    "Shared compilation timeout",
    "Lock holder process died",
    "Cannot save cache",
    "terminating process for cleanup",
)
"""A line with none of them tells of no failure."""

_N = r"([0-9]{1,9})"
_TARGET = {
    "decode": rf"decode \(batch={_N}, seq={_N}\)",
    "prefill": rf"prefill bucket {_N} with kv_segment_size {_N}",
}
_FAILURES = {
    phase: re.compile(
        r"(?:Failed to|Model) (extract graph|graph extraction failed|warmup|warmup failed)(?: for)? "
        rf"{target}(?:\. Error)?: ?(.{{0,300}})"
    )
    for phase, target in _TARGET.items()
}
_MORE = r": ?(?P<more>.{0,300})"
_ENTRY = r"(?:[^\s'\"]{0,400}/)?(?P<key>[0-9a-f]{32})\b"
# Tracebacks quote the sources, in which there are braces for the values of a log.
_BREAKDOWNS = {
    name: re.compile(pattern)
    for name, pattern in {
        "parallel trace": rf"(?P<said>Parallel trace fork failed \(rank=[0-9]{{1,9}}\)){_MORE}",
        "neuronx-cc": r"(?P<said>neuronx-cc compilation failed with -?[0-9]{1,9})",
        "cache entry": r"(?P<said>Cache key mismatch: expected '(?P<key>[^'{}]{1,80})',"
        r" found '[^'{}]{0,80}')",
        "shared compile": rf"(?P<said>Shared compilation timeout after [0-9.]{{1,20}}s)(?: in {_ENTRY})?",
        "compile lock": r"(?P<said>Lock holder process died - cache invalidated)",
        "save to the remote cache": rf"(?P<said>Cannot save cache: local entry is incomplete) at {_ENTRY}",
    }.items()
}
# What it ends for is told by nothing else.
_END = re.compile(
    r"(?P<said>Compilation failed - terminating process for cleanup(?:: ?[^\s{].{0,300})?)"
)


def target_failures(text: str) -> list[Failure]:
    """The failure of a target that a message tells of, if it does."""
    failures = []
    for phase, pattern in _FAILURES.items():
        if found := at_start(pattern, text):
            stage = "warm-up" if "warmup" in found[1] else "extraction"
            target = (int(found[2]), int(found[3]))
            failures.append(Failure(phase, target, stage, _printable(found[4])))
    return failures


def breakdowns(text: str) -> list[Breakdown]:
    """The other failures that a message tells of. That the engine ends for one is none of its own."""
    causes = [
        _breakdown(name, found)
        for name, pattern in _BREAKDOWNS.items()
        if (found := at_start(pattern, text))
    ]
    if not causes and (end := at_start(_END, text)):
        return [_breakdown("compile", end)]
    return causes


def _breakdown(name: str, found: re.Match[str]) -> Breakdown:
    groups = found.groupdict()
    return Breakdown(
        _printable(groups.get("key") or name),
        _printable(groups["said"]),
        _printable(groups.get("more") or ""),
    )


def _printable(text: str) -> str:
    return "".join(one if one.isprintable() else " " for one in text).strip()
