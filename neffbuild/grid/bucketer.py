"""The bucketer: the one object that owns every ladder and every lookup in them.

Planner, warm-up and dispatcher ask the same bucketer, so the set of shapes dispatched onto and the set
compiled are equal by construction.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from itertools import pairwise
from typing import Self

from neffbuild.config.buckets import P_MAX, powers_of_two
from neffbuild.config.build import BuildConfig
from neffbuild.config.errors import AboveLadder, ConfigError
from neffbuild.config.neuron_engine import PrefillBuckets
from neffbuild.grid.phases import Phase
from neffbuild.grid.shapes import DecodeShape, Family
from neffbuild.grid.windows import (
    WITHOUT_WINDOWS,
    KVLayers,
    WindowColumns,
    extra_positions,
    span_columns,
)


class QueryLenSupport(StrEnum):
    """Whether one with-spec program replays rows of different query lengths.

    `VARLEN`: one program at 1 + K serves any mix of 1 … 1 + K per row. `UNIFORM`: every row of a
    program has the same query length, so the grid has a query-length ladder.
    """

    UNIFORM = "uniform"
    VARLEN = "varlen"


SPECULATION_FAMILIES = (Family.TARGET_WITH_SPEC, Family.TARGET_WITHOUT_SPEC, Family.DRAFT)
"""Decode families when speculation is configured; `target` alone when it is not."""


@dataclass(frozen=True, slots=True)
class Ladder:
    """The buckets of one axis of one path, ascending.

    `name` is the option that sets them and `limit` the one that sets the last, both for messages. A
    path taken only from `floor` up never uses the rungs below it: they are enumerated, never covered
    onto. Raises `ConfigError` for rungs that are not strictly ascending positive integers.
    """

    name: str
    limit: str
    rungs: tuple[int, ...]
    floor: int = 1

    def __post_init__(self) -> None:
        ascending = all(low < high for low, high in pairwise(self.rungs))
        if not self.rungs or self.rungs[0] < 1 or not ascending:
            raise ConfigError(
                f"{self.name} is {list(self.rungs)}; allowed: positive integers, strictly ascending",
                field=self.name,
                value=list(self.rungs),
            )
        if not 1 <= self.floor <= self.rungs[-1]:
            raise ConfigError(
                f"a path cannot be taken from {self.floor} up when {self.name} is {list(self.rungs)}; "
                f"allowed: a floor of 1 to {self.rungs[-1]}",
                field=self.name,
                value=self.floor,
            )

    def cover(self, n: int) -> int:
        """The smallest rung that is at least `n` and not below the floor.

        Raises `AboveLadder` above the last rung: a step never gets a program too small for it.
        """
        index = bisect_left(self.rungs, n if n > self.floor else self.floor)
        if index == len(self.rungs):
            top = self.rungs[-1]
            raise AboveLadder(
                f"a step needs {n}, above the last of {self.name} ({top}); allowed: up to {top}",
                field=self.name,
                value=n,
                hint=f"stay within {self.limit}, or plan and compile with a larger one",
            )
        return self.rungs[index]

    def cells(self) -> list[tuple[int, range]]:
        """Every rung with the values from the floor up that it covers (none below the floor)."""
        lows = (0, *self.rungs)
        return [
            (rung, range(max(low + 1, self.floor), rung + 1))
            for low, rung in zip(lows, self.rungs, strict=False)
        ]


@dataclass(frozen=True, slots=True)
class DecodeLadders:
    """The three independent ladders of one decode family: live sequences, tokens per row, and KV
    positions a step needs."""

    num_seqs: Ladder
    query_len: Ladder
    context_len: Ladder


@dataclass(frozen=True, slots=True)
class PrefillLadders:
    """Tokens of one prefill step, and the KV segment sizes it may be compiled for (0: unsegmented)."""

    num_batched_tokens: Ladder
    kv_segments: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Bucketer:
    """Every ladder of one serve config on one kind of toolchain, and the limits steps obey.

    `num_speculative_tokens` (K) is 0 without speculation; `draft_limit` is how many positions the
    draft can hold (`max_model_len` without speculation); `dp_size` counts the ranks whose steps may be
    sized by one another; `phases` are those the worker has programs for; `target_layers` and
    `draft_layers` say which layers have a sliding window, and `window_columns` how wide their block
    tables are. All other fields are vLLM's options of the same name.
    """

    decode: Mapping[Family, DecodeLadders]
    prefill: Mapping[Family, PrefillLadders]
    query_len_support: QueryLenSupport
    num_speculative_tokens: int
    max_model_len: int
    draft_limit: int
    block_size: int
    dcp_size: int = 1
    dp_size: int = 1
    context_bucketed: bool = True
    phases: tuple[Phase, ...] = (Phase.DECODE,)
    target_layers: KVLayers = WITHOUT_WINDOWS
    draft_layers: KVLayers = WITHOUT_WINDOWS
    window_columns: WindowColumns = span_columns

    @classmethod
    def from_config(
        cls,
        config: BuildConfig,
        *,
        query_len_support: QueryLenSupport,
        floors: Mapping[Family, int] | None = None,
        prefill: PrefillBuckets | None = None,
        phases: tuple[Phase, ...] = (Phase.DECODE,),
        window_columns: WindowColumns = span_columns,
    ) -> Self:
        """The bucketer of a loaded config.

        `floors` gives, per decode family, the live sequences from which its path is taken; `prefill` the
        buckets that the engine settled on, where it has rules of its own. Raises
        `ConfigError` for lists and floors that make no ladder, and for layers whose windows are not
        stated as they should be.
        """
        serve = config.serve
        neuron = serve.neuron_config
        spec_tokens = serve.num_speculative_tokens
        max_model_len = serve.max_model_len
        floors = floors or {}
        contexts = Ladder(
            "decode_context_length_buckets",
            "max_model_len",
            (*(neuron.decode_context_length_buckets or ()), max_model_len),
        )
        num_seqs = neuron.num_seqs_buckets or powers_of_two(serve.max_num_seqs)
        one_token = Ladder("query_len", "1 + num_speculative_tokens", (1,))
        verify = one_token
        if spec_tokens:
            verify = _verify_ladder(spec_tokens, neuron.verify_query_len_buckets, query_len_support)
        families = SPECULATION_FAMILIES if spec_tokens else (Family.TARGET,)
        return cls(
            decode={
                family: DecodeLadders(
                    Ladder("num_seqs_buckets", "max_num_seqs", num_seqs, floors.get(family, 1)),
                    verify if family in (Family.TARGET_WITH_SPEC, Family.DRAFT) else one_token,
                    contexts,
                )
                for family in families
            },
            prefill=_prefill_ladders(config, prefill),
            query_len_support=query_len_support,
            num_speculative_tokens=spec_tokens,
            max_model_len=max_model_len,
            draft_limit=_draft_limit(config),
            block_size=serve.block_size,
            dcp_size=serve.decode_context_parallel_size,
            dp_size=serve.data_parallel_size,
            context_bucketed=neuron.decode_context_length_buckets is not None,
            phases=phases,
            target_layers=KVLayers.of(config.model),
            draft_layers=KVLayers.of(config.draft_model),
            window_columns=window_columns,
        )

    @property
    def families(self) -> tuple[Family, ...]:
        """The decode families, in the order they are enumerated."""
        return tuple(self.decode)

    def decode_shape(
        self, family: Family, *, num_seqs: int, context_need: int, query_len: int = 1
    ) -> DecodeShape:
        """The smallest shape of `family` for `num_seqs` live rows of up to `query_len` tokens that
        need `context_need` KV positions. Raises `AboveLadder` when there is none."""
        ladders = self.decode[family]
        return _shape(
            family,
            ladders.num_seqs.cover(num_seqs),
            ladders.query_len.cover(query_len),
            ladders.context_len.cover(context_need),
            self.context_bucketed,
        )

    def block_table_width(self, shape: DecodeShape) -> int:
        """Block-table columns on each rank: context lengths are global, and decode context parallelism
        spreads them over `dcp_size` ranks."""
        return -(-shape.context_len // (self.block_size * self.dcp_size))

    def kv_layers(self, shape: DecodeShape) -> KVLayers:
        """The layers of the model whose program a shape is."""
        return self.draft_layers if shape.family is Family.DRAFT else self.target_layers

    def window_table_width(self, shape: DecodeShape) -> int | None:
        """The same of the layers with a sliding window; None where there are none. Context parallelism
        does not narrow it: positions of one window lie on all ranks."""
        window = self.kv_layers(shape).window
        if window is None:
            return None
        extra = extra_positions(shape, self.num_speculative_tokens)
        columns = self.window_columns(window, extra, self.block_size)
        return min(columns, self.block_table_width(shape))


# Grids are small, and a step asks for the same few shapes again and again.
_shape = cache(DecodeShape)


def _verify_ladder(
    spec_tokens: int, buckets: tuple[int, ...] | None, support: QueryLenSupport
) -> Ladder:
    """Tokens per row of with-spec and draft programs; only uniform programs have more than one."""
    widest = 1 + spec_tokens
    rungs = (widest,) if buckets is None or support is QueryLenSupport.VARLEN else buckets
    if rungs[0] < 2 or rungs[-1] != widest:
        # A with-spec row holds a draft; one token per row is the without-spec program, whose label
        # would be the same.
        raise ConfigError(
            f"verify_query_len_buckets is {list(rungs)}; allowed: integers from 2 to {widest}, "
            f"ending with {widest} (1 + num_speculative_tokens)",
            field="serve.additional_config.neuron_config.verify_query_len_buckets",
            value=list(rungs),
            hint=f"leave the option out for [{widest}]",
        )
    return Ladder("verify_query_len_buckets", "1 + num_speculative_tokens", rungs)


def _prefill_ladders(
    config: BuildConfig, settled: PrefillBuckets | None
) -> dict[Family, PrefillLadders]:
    serve = config.serve
    neuron = serve.neuron_config
    most = min(serve.max_num_batched_tokens or serve.max_model_len, serve.max_model_len)
    tokens, segments = settled or PrefillBuckets(
        neuron.num_batched_tokens_buckets or powers_of_two(most, first=P_MAX),
        neuron.kv_segment_size_buckets or (0,),
    )
    ladders = PrefillLadders(
        Ladder("num_batched_tokens_buckets", "max_num_batched_tokens", tokens), segments
    )
    families = [Family.PREFILL]
    if serve.speculative_config is not None:
        families.append(Family.DRAFT_PREFILL)
    return dict.fromkeys(families, ladders)


def _draft_limit(config: BuildConfig) -> int:
    max_model_len = config.serve.max_model_len
    speculation = config.serve.speculative_config
    if speculation is not None and speculation.max_model_len is not None:
        return speculation.max_model_len
    own = config.draft_model.max_position_embeddings if config.draft_model else None
    return max_model_len if own is None else min(own, max_model_len)
