"""What selection knows of a decode step: its rows, and what the engine wishes for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Self, TypeVar, overload

from neffbuild.config.errors import ConfigError

_T = TypeVar("_T")


class PostTransferPolicy(StrEnum):
    """What an engine does on a row's first decode step after a KV transfer, when no auxiliary hidden
    states exist to draft from: run the whole step without speculation, or give the row placeholder
    drafts."""

    WITHOUT_SPEC = "without_spec"
    PADDED = "padded"


class Row(NamedTuple):
    """One scheduled request.

    `num_computed_tokens` are the positions already in the KV cache. `num_new_tokens` are the known
    tokens (of the prompt, or sampled) not yet computed, all of them, whatever part of them the step
    computes; drafts are not among them. `num_drafts` are the drafts it brings to be verified.
    `wants_to_propose` is False for a row that needs no drafts for its next step.
    """

    num_computed_tokens: int
    num_new_tokens: int = 1
    num_drafts: int = 0
    post_transfer: bool = False
    wants_to_propose: bool = True


class Rows(Sequence[Row]):
    """The rows of a step by column: what an engine has them in, and what is gone through in every step.

    Each argument is the field of `Row` of its name, for all rows in one order, an array of NumPy's or
    torch's too; one left out has that field's default in every row. Raises `ConfigError` for columns of
    different lengths.
    """

    __slots__ = Row._fields

    def __init__(
        self,
        num_computed_tokens: Iterable[int],
        num_new_tokens: Iterable[int] | None = None,
        num_drafts: Iterable[int] | None = None,
        post_transfer: Iterable[bool] | None = None,
        wants_to_propose: Iterable[bool] | None = None,
    ) -> None:
        computed = _column(num_computed_tokens)
        count = len(computed)
        self.num_computed_tokens = computed
        self.num_new_tokens = (1,) * count if num_new_tokens is None else _column(num_new_tokens)
        self.num_drafts = (0,) * count if num_drafts is None else _column(num_drafts)
        self.post_transfer = (False,) * count if post_transfer is None else _column(post_transfer)
        self.wants_to_propose = (
            (True,) * count if wants_to_propose is None else _column(wants_to_propose)
        )
        if not (
            len(self.num_new_tokens)
            == len(self.num_drafts)
            == len(self.post_transfer)
            == len(self.wants_to_propose)
            == count
        ):
            lengths = {name: len(getattr(self, name)) for name in self.__slots__}
            raise ConfigError(
                f"the columns of a step's rows are of different lengths: {lengths}",
                field="rows",
                hint="hand over one value for each row in every column, or leave the column out",
            )

    def __len__(self) -> int:
        return len(self.num_computed_tokens)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> Row | Self:
        columns = [getattr(self, name)[index] for name in self.__slots__]
        return type(self)(*columns) if isinstance(index, slice) else Row(*columns)


def _column(values: Iterable[_T]) -> tuple[_T, ...]:
    # Numbers of an array wrap around in its own width.
    listed = getattr(values, "tolist", None)
    return tuple(values if listed is None else listed())


def by_column(rows: Sequence[Row]) -> Rows:
    """Rows by column, unless they are already."""
    if isinstance(rows, Rows):
        return rows
    return Rows(*zip(*rows, strict=True)) if rows else Rows(())


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one rank. `force_without_spec` is the engine's own wish."""

    rows: Sequence[Row]
    post_transfer_policy: PostTransferPolicy = PostTransferPolicy.WITHOUT_SPEC
    force_without_spec: bool = False


def is_decode_row(row: Row) -> bool:
    """Whether a row decodes: exactly one known token to compute, over prior state.

    The last token of a prompt whose others are computed (prefix cache, KV transfer) is decoded; a prompt
    of one token is prefilled, and so is the recomputation after a preemption. How many tokens the step
    schedules says nothing: the first of many may be scheduled alone.
    """
    return row.num_computed_tokens > 0 and row.num_new_tokens == 1
