"""The dispatcher: from the live batch of a step to the program that runs it, and its outputs.

It never compiles: a step whose program is not in the store is an error that names the unit, its key and
the command that builds it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from neffbuild.config.errors import ConfigError
from neffbuild.grid.bucketer import Bucketer
from neffbuild.grid.select import Row, Step, StepShapes, select_shapes, step_state
from neffbuild.grid.shapes import DecodeShape
from neffbuild.models.decode import StepInputs, step_inputs
from neffbuild.runtime.block_table import TrimmedBlockTable, head_trim, new_trimmed
from neffbuild.runtime.loader import Loader
from neffbuild.toolchain.base import BoundExecutable


class DecodeBatch(NamedTuple):
    """The live rows of a decode step, in one order.

    - `rows`: what selection needs of each.
    - `token_ids` `[len(rows)]` integer: the token each row computes, at position `num_computed_tokens`.
    - `block_table` `[len(rows), columns]` integer: the engine's own table at full width; the block of
      every position up to the new one is in it.
    """

    rows: Sequence[Row]
    token_ids: Tensor
    block_table: Tensor


class StepResult(NamedTuple):
    """`outputs` by name, live rows only: `next_token_ids` `[len(rows), query_len]` int32, `logits`
    `[len(rows), query_len, vocab_size]`."""

    shapes: StepShapes
    outputs: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Program:
    """A loaded executable with the input buffers it is bound to; each step fills them anew."""

    call: BoundExecutable
    outputs: tuple[str | None, ...]
    inputs: StepInputs
    block_table: TrimmedBlockTable


class Dispatcher:
    """Runs decode steps, each in the smallest program that holds it.

    `tensors` are the model's weights and the KV caches by the names programs know them under
    (`models.decode.named_tensors`, `named_kv_caches`): one set for all programs.
    """

    def __init__(self, bucketer: Bucketer, loader: Loader, tensors: Mapping[str, Tensor]) -> None:
        self._bucketer = bucketer
        self._loader = loader
        self._tensors = tensors
        self._programs: dict[DecodeShape, Program] = {}

    def warm_up(self) -> None:
        """Load every program of the manifest. Raises as `Loader.load_all` does."""
        for shape in self._loader.load_all():
            if isinstance(shape, DecodeShape):
                self.program(shape)

    def select(self, step: Step) -> StepShapes:
        """The shapes a step runs in. Raises `AboveLadder` for a step no program holds."""
        return select_shapes(self._bucketer, step_state(self._bucketer, step))

    def program(self, shape: DecodeShape) -> Program:
        """The program of a shape, loaded when first asked for. Raises as `Loader.load` does, and
        `ConfigError` when `tensors` lack something the program needs."""
        program = self._programs.get(shape)
        if program is None:
            program = self._programs[shape] = self._bind(shape)
        return program

    def run(self, batch: DecodeBatch) -> StepResult:
        """Run one decode step; keys and values are written into the KV caches in place.

        Raises `AboveLadder` for a step no program holds, `MissingUnit` for one whose program is not
        stored, `ConfigError` for a batch with a prefill row (no decode program computes it).
        """
        shapes = self.select(Step(batch.rows))
        if shapes.target is None:
            raise ConfigError(
                "the batch holds a prefill row, which no decode program computes",
                field="rows",
                hint="prefill it first; the last token of a prompt is decoded, over prior state",
            )
        return StepResult(shapes, self.run_in(self.program(shapes.target), batch))

    def run_in(self, program: Program, batch: DecodeBatch) -> dict[str, Tensor]:
        """Run one decode step in a given program that is large enough for it."""
        rows = len(batch.rows)
        self._fill(program, batch, rows)
        results = program.call({})
        return {
            name: tensor[:rows]
            for name, tensor in zip(program.outputs, results, strict=True)
            if name is not None
        }

    def _bind(self, shape: DecodeShape) -> Program:
        executable = self._loader.load(shape)
        table = new_trimmed(shape.num_seqs, self._bucketer.block_table_width(shape))
        inputs = step_inputs(shape, self._bucketer.block_size)._replace(
            block_table=table.block_table
        )
        # The buffers are checked here, once, and not in every step.
        call = executable.bind({**self._tensors, **inputs._asdict()})
        if call.free:
            raise ConfigError(
                f"the program {shape.bucket_name} needs {', '.join(call.free)}, which the model handed "
                "over does not have",
                field="tensors",
                hint="hand over every weight, buffer and KV cache of the model it was compiled for",
            )
        return Program(call, executable.outputs, inputs, table)

    def _fill(self, program: Program, batch: DecodeBatch, rows: int) -> None:
        inputs, block_size = program.inputs, self._bucketer.block_size
        head_trim(batch.block_table, program.block_table)
        positions = torch.tensor(
            [row.num_computed_tokens for row in batch.rows], dtype=torch.int64
        ).unsqueeze(1)
        blocks = inputs.block_table[:rows].gather(1, positions // block_size)
        inputs.input_ids[:rows, 0] = batch.token_ids
        inputs.positions[:rows] = positions
        # In int64, as positions are: blocks are int32 and slots need not fit.
        inputs.slot_mapping[:rows] = torch.add(positions % block_size, blocks, alpha=block_size)
        # Rows beyond the live ones are pad rows; programs read nothing else of them.
        inputs.query_lens[:rows] = 1
        inputs.query_lens[rows:] = 0
