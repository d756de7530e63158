"""The shapes a decode worker compiles, as a tagged union.

A shape is what a graph is specialised for and nothing else; everything about the model and the
toolchain is in the recipe (`neffbuild.cache.recipe`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Family(StrEnum):
    """Which program a shape belongs to."""

    TARGET = "target"
    TARGET_WITH_SPEC = "target-with-spec"
    TARGET_WITHOUT_SPEC = "target-without-spec"
    DRAFT = "draft"
    PREFILL = "prefill"
    DRAFT_PREFILL = "draft-prefill"


DECODE_FAMILIES = (
    Family.TARGET,
    Family.TARGET_WITH_SPEC,
    Family.TARGET_WITHOUT_SPEC,
    Family.DRAFT,
)


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """One decode program: `num_seqs` rows of `query_len` tokens over `context_len` KV positions.

    `context_bucketed` says whether `decode_context_length_buckets` is configured. It is part of the
    shape because an engine lays the block table out differently without the feature, and because the
    label then has no `_ctx` suffix.
    """

    family: Family
    num_seqs: int
    query_len: int
    context_len: int
    context_bucketed: bool = True

    @property
    def num_tokens(self) -> int:
        """Tokens per step, exact: 6 rows of 1 + 6 are 42, never rounded."""
        return self.num_seqs * self.query_len

    @property
    def bucket_name(self) -> str:
        """The label of reports and metrics, as vLLM Neuron spells it for the target families."""
        prefix = "draft" if self.family is Family.DRAFT else "decode"
        name = f"{prefix}_b{self.num_seqs}"
        if self.family is not Family.TARGET:
            name += f"_s{self.query_len}"
        return f"{name}_ctx{self.context_len}" if self.context_bucketed else name

    def document(self) -> dict[str, Any]:
        """Canonical JSON form, as it enters a recipe."""
        return {
            "kind": "decode",
            "family": self.family.value,
            "num_seqs": self.num_seqs,
            "query_len": self.query_len,
            "context_len": self.context_len,
            "context_bucketed": self.context_bucketed,
        }


@dataclass(frozen=True, slots=True)
class PrefillShape:
    """One prefill program: `num_batched_tokens` tokens of one request, `kv_segment` 0 when the KV
    cache is not read in segments."""

    family: Family
    num_batched_tokens: int
    kv_segment: int = 0

    @property
    def bucket_name(self) -> str:
        prefix = "draft_prefill" if self.family is Family.DRAFT_PREFILL else "prefill"
        name = f"{prefix}_s{self.num_batched_tokens}"
        return f"{name}_kv{self.kv_segment}" if self.kv_segment else name

    def document(self) -> dict[str, Any]:
        """Canonical JSON form, as it enters a recipe."""
        return {
            "kind": "prefill",
            "family": self.family.value,
            "num_batched_tokens": self.num_batched_tokens,
            "kv_segment": self.kv_segment,
        }


@dataclass(frozen=True, slots=True)
class SymbolicShape:
    """One program for every step: number of sequences, query length and context are symbolic in it."""

    family: Family

    @property
    def bucket_name(self) -> str:
        return "step_any"

    def document(self) -> dict[str, Any]:
        """Canonical JSON form, as it enters a recipe."""
        return {"kind": "symbolic", "family": self.family.value}


Shape = DecodeShape | PrefillShape | SymbolicShape

ALL_RANKS = "all"
"""The rank scope of a program that every rank shares."""


def unit_name(shape: Shape, rank_scope: str) -> str:
    """The name of a unit: its shape's, and which ranks it is for where they do not share it."""
    return shape.bucket_name if rank_scope == ALL_RANKS else f"{shape.bucket_name}@{rank_scope}"


def shape_from_document(document: dict[str, Any]) -> Shape:
    """Inverse of `document()`. Raises `KeyError` or `ValueError` on anything else."""
    fields = dict(document)
    kind = fields.pop("kind")
    fields["family"] = Family(fields["family"])
    if kind == "decode":
        return DecodeShape(**fields)
    if kind == "prefill":
        return PrefillShape(**fields)
    if kind == "symbolic":
        return SymbolicShape(**fields)
    raise ValueError(f"unknown shape kind {kind!r}")
