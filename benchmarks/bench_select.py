"""What choosing a step's programs costs on the host, for a batch of 64, and what the whole of a step does.

`Dispatcher.select` against vLLM's own dispatcher of CUDA graphs (where vLLM is installed; it knows batches
only, no contexts, and reads no rows) and against plain searches through the two lists. Then a dispatched
step around a program that does nothing: what is added to any program, with metrics and without. All in
turns in one process; processor time, its median and (for a busy machine) its least, and ratios of these.
Real programs: bench_step.py.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Mapping
from statistics import median
from types import SimpleNamespace

import torch
from prometheus_client import CollectorRegistry

from neffbuild.config.build import BuildConfig
from neffbuild.config.model import ModelConfig
from neffbuild.config.serve import AdditionalConfig, NeuronConfig, ServeConfig, SpeculativeConfig
from neffbuild.grid.bucketer import Bucketer, QueryLenSupport
from neffbuild.grid.shapes import DecodeShape
from neffbuild.grid.step import Row, Rows, Step
from neffbuild.runtime.batch import DecodeBatch
from neffbuild.runtime.dispatcher import Dispatcher
from neffbuild.runtime.step_metrics import StepMetrics

BATCH = 64
NUM_SEQS = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (4096, 8192, 16384, 32768)
MAX_MODEL_LEN = 131072
DRAFTS = 5
_STEPS = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=300)
    rounds = parser.parse_args().rounds
    for spec_tokens in (0, DRAFTS):
        _measure(spec_tokens, rounds)


def _measure(spec_tokens: int, rounds: int) -> None:
    generator = random.Random(0)
    contexts = [[generator.randrange(1, CONTEXTS[-1]) for _ in range(BATCH)] for _ in range(_STEPS)]
    rows = [_rows(of_rows, spec_tokens) for of_rows in contexts]
    ways: dict[str, Callable[[], object]] = {}
    vllm = _vllm_dispatch(spec_tokens)
    if vllm is not None:
        tokens = BATCH * (1 + spec_tokens)
        ways["vLLM's CudagraphDispatcher.dispatch"] = lambda: [vllm(tokens) for _ in range(_STEPS)]
    ways["a search through both lists"] = lambda: [
        _search(of_rows, spec_tokens) for of_rows in contexts
    ]
    select = _dispatcher(spec_tokens).select
    ways["Dispatcher.select"] = lambda: [select(Step(of_step)) for of_step in rows]
    ways["Dispatcher.select, columns made anew"] = lambda: [
        select(Step(_rows(of_rows, spec_tokens))) for of_rows in contexts
    ]
    ways["Dispatcher.select, a Row made for each row"] = lambda: [
        select(Step([Row(context, num_drafts=spec_tokens) for context in of_rows]))
        for of_rows in contexts
    ]
    for way, counting in (("a whole step", False), ("a whole step, counted", True)):
        run, batches = _step_around_nothing(spec_tokens, contexts, counting)
        ways[way] = _each(run, batches)
    seconds = _in_turns(ways, rounds)
    base = next(iter(seconds.values()))
    print(f"{BATCH} rows, {'EAGLE3 with 5 drafts' if spec_tokens else 'no speculation'}:")
    if vllm is None:
        print("  vLLM is not installed here: its dispatcher is not measured")
    for way, (middle, least) in seconds.items():
        print(
            f"  {way}: {middle * 1e6:.1f} µs, {middle / base[0]:.2f} of the first; at best "
            f"{least * 1e6:.1f} µs, {least / base[1]:.2f} of the first, {least * 1e5:.1f} % of a 1 ms step"
        )


def _rows(contexts: list[int], spec_tokens: int) -> Rows:
    return Rows(contexts, num_drafts=[spec_tokens] * len(contexts))


def _each(run: Callable[[DecodeBatch], object], batches: list[DecodeBatch]) -> Callable[[], object]:
    return lambda: [run(batch) for batch in batches]


def _step_around_nothing(
    spec_tokens: int, contexts: list[list[int]], counting: bool
) -> tuple[Callable[[DecodeBatch], object], list[DecodeBatch]]:
    config = _config(spec_tokens)
    bucketer = Bucketer.from_config(config, query_len_support=QueryLenSupport.VARLEN)
    observer = (
        StepMetrics.from_config(config, bucketer, registry=CollectorRegistry())
        if counting
        else None
    )
    dispatcher = Dispatcher(bucketer, _NoPrograms(), {}, observer=observer)  # type: ignore[arg-type]
    tokens = torch.zeros(BATCH, dtype=torch.int32)
    drafts = torch.zeros(BATCH, spec_tokens, dtype=torch.int32)
    columns = MAX_MODEL_LEN // bucketer.block_size
    table = torch.ones(BATCH, columns, dtype=torch.int32)

    batches = [
        DecodeBatch(_rows(of_rows, spec_tokens), tokens, table, drafts if spec_tokens else None)
        for of_rows in contexts
    ]
    return dispatcher.run, batches


class _NoPrograms:
    """Stands where a loader does, and hands out programs that do nothing."""

    free = ()
    outputs = ()

    def load(self, shape: DecodeShape) -> _NoPrograms:
        return self

    def bind(self, tensors: Mapping[str, object]) -> _NoPrograms:
        return self

    def __call__(self, tensors: Mapping[str, object]) -> tuple[()]:
        return ()


def _search(contexts: list[int], spec_tokens: int) -> tuple[int, int]:
    rows, need = len(contexts), max(contexts) + 1 + spec_tokens
    return (
        next(bucket for bucket in NUM_SEQS if bucket >= rows),
        next(bucket for bucket in (*CONTEXTS, MAX_MODEL_LEN) if bucket >= need),
    )


def _dispatcher(spec_tokens: int) -> Dispatcher:
    bucketer = Bucketer.from_config(_config(spec_tokens), query_len_support=QueryLenSupport.VARLEN)
    return Dispatcher(bucketer, _NoPrograms(), {})  # type: ignore[arg-type]


def _config(spec_tokens: int) -> BuildConfig:
    speculation = SpeculativeConfig(
        method="eagle3", model="draft", num_speculative_tokens=max(spec_tokens, 1)
    )
    return BuildConfig(
        source="bench",
        serve=ServeConfig(
            model="target",
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=BATCH,
            block_size=32,
            speculative_config=speculation if spec_tokens else None,
            additional_config=AdditionalConfig(
                neuron_config=NeuronConfig(
                    num_seqs_buckets=NUM_SEQS, decode_context_length_buckets=CONTEXTS
                )
            ),
        ),
        model=ModelConfig("target", {}),
        draft_model=ModelConfig("draft", {}) if spec_tokens else None,
    )


def _vllm_dispatch(spec_tokens: int) -> Callable[[int], object] | None:
    """As vLLM calls it in each step of uniform decode, with a graph for every batch bucket."""
    try:
        from vllm.config import CompilationConfig, CUDAGraphMode
        from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
    except ImportError:
        return None
    width = 1 + spec_tokens
    sizes = [num_seqs * width for num_seqs in NUM_SEQS]
    config = SimpleNamespace(
        compilation_config=CompilationConfig(
            cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY,
            cudagraph_capture_sizes=sizes,
            max_cudagraph_capture_size=sizes[-1],
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=BATCH),
        lora_config=None,
        num_speculative_tokens=spec_tokens,
    )
    dispatcher = CudagraphDispatcher(config)
    dispatcher.initialize_cudagraph_keys(CUDAGraphMode.FULL_DECODE_ONLY, width)
    mode, _ = dispatcher.dispatch(sizes[-1], uniform_decode=True)
    assert mode is CUDAGraphMode.FULL
    return lambda tokens: dispatcher.dispatch(tokens, uniform_decode=True)


def _in_turns(
    ways: Mapping[str, Callable[[], object]], rounds: int
) -> dict[str, tuple[float, float]]:
    """Seconds of a step each way, median and least; one way after the other in every round, so that all
    see the same noise."""
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, call in ways.items():
            began = time.thread_time()
            call()
            seconds[way].append((time.thread_time() - began) / _STEPS)
    return {way: (median(measured), min(measured)) for way, measured in seconds.items()}


if __name__ == "__main__":
    main()
