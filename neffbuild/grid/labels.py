"""What vLLM Neuron calls the shapes of a grid, in its logs and its metric of compile times.

Its labels tell less than a bucket name: a draft's has no context, so several shapes share one and the
engine's metric keeps the last. Source of the labels: the calls that set `COMPILATION_TIME` in vLLM
Neuron's model runner and draft proposers (0.24; DFlash as of 2.33).
"""

from __future__ import annotations

from neffbuild.grid.shapes import DecodeShape, Family, PrefillShape, Shape

DFLASH = "dflash"
"""The method (`speculative_config.method`) whose proposer labels its graphs by rows and query length."""


def engine_labels(shape: Shape, method: str | None = None) -> tuple[str, ...]:
    """The engine's labels of a shape under speculation by `method`: as its code spells it first, then as
    its documentation does, where they differ. None for a shape it has no label for."""
    if isinstance(shape, PrefillShape):
        return _prefill_labels(shape, method)
    if isinstance(shape, DecodeShape):
        return _decode_labels(shape, method)
    return ()


def _prefill_labels(shape: PrefillShape, method: str | None) -> tuple[str, ...]:
    if shape.family is not Family.DRAFT_PREFILL:
        return (shape.bucket_name,)
    # What DFlash's proposer calls a prefill step was not to be found.
    return () if method == DFLASH else (f"draft_fused_s{shape.num_batched_tokens}",)


def _decode_labels(shape: DecodeShape, method: str | None) -> tuple[str, ...]:
    if shape.family is Family.DRAFT:
        if method == DFLASH:
            return (f"dflash_b{shape.num_seqs}_q{shape.query_len}",)
        return (f"draft_fused_s{shape.num_tokens}",)
    if shape.context_bucketed:
        return (shape.bucket_name,)
    # Documented without a suffix when contexts are not bucketed; the code always passes the context.
    return (f"{shape.bucket_name}_ctx{shape.context_len}", shape.bucket_name)
