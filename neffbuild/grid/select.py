"""Shape selection: which programs a step runs, and why.

Pure rules over a few integers. With several ranks the integers are reduced over them first, so that
every rank picks the same shapes:

    rows ─(step_state)─▶ StepState ─(elementwise MAX over ranks)─▶ StepState ─(select_shapes)─▶ StepShapes

In the notation used below, n is the largest `num_computed_tokens` over the live rows, K is
`num_speculative_tokens`, M is `max_model_len`, L is the draft's limit, and d is K on a with-spec step and
0 on any other.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum, StrEnum
from typing import NamedTuple

from neffbuild.config.errors import AboveLadder, ConfigError
from neffbuild.config.values import shown
from neffbuild.grid.bucketer import Bucketer, QueryLenSupport
from neffbuild.grid.shapes import DecodeShape, Family
from neffbuild.grid.step import PostTransferPolicy, Row, Step, by_column, is_decode_row


class Override(IntEnum):
    """What overrides the drafts at hand, ordered so that the largest over all rows and ranks holds."""

    NONE = 0
    POST_TRANSFER_PADDED = 1
    POST_TRANSFER_WITHOUT_SPEC = 2
    FORCED = 3


class StepState(NamedTuple):
    """All that the choice of shapes depends on: small integers, each reduced over ranks by MAX.

    - `num_seqs`: live rows.
    - `num_computed_tokens`: n; 0 on an idle rank.
    - `query_len`: 1 + the most drafts a row brings that it may verify.
    - `override`: an `Override`.
    - `draft_room`: L - `num_computed_tokens` of the shortest row that wants to propose; 0 when none
      wants to.
    - `holds_prefill`: 1 when some row is a prefill row.
    """

    num_seqs: int
    num_computed_tokens: int
    query_len: int = 1
    override: int = Override.NONE
    draft_room: int = 0
    holds_prefill: int = 0


IDLE = StepState(num_seqs=1, num_computed_tokens=0)
"""What a rank without requests contributes: context 0 and the smallest batch."""


class TargetReason(StrEnum):
    """Why the target program is what it is."""

    NO_SPECULATION = "no_speculation"
    DRAFTS_TO_VERIFY = "drafts_to_verify"
    POST_TRANSFER_PADDED = "post_transfer_padded"
    POST_TRANSFER_WITHOUT_SPEC = "post_transfer_without_spec"
    FORCED_WITHOUT_SPEC = "forced_without_spec"
    NEAR_MAX_MODEL_LEN = "near_max_model_len"
    NOTHING_DRAFTED = "nothing_drafted"
    HOLDS_PREFILL = "holds_prefill"


class DraftReason(StrEnum):
    """Why the draft runs or does not."""

    NO_SPECULATION = "no_speculation"
    PROPOSES = "proposes"
    NOT_WANTED = "not_wanted"
    NEAR_DRAFT_LIMIT = "near_draft_limit"
    HOLDS_PREFILL = "holds_prefill"


class StepShapes(NamedTuple):
    """The shapes of a step: `target` is None when it is no decode step, `draft` when none is drafted."""

    target: DecodeShape | None
    draft: DecodeShape | None
    target_reason: TargetReason
    draft_reason: DraftReason


def select_shapes(bucketer: Bucketer, state: StepState) -> StepShapes:
    """The smallest programs that hold a step.

    Raises `AboveLadder` for a step no program holds: more rows than `max_num_seqs`, a row at
    `max_model_len`, or (a profiling batch, say) more than 1 + K tokens per row.
    """
    num_seqs, n, query_len, override, draft_room, holds_prefill = state
    spec_tokens, limit = bucketer.num_speculative_tokens, bucketer.max_model_len
    if holds_prefill:
        return _HOLDS_PREFILL
    if query_len > 1 + spec_tokens:
        raise AboveLadder(
            f"a decode step holds up to {1 + spec_tokens} tokens per row "
            f"(1 + num_speculative_tokens), not {query_len}",
            field="query_len",
            value=query_len,
            hint="run it as prefill; profiling and dummy batches must be no wider either",
        )
    if not spec_tokens:
        target = bucketer.decode_shape(Family.TARGET, num_seqs=num_seqs, context_need=n + 1)
        return StepShapes(target, None, TargetReason.NO_SPECULATION, DraftReason.NO_SPECULATION)

    uniform = bucketer.query_len_support is QueryLenSupport.UNIFORM
    near_limit = n + 1 + spec_tokens > limit
    if override == Override.FORCED:
        reason = TargetReason.FORCED_WITHOUT_SPEC
    elif override == Override.POST_TRANSFER_WITHOUT_SPEC:
        reason = TargetReason.POST_TRANSFER_WITHOUT_SPEC
    elif near_limit and (uniform or query_len == 1):
        reason = TargetReason.NEAR_MAX_MODEL_LEN
    elif query_len == 1:
        reason = TargetReason.NOTHING_DRAFTED
    elif override == Override.POST_TRANSFER_PADDED:
        reason = TargetReason.POST_TRANSFER_PADDED
    else:
        reason = TargetReason.DRAFTS_TO_VERIFY

    if reason in _WITH_SPEC:
        drafts, width = spec_tokens, query_len
        # A row near the limit verifies nothing and needs n + 1; only that may be above the limit.
        need = max(n + 1, min(n + 1 + drafts, limit))
        target = bucketer.decode_shape(
            Family.TARGET_WITH_SPEC, num_seqs=num_seqs, context_need=need, query_len=width
        )
    else:
        drafts, width = 0, 1
        target = bucketer.decode_shape(
            Family.TARGET_WITHOUT_SPEC, num_seqs=num_seqs, context_need=n + 1
        )

    if draft_room <= 0:
        return StepShapes(target, None, reason, DraftReason.NOT_WANTED)
    # Uniform programs take all rows or none, so the longest row decides; otherwise each by itself.
    room = bucketer.draft_limit - n if uniform else draft_room
    if room < 1 + drafts + spec_tokens:
        return StepShapes(target, None, reason, DraftReason.NEAR_DRAFT_LIMIT)
    draft = bucketer.decode_shape(
        Family.DRAFT,
        num_seqs=num_seqs,
        context_need=min(n + drafts + spec_tokens, bucketer.draft_limit),
        query_len=width,
    )
    return StepShapes(target, draft, reason, DraftReason.PROPOSES)


_WITH_SPEC = (TargetReason.DRAFTS_TO_VERIFY, TargetReason.POST_TRANSFER_PADDED)
_HOLDS_PREFILL = StepShapes(None, None, TargetReason.HOLDS_PREFILL, DraftReason.HOLDS_PREFILL)


def next_larger(shape: DecodeShape, available: Iterable[DecodeShape]) -> DecodeShape | None:
    """The program among those available that runs a step of `shape` and reads the least beyond it: more
    rows or a longer context, the same family and tokens per row. None when there is none."""
    larger = [
        one
        for one in available
        if (one.family, one.query_len) == (shape.family, shape.query_len)
        and one.num_seqs >= shape.num_seqs
        and one.context_len >= shape.context_len
    ]
    return min(larger, key=lambda one: (one.num_seqs * one.context_len, one.num_seqs), default=None)


def step_state(bucketer: Bucketer, step: Step) -> StepState:
    """What one rank contributes to the choice of shapes. Raises `ConfigError` for a row that has computed
    fewer than no tokens, and for an unknown policy."""
    rows = by_column(step.rows)
    if not rows:
        return StepState(0, 0)
    computed, drafts = rows.num_computed_tokens, rows.num_drafts
    received, wanting = rows.post_transfer, rows.wants_to_propose
    lowest = min(computed)
    if lowest < 0:
        raise ConfigError(
            f"a row has {lowest} computed tokens; allowed: integers from 0",
            field="num_computed_tokens",
            value=lowest,
        )
    holds_prefill = int(lowest == 0 or rows.num_new_tokens.count(1) < len(rows))
    if holds_prefill:
        decoding = list(filter(is_decode_row, rows))
        if not decoding:
            return StepState(len(rows), 0, holds_prefill=holds_prefill)
        computed, _, drafts, received, wanting = zip(*decoding, strict=True)
        lowest = min(computed)
    n = max(computed)
    if not bucketer.num_speculative_tokens:
        return StepState(len(rows), n, holds_prefill=holds_prefill)

    longest, limit = _longest_with_drafts(bucketer), bucketer.draft_limit
    if n > longest:
        drafts = tuple(d for c, d in zip(computed, drafts, strict=True) if c <= longest)
    query_len = 1 + max(drafts, default=0)
    override = Override.FORCED if step.force_without_spec else Override.NONE
    if any(received):
        override = max(override, _override_of(step.post_transfer_policy))
        shortest = min(c for c, r in zip(computed, received, strict=True) if r)
        if step.post_transfer_policy == PostTransferPolicy.PADDED and shortest <= longest:
            query_len = max(query_len, 1 + bucketer.num_speculative_tokens)
    if not all(wanting):
        lowest = min((c for c, w in zip(computed, wanting, strict=True) if w), default=limit)
    room = max(limit - lowest, 0)
    return StepState(len(rows), n, query_len, override, room, holds_prefill)


_POST_TRANSFER = {
    PostTransferPolicy.PADDED: Override.POST_TRANSFER_PADDED,
    PostTransferPolicy.WITHOUT_SPEC: Override.POST_TRANSFER_WITHOUT_SPEC,
}


def _override_of(policy: PostTransferPolicy) -> Override:
    try:
        return _POST_TRANSFER[policy]
    except KeyError:
        raise ConfigError(
            f"post_transfer_policy is {shown(policy)}; allowed: PostTransferPolicy.WITHOUT_SPEC, "
            "PostTransferPolicy.PADDED",
            field="post_transfer_policy",
            value=policy,
        ) from None


def verified_drafts(bucketer: Bucketer, step: Step, shapes: StepShapes) -> list[int]:
    """How many drafts (placeholders included) each row of a decode step verifies in the chosen target
    program. It computes one token more; what a uniform program is wider than that holds placeholders."""
    target = shapes.target
    if target is None or target.family is not Family.TARGET_WITH_SPEC or not step.rows:
        return [0] * len(step.rows)
    longest, spec_tokens = _longest_with_drafts(bucketer), bucketer.num_speculative_tokens
    padded = step.post_transfer_policy == PostTransferPolicy.PADDED
    rows = by_column(step.rows)
    # A program's context holds every row of its step.
    all_short = target.context_len <= longest or max(rows.num_computed_tokens) <= longest
    if all_short and not (padded and any(rows.post_transfer)):
        return list(rows.num_drafts)
    by_row = zip(rows.num_computed_tokens, rows.num_drafts, rows.post_transfer, strict=True)
    return [
        0 if computed > longest else spec_tokens if padded and received else drafts
        for computed, drafts, received in by_row
    ]


def proposes(bucketer: Bucketer, row: Row, shapes: StepShapes) -> bool:
    """Whether a decode row gets drafts from the chosen draft program."""
    if shapes.draft is None or not row.wants_to_propose:
        return False
    if bucketer.query_len_support is QueryLenSupport.UNIFORM:
        return True
    spec_tokens = bucketer.num_speculative_tokens
    drafts = spec_tokens if shapes.target_reason in _WITH_SPEC else 0
    return row.num_computed_tokens + 1 + drafts + spec_tokens <= bucketer.draft_limit


def _longest_with_drafts(bucketer: Bucketer) -> int:
    """The most computed tokens with which a row keeps its drafts. Uniform programs take all rows or
    none, so there the longest row of the whole group decides, when the shapes are selected."""
    if bucketer.query_len_support is QueryLenSupport.UNIFORM:
        return bucketer.max_model_len
    return bucketer.max_model_len - 1 - bucketer.num_speculative_tokens
