"""The programs behind what an engine's log says, compared with a plan.

vLLM Neuron logs targets, and compiles for each of them a program of every family: without speculation one,
with EAGLE3 the target's with and without drafts and the draft's. vLLM logs no shapes: it compiles one
program for every step, or, in its own mode, one for each range of token counts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from neffbuild.config.errors import ConfigError
from neffbuild.grid.bucketer import SPECULATION_FAMILIES
from neffbuild.grid.conformance import (
    Conformance,
    Difference,
    Expected,
    bucket_names,
    covered,
    shape_differences,
)
from neffbuild.grid.engine_failures import Breakdown, Failure, Pair
from neffbuild.grid.engine_log import LOOKED_FOR, EngineLog, Targets
from neffbuild.grid.engine_options import VLLM, is_version, setting_differences
from neffbuild.grid.shapes import DecodeShape, Family, PrefillShape, Shape, SymbolicShape

BACKENDS = ("neffbuild", "neffbuild.runtime.backend.neffbuild_backend")
"""Names under which vLLM finds our backend."""
_VLLM_COMPILE = 3
"""vLLM's own mode, in which its compiler, whatever backend is named, compiles ranges of token counts."""


def compare_log(expected: Expected, log: EngineLog) -> Conformance:
    """A plan and what an engine says in its log.

    Raises `ConfigError` for a log that does not say what is compiled, or breaks off where what it says so
    far is as planned.
    """
    says_shapes = log.decode.named or log.prefill.named or log.failures
    if not says_shapes and expected.symbolic and (log.settings or log.ranges):
        return _compare_symbolic(expected, expected.symbolic, log)
    if not (says_shapes or log.breakdowns or log.misses):
        raise ConfigError(
            f"the log does not say what the engine compiles{_of_last(log)}",
            field="--engine-log",
            hint=f"log from the engine's start, at level INFO; looked for: {LOOKED_FOR}",
        )
    differences = setting_differences(expected, log)
    shapes: list[frozenset[Shape]] = []
    left_out: list[str] = []
    for planned, targets, other, shapes_of in (
        (expected.decode, log.decode, log.prefill, _decode_shapes),
        (expected.prefill, log.prefill, log.decode, _prefill_shapes),
    ):
        lists = [shapes_of(expected, log, pairs) for pairs in targets.lists]
        others = shapes_of(expected, log, targets.others)
        shapes += [*lists, others]
        if not planned:
            left_out += bucket_names(frozenset[Shape]().union(*lists, others))
        else:
            # Of two phases an engine may skip one, and then does not mention it.
            compiled = [frozenset[Shape]()] if other.lists and not targets.named else lists
            differences += shape_differences(expected, planned, compiled, others)
    differences += _failures(log)
    if not differences:
        _require_whole(expected, log)
    return Conformance(
        covered(expected.shapes, shapes, differences),
        tuple(differences),
        tuple(left_out),
        notes=tuple(_notes(expected, log)),
    )


def _decode_shapes(expected: Expected, log: EngineLog, pairs: Collection[Pair]) -> frozenset[Shape]:
    bucketer = expected.bucketer
    told = _told(log, "num_speculative_tokens")
    spec_tokens = bucketer.num_speculative_tokens if told is None else int(told)
    limit = _told(log, "max_model_len") or bucketer.max_model_len
    # An engine without context buckets has one context only, and lays block tables out in another way.
    bucketed = any(context_len != limit for _, context_len in log.decode.all) or (
        bucketer.context_bucketed and not log.decode.lists
    )
    widths: dict[Family, tuple[int, ...]]
    if spec_tokens == bucketer.num_speculative_tokens:
        widths = {family: one.query_len.rungs for family, one in bucketer.decode.items()}
    else:
        families = SPECULATION_FAMILIES if spec_tokens else (Family.TARGET,)
        widths = {
            family: (1,)
            if family in (Family.TARGET, Family.TARGET_WITHOUT_SPEC)
            else (1 + spec_tokens,)
            for family in families
        }
    return frozenset(
        DecodeShape(family, num_seqs, query_len, context_len, bucketed)
        for family, query_lens in widths.items()
        for query_len in query_lens
        for num_seqs, context_len in pairs
    )


def _prefill_shapes(
    expected: Expected, log: EngineLog, pairs: Collection[Pair]
) -> frozenset[Shape]:
    told = _told(log, "num_speculative_tokens")
    drafting = log.drafts or bool(
        expected.bucketer.num_speculative_tokens if told is None else told
    )
    families = (Family.PREFILL, Family.DRAFT_PREFILL) if drafting else (Family.PREFILL,)
    return frozenset(PrefillShape(family, *pair) for family in families for pair in pairs)


def _compare_symbolic(expected: Expected, planned: SymbolicShape, log: EngineLog) -> Conformance:
    """One program for every step, and what vLLM's config and compile ranges say of others."""
    own = frozenset(log.ranges)
    why_not: str | None = None
    for settings in log.settings:
        if settings.enforce_eager or settings.mode == 0:
            why_not = "the engine compiles nothing (enforce_eager, or compilation mode 0)"
        elif settings.mode == _VLLM_COMPILE:
            own |= {(size, size) for size in settings.compile_sizes} | settings.ranges
            why_not = "in its compilation mode 3 vLLM compiles by itself, whatever the backend"
        elif settings.backend not in (None, *BACKENDS):
            why_not = f"the engine compiles with backend {settings.backend!r}, not with neffbuild"
        elif settings.backend is None or settings.mode is None:
            raise ConfigError(
                "the engine's config in the log is cut off before it says what it compiles with",
                field="--engine-log",
                hint="capture whole lines: this one has some thousands of characters",
            )
    if own and why_not is None:
        why_not = "the engine compiles for ranges of token counts instead"
    differences = setting_differences(expected, log)
    if why_not is not None:
        differences.append(
            Difference("missing", planned.bucket_name, f"planned, but {why_not}", plan=planned)
        )
    differences += [
        Difference(
            "extra",
            f"compile range ({low}, {high})",
            "compiled by the engine for steps of so many tokens, and not planned",
        )
        for low, high in sorted(own)
    ]
    differences += _failures(log)
    return Conformance(int(why_not is None), tuple(differences), notes=tuple(_notes(expected, log)))


def _told(log: EngineLog, option: str) -> int | None:
    """What the engine's own config has for an option; None where the log does not say."""
    for settings in reversed(log.settings):
        for name, value in settings.options:
            if name == option:
                return int(value)
    return None


def _failures(log: EngineLog) -> Iterator[Difference]:
    yield from map(_failed, log.failures)
    yield from map(_broken_down, log.breakdowns)
    yield from map(_not_allowed, sorted(log.misses))


def _failed(failure: Failure) -> Difference:
    number, other = failure.target
    shape = (
        f"decode_b{number}_ctx{other}"
        if failure.phase == "decode"
        else PrefillShape(Family.PREFILL, number, other).bucket_name
    )
    return Difference("failed", shape, f"its {failure.stage} failed: {failure.message}")


def _broken_down(breakdown: Breakdown) -> Difference:
    more = f": {breakdown.more}" if breakdown.more else ""
    return Difference("failed", breakdown.name, f"the engine says: {breakdown.said}{more}")


def _not_allowed(key: str) -> Difference:
    return Difference(
        "failed", key, "not in the engine's cache, and the engine was told not to compile"
    )


def _require_whole(expected: Expected, log: EngineLog) -> None:
    """Refuse to call equal what is known in part."""
    for what, planned, targets in (
        ("decode targets", expected.decode, log.decode),
        ("prefill buckets", expected.prefill, log.prefill),
    ):
        if planned and not targets.lists:
            raise ConfigError(
                f"the log does not name all {what} of the engine: {_cut(targets)}{_of_last(log)}",
                field="--engine-log",
                hint="what it names is as planned; log from the engine's start until its warm-up ends",
            )


def _cut(targets: Targets) -> str:
    of = f" of {targets.told}" if targets.told is not None else ""
    return f"{len(targets.others)}{of} are in it"


def _of_last(log: EngineLog) -> str:
    """For an error of a log with several starts: which of them it is about."""
    return f" (it holds {log.starts} starts, and only the last counts)" if log.starts > 1 else ""


def _notes(expected: Expected, log: EngineLog) -> Iterator[str]:
    if log.starts > 1:
        yield f"the log holds {log.starts} starts of the engine: the last one is compared"
    if log.together > 1:
        yield (
            f"the log holds {log.together} starts and does not say of which replicas: all of them are "
            "compared; where one was started again, give the log since then"
        )
    for what, planned, targets, other in (
        ("decode targets", expected.decode, log.decode, log.prefill),
        ("prefill buckets", expected.prefill, log.prefill, log.decode),
    ):
        if len(targets.lists) > 1:
            yield f"processes or stages of the engine name different {what}"
        if planned and not targets.named and other.lists:
            yield f"the log names no {what}: the engine skips them, or the log ends before"
        elif planned and targets.named and not targets.lists:
            yield f"whether {what} are missing cannot be told: {_cut(targets)}"
    if log.keys:
        hits = len(log.keys & log.hits)
        yield f"{len(log.keys)} programs by their cache keys, {hits} of them found in the engine's cache"
    versions = sorted({one.version for one in log.settings})
    if expected.symbolic and VLLM not in expected.versions and versions:
        yield (
            f"the engine is vLLM {', '.join(versions)}; for which the plan is cannot be told: pin "
            f"toolchain.versions.{VLLM}"
        )
    elif VLLM in expected.versions and not all(map(is_version, versions)):
        yield f"the engine does not know its version, which may be another than {expected.versions[VLLM]}"
    sizes = sorted({size for settings in log.settings for size in settings.capture_sizes})
    if sizes:
        yield f"graphs are captured, not compiled, for {', '.join(map(str, sizes))} tokens"
