"""What the entries in vLLM Neuron's own compile cache are programs of, and how they compare with a plan.

The key of an entry says nothing of its shape, and the order of entries, or of log lines, is that of whoever
finished first. But an entry keeps, for people, the captured graph and the shapes of its inputs: of a graph
`input_ids` has the tokens of a step, `…block_table_tensor` rows and columns, and only a draft's takes the
target's hidden states.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from neffbuild.config.buckets import P_MAX
from neffbuild.config.errors import ConfigError
from neffbuild.grid.bucketer import Bucketer
from neffbuild.grid.conformance import (
    Conformance,
    Difference,
    Expected,
    bucket_names,
    covered,
    shape_differences,
)
from neffbuild.grid.engine_ranks import found_by_ranks, rank_folder, with_ranks
from neffbuild.grid.shapes import DecodeShape, Family, PrefillShape, Shape


@dataclass(frozen=True, slots=True)
class EngineEntry:
    """One entry. `example_inputs` and `graph` are the texts kept for people, None where there are none;
    `problem` is why it could not be read; `finished` says whether the engine would take it for a hit, and
    `damage` why not where it says of itself that it is finished."""

    name: str
    example_inputs: str | None = None
    graph: str | None = None
    finished: bool = False
    damage: str | None = None
    problem: str | None = None


class Unread(Exception):
    """It cannot be told what an entry is a program of. The message says why."""


class Input(NamedTuple):
    """An input of a graph."""

    name: str
    shape: tuple[int, ...]


_INPUT = re.compile(r"Input ([0-9]{1,6}):(?:\s+Shape: \(([0-9, ]{0,200})\))?")
_PLACEHOLDER = re.compile(r"placeholder\[target=([^\[\]\s]{1,400})\]")


def compare_entries(
    expected: Expected, entries: Iterable[EngineEntry], empty_ranks: Iterable[str] = ()
) -> Conformance:
    """A plan and what lies in an engine's cache, in which the folders of `empty_ranks` hold nothing.

    Raises `ConfigError` where nothing of it can be told.
    """
    held: defaultdict[str, set[Shape]] = defaultdict(set, {rank: set() for rank in empty_ranks})
    unread: dict[str, str] = {}
    differences: list[Difference] = []
    told = unfinished = 0
    for entry in entries:
        if entry.damage is not None:
            detail = f"it says that it is finished, and is not: {entry.damage}"
            differences.append(Difference("failed", entry.name, detail))
        try:
            shapes = entry_shapes(expected.bucketer, entry)
        except Unread as reason:
            unread[entry.name] = str(reason)
        else:
            held[rank_folder(entry.name)] |= shapes
            told += 1
            unfinished += not entry.finished and entry.damage is None
    if not told:
        raise ConfigError(
            "nothing in the engine's cache says what it is a program of"
            + (f": of {len(unread)} entries, {next(iter(unread.values()))}" if unread else ""),
            field="--engine-cache",
            hint="name the folder whose subfolders are named by 32 hex digits; looked for "
            "example_inputs.txt and fxgraph.txt in each of them",
        )
    left_out: list[str] = []
    for planned, is_prefill in ((expected.decode, False), (expected.prefill, True)):
        of_phase = {
            folder: frozenset(one for one in shapes if isinstance(one, PrefillShape) is is_prefill)
            for folder, shapes in held.items()
        }
        if planned:
            found = found_by_ranks(of_phase)
            of_ranks = shape_differences(expected, planned, list(found.values()), frozenset())
            differences += with_ranks(of_ranks, found)
        else:
            left_out += bucket_names(frozenset[Shape]().union(*of_phase.values()))
    notes = [f"{told} entries were read"]
    if unfinished:
        notes.append(
            f"{unfinished} of them are not finished: the engine compiles them at its start"
        )
    return Conformance(
        covered(expected.shapes, map(frozenset, held.values()), differences),
        tuple(differences),
        tuple(left_out),
        unread,
        tuple(notes),
    )


def entry_shapes(bucketer: Bucketer, entry: EngineEntry) -> frozenset[Shape]:
    """The shapes an entry's program serves: one, unless several contexts of the plan have block tables
    of one width, or several KV segments the same inputs. Raises `Unread`."""
    inputs = _inputs(entry)
    tokens, rows, columns = _sizes(inputs)
    draft = any("target_hidden_states" in one.name for one in inputs)
    query_len, rest = divmod(tokens, rows)
    if rest or not query_len:
        raise Unread(f"{tokens} tokens are not the same number for each of {rows} rows")
    spec_tokens = bucketer.num_speculative_tokens
    if rows == 1 and query_len > 1 + spec_tokens:
        return _prefill(bucketer, Family.DRAFT_PREFILL if draft else Family.PREFILL, tokens)
    if draft:
        family = Family.DRAFT
    elif query_len > 1:
        family = Family.TARGET_WITH_SPEC
    else:
        family = Family.TARGET_WITHOUT_SPEC if spec_tokens else Family.TARGET
    bucketed = bucketer.context_bucketed
    ladders = bucketer.decode.get(family)
    planned = (
        DecodeShape(family, rows, query_len, context_len, bucketed)
        for context_len in (ladders.context_len.rungs if ladders else ())
    )
    found = frozenset[Shape](one for one in planned if _columns(bucketer, one) == columns)
    context_len = columns * bucketer.block_size * bucketer.dcp_size
    return found or frozenset({DecodeShape(family, rows, query_len, context_len, bucketed)})


def _prefill(bucketer: Bucketer, family: Family, tokens: int) -> frozenset[Shape]:
    # The KV segment is a size inside the graph, of which the inputs say nothing.
    ladders = bucketer.prefill.get(family)
    segments = ladders.kv_segments if ladders else (0,)
    return frozenset(PrefillShape(family, tokens, segment) for segment in segments)


def _columns(bucketer: Bucketer, shape: DecodeShape) -> int:
    """The engine's block-table width: without context buckets it is rounded up to the kernel's tile."""
    width = bucketer.block_table_width(shape)
    if shape.context_bucketed:
        return width
    tile = max(P_MAX // bucketer.block_size, 1)
    return -(-width // tile) * tile


def _inputs(entry: EngineEntry) -> list[Input]:
    if entry.problem is not None:
        raise Unread(entry.problem)
    if entry.example_inputs is None or entry.graph is None:
        lacking = "example_inputs.txt" if entry.example_inputs is None else "fxgraph.txt"
        raise Unread(f"it has no {lacking}")
    names = _PLACEHOLDER.findall(entry.graph)
    shapes = {
        int(number): tuple(int(size) for size in re.findall(r"[0-9]{1,9}", sizes))
        for number, sizes in _INPUT.findall(entry.example_inputs)
    }
    if not names or len(names) != len(shapes) or set(shapes) != set(range(len(names))):
        raise Unread(
            f"its graph has {len(names)} inputs and example_inputs.txt {len(shapes)}: "
            "which is which cannot be told"
        )
    return [Input(name, shapes[number]) for number, name in enumerate(names)]


def _sizes(inputs: Iterable[Input]) -> tuple[int, int, int]:
    """Tokens, rows, and columns of the widest block table: those of sliding windows are narrower."""
    tokens: set[int] = set()
    tables: set[tuple[int, int]] = set()
    for one in inputs:
        if "block_table" in one.name and "full_block_table" not in one.name:
            if len(one.shape) == 2:
                tables.add((one.shape[0], one.shape[1]))
        elif "input_ids" in one.name and one.shape:
            count = 1
            for size in one.shape:
                count *= size
            tokens.add(count)
    rows = {rows for rows, _ in tables}
    if len(tokens) != 1 or len(rows) != 1 or 0 in rows:
        raise Unread(
            "among its inputs there is not one number of tokens (input_ids) and one of rows "
            "(block_table_tensor)"
        )
    return tokens.pop(), rows.pop(), max(columns for _, columns in tables)
