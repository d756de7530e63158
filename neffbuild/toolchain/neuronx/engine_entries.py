"""Which unit an entry of vLLM Neuron's cache is for, told by the shapes of its graph's inputs.

The engine keeps no list of which graph is which bucket, and the order of its log depends on which lane is
first. Where the entry holds the texts that are kept for people, names and shapes of the inputs tell
(`neffbuild.grid.engine_entries`). They are no part of what makes an entry, so where they are not there, or
cannot be read, the graph's own word is taken, which has shapes and no names:

- A step takes its T tokens as vectors of integers, and for each group of KV layers a block table: a matrix of
  integers with a row for each sequence and as many columns as the bucket has blocks. So a unit is told by T,
  the number of rows and the widths of the tables.
- Draft and with-spec target of one bucket agree in all of these. Their KV caches are inputs too, a number of
  tensors for each layer, with the number of blocks among their dimensions: that tells the model.

Vectors of other lengths may be among the inputs (one length for each sequence, and offsets of queries,
which are one more than sequences), so of the units that fit the one with most tokens is meant, except where
its vector may be the one of offsets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from neffbuild.config.buckets import P_MAX
from neffbuild.config.build import BuildConfig
from neffbuild.config.findings import Findings
from neffbuild.grid.bucketer import Bucketer
from neffbuild.grid.engine_entries import EngineEntry, Unread, entry_shapes
from neffbuild.grid.expand import WarmUp, expand
from neffbuild.grid.phases import Phase
from neffbuild.grid.shapes import DecodeShape, Family, PrefillShape, Shape
from neffbuild.toolchain.base import Capabilities
from neffbuild.toolchain.neuronx.engine_config import Row
from neffbuild.toolchain.neuronx.hlo_shapes import NoShapes, Parameter, parameter_shapes

_DRAFTS = frozenset({Family.DRAFT, Family.DRAFT_PREFILL})
_TENSORS_PER_LAYER = (1, 2)
"""Keys and values of a layer are one tensor, or one each."""


@dataclass(frozen=True, slots=True)
class Signature:
    """What the inputs of a unit's graph look like: `tokens` of `num_seqs` sequences, block tables of the
    widths in `tables`, KV caches of `layers` layers."""

    tokens: int
    num_seqs: int
    tables: frozenset[int]
    layers: int


@dataclass(frozen=True, slots=True)
class GraphInputs:
    """What one captured graph takes: lengths of its vectors of integers, (rows, columns) of its matrices
    of integers, and how many of its inputs are KV caches."""

    vectors: frozenset[int]
    matrices: frozenset[tuple[int, int]]
    kv_tensors: int

    @classmethod
    def of(cls, parameters: Iterable[Parameter], num_kv_blocks: int) -> GraphInputs:
        """`num_kv_blocks` is the size of the KV pool in blocks."""
        found = tuple(parameters)
        integers = [parameter.dims for parameter in found if parameter.integer]
        return cls(
            vectors=frozenset(dims[0] for dims in integers if len(dims) == 1),
            matrices=frozenset((dims[0], dims[1]) for dims in integers if len(dims) == 2),
            kv_tensors=sum(len(one.dims) >= 4 and num_kv_blocks in one.dims for one in found),
        )


@dataclass(frozen=True, slots=True)
class RowUnits:
    """The units of one row, each with what its graph takes, and the size of the KV pool in blocks."""

    bucketer: Bucketer
    units: Sequence[tuple[Shape, Signature]]
    num_kv_blocks: int

    @classmethod
    def of(
        cls, config: BuildConfig, capabilities: Capabilities, row: Row, num_kv_blocks: int
    ) -> RowUnits:
        """Those of a config's grid. Raises `ConfigError` for a config that has none."""
        findings = Findings(config.source)
        with findings.stage():
            prefill = capabilities.prefill(config, findings) if capabilities.prefill else None
        bucketer = Bucketer.from_config(
            config,
            query_len_support=capabilities.query_len_support,
            window_columns=capabilities.window_columns,
            prefill=prefill,
        )
        # The engine warms what it lists, reached or not.
        grid = expand(bucketer, WarmUp.FULL_PRODUCT, tuple(Phase))
        units = tuple(
            (one.shape, signature(one.shape, config, bucketer))
            for one in grid.shapes
            if row.holds(one.shape)
        )
        return cls(bucketer, units, num_kv_blocks)

    def shapes_of(self, texts: EngineEntry, graph: bytes | None) -> frozenset[Shape]:
        """The units of the row that an entry may be for: none, one, or those that cannot be told apart.

        `texts` is what the entry keeps for people, `graph` its `graph.hlo`. Raises `Unread` where neither
        says what the graph takes.
        """
        try:
            named = entry_shapes(self.bucketer, texts)
        except Unread as unread:
            try:
                inputs = GraphInputs.of(parameter_shapes(graph or b""), self.num_kv_blocks)
            except NoShapes as error:
                raise Unread(f"{unread}; of graph.hlo, {error}") from error
            return frozenset(fitting(inputs, self.units))
        return named & {shape for shape, _ in self.units}


def signature(shape: Shape, config: BuildConfig, bucketer: Bucketer) -> Signature:
    """What the graph of a decode or prefill shape of a config takes."""
    model = config.draft_model if shape.family in _DRAFTS else None
    layers = (model or config.model).num_hidden_layers
    if isinstance(shape, DecodeShape):
        tables = set()
        if bucketer.kv_layers(shape).full:
            width = bucketer.block_table_width(shape)
            tables.add(_aligned(width, bucketer, shape.context_bucketed))
        if (window := bucketer.window_table_width(shape)) is not None:
            tables.add(window)
        return Signature(shape.num_tokens, shape.num_seqs, frozenset(tables), layers)
    assert isinstance(shape, PrefillShape)
    # One request at a time, over the table of a whole context, whichever the bucket is.
    return Signature(shape.num_batched_tokens, 1, frozenset(), layers)


def fitting(inputs: GraphInputs, units: Sequence[tuple[Shape, Signature]]) -> list[Shape]:
    """The units that a graph with these inputs may be for: none, the one it is for, or all of those that
    cannot be told apart by it."""
    able = [(shape, mark) for shape, mark in units if _takes(inputs, mark)]
    able = _most_tokens(able)
    able = _same_tables(inputs, able)
    return [shape for shape, _ in _same_model(inputs, able)]


def _takes(inputs: GraphInputs, mark: Signature) -> bool:
    tables = _tables(inputs, mark)
    return mark.tokens in inputs.vectors and bool(tables) and mark.tables <= tables


def _tables(inputs: GraphInputs, mark: Signature) -> frozenset[int]:
    """The widths of what may be block tables for the unit's sequences."""
    return frozenset(columns for rows, columns in inputs.matrices if rows == mark.num_seqs)


def _most_tokens(units: list[tuple[Shape, Signature]]) -> list[tuple[Shape, Signature]]:
    most = max((mark.tokens for _, mark in units), default=0)
    return [
        (shape, mark)
        for shape, mark in units
        # Offsets of the queries of n sequences are n + 1 numbers.
        if mark.tokens == most or (mark.tokens == mark.num_seqs == most - 1)
    ]


def _same_tables(
    inputs: GraphInputs, units: list[tuple[Shape, Signature]]
) -> list[tuple[Shape, Signature]]:
    """A window's table may be as wide as that of a shorter context: where the tables of some units are
    just those of the graph, it is one of these."""
    exact = [(shape, mark) for shape, mark in units if mark.tables == _tables(inputs, mark)]
    return exact or units


def _same_model(
    inputs: GraphInputs, units: list[tuple[Shape, Signature]]
) -> list[tuple[Shape, Signature]]:
    if len({mark.layers for _, mark in units}) < 2:
        return units
    return [
        (shape, mark)
        for shape, mark in units
        if inputs.kv_tensors in [mark.layers * each for each in _TENSORS_PER_LAYER]
    ]


def _aligned(width: int, bucketer: Bucketer, context_bucketed: bool) -> int:
    """Where contexts have no buckets, the engine rounds the table up to whole kernel tiles."""
    tile = 1 if context_bucketed else max(P_MAX // bucketer.block_size, 1)
    return -(-width // tile) * tile
