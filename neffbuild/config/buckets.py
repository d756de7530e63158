"""The bucket lists of `additional_config.neuron_config`: what each may hold.

Pure rules; the sources are vLLM Neuron's own validators, tightened where the engine would fail later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from neffbuild.config.documents import parse_json_text
from neffbuild.config.findings import Findings
from neffbuild.config.values import MAX_INTEGER, shown, whole_number

P_MAX = 128
"""Positions in one tile of the attention kernels: context buckets are multiples of it."""

KV_SEGMENT_SIZES = (512, 1024, 2048, 4096, 8192)
"""Segment sizes the segmented prefill kernel is built for."""


def powers_of_two(top: int, first: int = 1) -> tuple[int, ...]:
    """`first`, doubled while below `top`, then `top` itself: 33 gives 1, 2, 4, 8, 16, 32, 33."""
    ladder = []
    while first < top:
        ladder.append(first)
        first *= 2
    return (*ladder, top)


def ascending_integers(
    value: Any, path: str, findings: Findings, *, empty_hint: str | None = None
) -> tuple[int, ...] | None:
    """A bucket list of positive integers, strictly ascending. Texts that spell an integer, and a list
    that is a JSON text, are read, with a note; anything else is refused, and None returned."""
    wanted = "a list of positive integers, strictly ascending"
    given = value
    if isinstance(value, str):
        try:
            value = parse_json_text(value)
        except ValueError:
            findings.refuse(path, given, wanted, "write it like [1, 2, 4]")
            return None
    if isinstance(value, bool) or not isinstance(value, list | tuple):
        single = isinstance(value, int) and not isinstance(value, bool)
        findings.refuse(path, given, wanted, f"write [{value}]" if single else None)
        return None
    if not value:
        findings.refuse(path, given, wanted, empty_hint or "leave the option out for its default")
        return None
    if isinstance(given, str):
        findings.note(f"{path}: the list was given as a text; it is read as {value}")
    buckets = [_bucket(item) for item in value]
    for index, (item, bucket) in enumerate(zip(value, buckets, strict=True)):
        if bucket is None:
            findings.problem(
                path,
                given,
                f"{path} is {shown(given)}: entry {index} is {shown(item)}; allowed: {wanted}",
            )
            return None
    ladder = [bucket for bucket in buckets if bucket is not None]
    if any(isinstance(item, str) for item in value):
        findings.note(
            f"{path}: numbers were given as texts; they are read as {ladder} "
            "(vLLM Neuron itself takes only numbers)"
        )
    ordered = sorted(set(ladder))
    if ladder != ordered:
        why = "an entry is repeated" if len(ordered) < len(ladder) else "it is not in order"
        findings.problem(
            path,
            given,
            f"{path} is {shown(given)}: {why}; allowed: {wanted}",
            f"write {shown(ordered)}",
        )
        return None
    return tuple(ladder)


def check_last(
    ladder: Sequence[int], top: int, path: str, findings: Findings, *, top_name: str, hint: str
) -> None:
    """The largest bucket must be exactly what the engine may schedule."""
    if ladder[-1] == top:
        return
    relation = "larger than" if ladder[-1] > top else "not"
    findings.problem(
        path,
        list(ladder),
        f"{path} is {shown(list(ladder))}: its last entry {ladder[-1]} is {relation} "
        f"{top_name} {top}; allowed: a list that ends with {top}",
        hint,
    )


def check_contexts(
    contexts: Sequence[int], max_model_len: int, path: str, findings: Findings
) -> None:
    """Context buckets are multiples of the kernels' tile below `max_model_len`, which is itself the
    bucket of last resort."""
    top = (max_model_len - 1) // P_MAX * P_MAX
    allowed = (
        f"multiples of {P_MAX} from {P_MAX} to {top} (below max_model_len {max_model_len}, which is "
        "always a bucket)"
        if top
        else f"no list: max_model_len {max_model_len} is too small for a bucket of {P_MAX}"
    )
    for context in contexts:
        if context >= max_model_len:
            reason = f"entry {context} is not below max_model_len {max_model_len}"
        elif context % P_MAX:
            reason = f"entry {context} is not a multiple of {P_MAX}"
        else:
            continue
        findings.problem(
            path, list(contexts), f"{path} is {shown(list(contexts))}: {reason}; allowed: {allowed}"
        )
        return


def check_segments(
    segments: Sequence[int],
    tokens: Sequence[int] | None,
    block_size: int,
    path: str,
    findings: Findings,
) -> None:
    """Segmented prefill takes one segment size; prefill buckets, where given, must be the same list,
    since a segment is what one prefill step computes."""
    sizes = [size for size in KV_SEGMENT_SIZES if size % block_size == 0]
    allowed = "one of " + ", ".join(f"[{size}]" for size in sizes) if sizes else "no segment size"
    value = list(segments)
    if len(segments) != 1:
        findings.refuse(path, value, allowed, "one segment size is supported at a time")
    elif segments[0] not in sizes:
        findings.refuse(path, value, f"{allowed}, with block_size {block_size}")
    elif tokens is not None and tuple(tokens) != tuple(segments):
        findings.problem(
            path,
            value,
            f"{path} is {value} while num_batched_tokens_buckets is {list(tokens)}; allowed: the same "
            "list for both",
            f"set num_batched_tokens_buckets to {value}",
        )


def _bucket(item: Any) -> int | None:
    number = whole_number(item) if isinstance(item, str) else item
    if isinstance(number, bool) or not isinstance(number, int):
        return None
    return number if 0 < number <= MAX_INTEGER else None
