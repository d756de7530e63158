"""The dispatcher: from the live batch of a step to the program that runs it, and its outputs.

It never compiles: a step whose program is not in the store is an error that names the unit, its key and
the command that builds it, unless a larger one may stand in for it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from neffbuild.config.errors import ConfigError, MissingUnit
from neffbuild.config.values import shown
from neffbuild.grid.bucketer import Bucketer, QueryLenSupport
from neffbuild.grid.select import (
    IDLE,
    StepShapes,
    next_larger,
    select_shapes,
    step_state,
    verified_drafts,
)
from neffbuild.grid.shapes import DecodeShape, Family
from neffbuild.grid.step import Rows, Step, by_column
from neffbuild.models.decode import named_inputs
from neffbuild.runtime.batch import DecodeBatch, DraftBatch, StepResult
from neffbuild.runtime.filling import fill_draft, fill_target
from neffbuild.runtime.loader import Loader
from neffbuild.runtime.observer import StepObserver
from neffbuild.runtime.step_buffers import StepBuffers, draft_buffers, target_buffers
from neffbuild.runtime.step_sync import StepSync
from neffbuild.toolchain.base import BoundExecutable

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Program:
    """A loaded executable with the input buffers it is bound to; each step fills them anew."""

    call: BoundExecutable
    outputs: tuple[str | None, ...]
    buffers: StepBuffers


class Dispatcher:
    """Runs decode steps, each in the smallest programs that hold it.

    `tensors` are the target's weights and KV caches by the names its programs know them under
    (`models.decode.named_tensors`, `named_kv_caches`), `draft_tensors` those of the draft: one set each
    for all programs. `sync` reduces steps over data-parallel ranks. A step whose program is not stored is
    an error, or with `fallback="larger"` runs in the next larger one that is: counted, and logged once
    for each shape. That depends on the manifest alone, so it is the same on every rank that serves it.
    `observer` is told of every program that ran or was missed (`runtime.step_metrics` has one).
    """

    def __init__(
        self,
        bucketer: Bucketer,
        loader: Loader,
        tensors: Mapping[str, Tensor],
        draft_tensors: Mapping[str, Tensor] | None = None,
        sync: StepSync | None = None,
        fallback: Literal["larger"] | None = None,
        observer: StepObserver | None = None,
    ) -> None:
        if fallback not in (None, "larger"):
            raise ConfigError(
                f"fallback is {shown(fallback)}; allowed: None, 'larger'",
                field="fallback",
                value=fallback,
            )
        self._bucketer = bucketer
        self._fallback = fallback
        self._observer = observer
        self._stand_ins: dict[DecodeShape, DecodeShape] = {}
        self._sync = sync or StepSync(None)
        self._loader = loader
        self._tensors = tensors
        self._draft_tensors = draft_tensors or {}
        self._programs: dict[DecodeShape, Program] = {}
        self._uniform = bucketer.query_len_support is QueryLenSupport.UNIFORM

    def warm_up(self) -> None:
        """Load every program of the manifest. Raises as `Loader.load_all` does; with a fallback what is
        missing is no error yet."""
        shapes = self._loader.load_all() if self._fallback is None else self._loader.stored
        for shape in shapes:
            if isinstance(shape, DecodeShape):
                self.program(shape)

    def select(self, step: Step) -> StepShapes:
        """The shapes a step runs in on a rank whose steps are its own.

        Raises `AboveLadder` for a step no program holds, `ConfigError` on a rank whose peers' steps
        count too.
        """
        if self._sync.active:
            raise ConfigError(
                "the data-parallel ranks run each step in the same programs, and this one was not prepared",
                field="prepared",
                hint="hand over what `Dispatcher.prepare` returned for the step's number",
            )
        return select_shapes(self._bucketer, step_state(self._bucketer, step))

    def prepare(self, number: int, step: Step | None = None) -> StepShapes:
        """The shapes of step `number`, the same on every data-parallel rank; `step` is what this one has
        of it, None when it is idle. Raises as `StepSync.prepare` does, and `AboveLadder` on every rank
        when some rank's part fits no program."""
        own = step_state(self._bucketer, step) if step is not None and step.rows else IDLE
        return select_shapes(self._bucketer, self._sync.prepare(number, own))

    def program(self, shape: DecodeShape) -> Program:
        """The program of a shape, loaded when first asked for. Raises as `Loader.load` does, and
        `ConfigError` when `tensors` lack something the program needs."""
        program = self._programs.get(shape)
        if program is None:
            program = self._programs[shape] = self._bind(shape)
        return program

    def run(self, batch: DecodeBatch, prepared: StepShapes | None = None) -> StepResult:
        """Run the target's part of a decode step; keys and values are written into the KV caches in
        place, those of tokens that come to nothing too. `prepared` are the step's shapes where its
        number was prepared.

        Raises `AboveLadder` for a step no program holds, `MissingUnit` for one whose program is not
        stored, `ConfigError` for a batch with a prefill row (no decode program computes it) and as
        `fill_target` does.
        """
        rows = by_column(batch.rows)
        step = Step(rows, batch.post_transfer_policy, batch.force_without_spec)
        shapes = prepared or self.select(step)
        if shapes.target is None:
            raise _holds_prefill()
        verified = verified_drafts(self._bucketer, step, shapes)
        if prepared is not None:
            self._check_prepared(shapes.target, step, rows, verified)
        program = self._program_for(shapes.target)
        fill_target(program.buffers, batch, rows, None if self._uniform else verified)
        outputs = _named_outputs(program, len(rows))
        self._observe(shapes.target, len(rows))
        return StepResult(shapes, verified, outputs)

    def _check_prepared(
        self, target: DecodeShape, step: Step, rows: Rows, verified: Sequence[int]
    ) -> None:
        if step_state(self._bucketer, step).holds_prefill:
            raise _holds_prefill()
        drafts = [target.query_len - 1] * len(rows) if self._uniform else verified
        needs = [
            computed + 1 + more
            for computed, more in zip(rows.num_computed_tokens, drafts, strict=True)
        ]
        if (need := max(needs, default=0)) > target.context_len:
            raise ConfigError(
                f"the step was prepared for contexts of up to {target.context_len} positions, and a row of "
                f"it needs {need}",
                field="prepared",
                value=need,
                hint="prepare a step with num_computed_tokens that can only become fewer",
            )

    def run_idle(self, prepared: StepShapes) -> None:
        """An idle rank's part of a step: the same programs as its peers run, over pad rows only, which
        write to the null slot. Nothing runs in a step that is no decode step."""
        for shape in (prepared.target, prepared.draft):
            if shape is not None:
                program = self._program_for(shape)
                program.buffers.place_nothing()
                _named_outputs(program, 0)
                self._observe(shape, 0)

    def run_in(self, program: Program, batch: DecodeBatch) -> dict[str, Tensor]:
        """Run one decode step in a given program that is large enough for it, every draft of every row
        included."""
        rows = by_column(batch.rows)
        fill_target(program.buffers, batch, rows, None if self._uniform else rows.num_drafts)
        return _named_outputs(program, len(rows))

    def propose(self, shape: DecodeShape, batch: DraftBatch) -> Tensor:
        """Run a draft's program: draft token ids `[len(rows), K]` int32, `PAD_TOKEN_ID` in rows that get
        none. Raises `MissingUnit` when it is not stored, and as `fill_draft` does."""
        program = self._program_for(shape)
        fill_draft(program.buffers, batch)
        rows = len(batch.token_ids)
        drafts = _named_outputs(program, rows)["draft_token_ids"]
        self._observe(shape, rows)
        return drafts

    def _program_for(self, shape: DecodeShape) -> Program:
        """The program that runs a step of this shape: its own, or what stands in for it."""
        stand_in = self._stand_ins.get(shape)
        if stand_in is None:
            try:
                return self.program(shape)
            except MissingUnit as missing:
                stored = (one for one in self._loader.stored if isinstance(one, DecodeShape))
                stand_in = next_larger(shape, stored) if self._fallback else None
                if stand_in is None:
                    if self._observer is not None:
                        self._observer.missed(shape)
                    raise
                self._stand_ins[shape] = stand_in
                _log.warning("%s; its steps run in %s", missing.message, stand_in.bucket_name)
        self._loader.counters.fallbacks += 1
        return self.program(stand_in)

    def _observe(self, wanted: DecodeShape, rows: int) -> None:
        if self._observer is not None:
            self._observer.ran(wanted, self._stand_ins.get(wanted, wanted), rows)

    def _bind(self, shape: DecodeShape) -> Program:
        executable = self._loader.load(shape)
        if shape.family is Family.DRAFT:
            tensors = self._draft_tensors
            if "fc.weight" not in tensors:
                raise _lacking(shape, ["fc.weight"])
            buffers = draft_buffers(self._bucketer, shape, tensors)
        else:
            tensors = self._tensors
            buffers = target_buffers(self._bucketer, shape, tensors)
        # The buffers are checked here, once, and not in every step.
        call = executable.bind({**tensors, **named_inputs(buffers.inputs)})
        if call.free:
            raise _lacking(shape, call.free)
        return Program(call, executable.outputs, buffers)


def _holds_prefill() -> ConfigError:
    return ConfigError(
        "the batch holds a prefill row, which no decode program computes",
        field="rows",
        hint="prefill it first; the last token of a prompt is decoded, over prior state",
    )


def _lacking(shape: DecodeShape, names: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"the program {shape.bucket_name} needs {', '.join(names)}, which the model handed over does not "
        "have",
        field="tensors",
        hint="hand over every weight, buffer and KV cache of the model it was compiled for",
    )


def _named_outputs(program: Program, rows: int) -> dict[str, Tensor]:
    """Run the program on what its buffers hold."""
    results = zip(program.outputs, program.call({}), strict=True)
    if rows == len(program.buffers.input_ids):
        return {name: tensor for name, tensor in results if name is not None}
    return {name: tensor[:rows] for name, tensor in results if name is not None}
