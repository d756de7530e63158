"""A model with sliding-window and full layers, served from compiled programs: against `transformers`, with
the engine's own block table for each kind of layer."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
import runtime_samples as samples
import torch
import yaml
from torch import Tensor
from transformers import MinistralConfig, MinistralForCausalLM

from neffbuild.config.build import BuildConfig
from neffbuild.grid.kv_blocks import kv_bytes_per_position
from neffbuild.grid.select import select_shapes, step_state
from neffbuild.grid.shapes import DecodeShape, Family
from neffbuild.grid.step import Row, Step
from neffbuild.models.decode import (
    WindowedInputs,
    allocate_kv_caches,
    build_decoder,
    build_program,
    named_inputs,
    named_kv_caches,
    named_tensors,
)
from neffbuild.runtime.batch import DecodeBatch
from neffbuild.runtime.block_table import NULL_BLOCK
from neffbuild.runtime.dispatcher import Dispatcher
from neffbuild.runtime.replay import execute_replay
from neffbuild.runtime.step_buffers import target_buffers
from neffbuild.toolchain.inductor.capture import one_shape_callable

MAX_MODEL_LEN, WINDOW, BLOCK_SIZE = 384, 40, 16
COLUMNS = MAX_MODEL_LEN // BLOCK_SIZE
NEW_TOKENS = 200
MODEL = samples.MODEL | {
    "architectures": ["MinistralForCausalLM"],
    "model_type": "ministral",
    "head_dim": 16,
    "max_position_embeddings": MAX_MODEL_LEN,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
}


def write_config(folder) -> None:
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text(json.dumps(MODEL))
    lists = {"num_seqs_buckets": [1, 2], "decode_context_length_buckets": [128, 256]}
    serve = samples.SERVE | {
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 2,
        "additional_config": {"neuron_config": lists},
    }
    document = {"serve": serve, "cache": {"local": str(folder / "cache")}}
    (folder / "serve.yaml").write_text(yaml.safe_dump(document))


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> samples.Served:
    """Nothing of it is compiled yet."""
    folder = tmp_path_factory.mktemp("windowed")
    write_config(folder)
    return samples.served(folder / "serve.yaml")


@pytest.fixture(scope="module")
def windowed(planned: samples.Served) -> samples.Served:
    """With all its units compiled by the farm, which takes most of a minute."""
    done = samples.neffbuild("compile", str(planned.path))
    assert done.returncode == 0, done.stderr
    return planned


@pytest.fixture(scope="module")
def theirs() -> MinistralForCausalLM:
    torch.manual_seed(0)
    return MinistralForCausalLM(MinistralConfig(**MODEL)).eval()


class Rows:
    """Requests as an engine keeps them that frees what slid out of the window: each kind of layer has
    blocks of its own, and freed ones are the null block in the table, somebody else's in the pool."""

    def __init__(self, config: BuildConfig, model: MinistralForCausalLM, rows: int) -> None:
        self.model = build_decoder(config, Family.TARGET)
        self.model.load_state_dict(model.state_dict())
        generator = torch.Generator().manual_seed(0)
        blocks = torch.randperm(2 * rows * COLUMNS, generator=generator) + 1
        self.full, self.window = blocks.view(2, rows, COLUMNS).to(torch.int32)
        self.kv_caches = allocate_kv_caches(
            self.model.architecture, torch.float32, blocks.numel() + 1, BLOCK_SIZE
        )
        self.lengths, self.tokens = [0] * rows, [0] * rows

    @property
    def tensors(self) -> dict[str, Tensor]:
        return named_tensors(self.model) | named_kv_caches(self.kv_caches)

    def prefill(self, row: int, prompt: Sequence[int]) -> None:
        """Compute all of a prompt but its last token, which is then the row's next one."""
        count = len(prompt) - 1
        positions = torch.arange(count)
        tables = [self.full[row : row + 1], self.window[row : row + 1]]
        slots = [
            (t[0, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE)[None]
            for t in tables
        ]
        with torch.inference_mode():
            self.model(
                torch.tensor([prompt[:-1]], dtype=torch.int32),
                positions[None],
                torch.tensor([count], dtype=torch.int32),
                slots,
                tables,
                [torch.zeros(1, dtype=torch.int32)] * 2,
                self.kv_caches,
            )
        self.lengths[row], self.tokens[row] = count, prompt[-1]

    def batch(self) -> DecodeBatch:
        self._free_what_slid_out()
        return DecodeBatch(
            [Row(length) for length in self.lengths],
            torch.tensor(self.tokens),
            self.full,
            window_block_table=self.window,
        )

    def advance(self, next_ids: Tensor) -> list[int]:
        self.tokens = next_ids[:, 0].tolist()
        self.lengths = [length + 1 for length in self.lengths]
        return self.tokens

    def _free_what_slid_out(self) -> None:
        for row, length in enumerate(self.lengths):
            for column in range(max(length - WINDOW + 1, 0) // BLOCK_SIZE):
                if block := int(self.window[row, column]):
                    for tensor in self.kv_caches[0]:
                        tensor[block] = 1e4
                self.window[row, column] = NULL_BLOCK


def generated(model: MinistralForCausalLM, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        tokens = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    return tokens[0, len(prompt) :].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(100,), (100, 2)], ids=["one row", "two rows"])
def test_greedy_tokens_equal_transformers_across_window_and_two_boundaries(
    windowed, theirs, lengths
):
    torch.manual_seed(1)
    prompts = [torch.randint(256, (length,)).tolist() for length in lengths]
    expected = [generated(theirs, prompt) for prompt in prompts]
    rows = Rows(windowed.config, theirs, len(prompts))
    for row, prompt in enumerate(prompts):
        rows.prefill(row, prompt)
    loader = windowed.loader()
    dispatcher = Dispatcher(windowed.bucketer, loader, rows.tensors)
    dispatcher.warm_up()
    loaded = loader.counters.hits
    tokens: list[list[int]] = [[] for _ in prompts]
    programs: list[str] = []
    for _ in range(NEW_TOKENS):
        result = dispatcher.run(rows.batch())
        programs.append(result.shapes.target.bucket_name)
        for row, token in enumerate(rows.advance(result.outputs["next_token_ids"])):
            tokens[row].append(token)
    assert tokens == expected
    batch = len(prompts)
    assert list(dict.fromkeys(programs)) == [f"decode_b{batch}_ctx{n}" for n in (128, 256, 384)]
    counters = loader.counters
    assert (counters.hits, counters.misses, counters.compiles) == (loaded, 0, 0)
    assert min(len(set(row)) for row in tokens) > 30, "a loop of a few tokens would prove little"


def test_at_batch_one_torch_compile_meets_one_graph_for_each_shape(planned, theirs):
    """Nothing of a cut table, its strides or its offset, is new to whoever compiled for the shape."""
    [prompt] = torch.randint(256, (1, 100)).tolist()
    rows = Rows(planned.config, theirs, 1)
    rows.prefill(0, prompt)
    compiles = []

    def backend(module, _inputs):
        compiles.append(module)
        return module.forward

    bucketer, steps, shapes = planned.bucketer, {}, []
    for _ in range(170):
        batch = rows.batch()
        target = select_shapes(bucketer, step_state(bucketer, Step(batch.rows))).target
        if target not in steps:
            compiled = torch.compile(one_shape_callable(rows.model), backend=backend, dynamic=False)
            steps[target] = compiled, target_buffers(bucketer, target, {})
        step, buffers = steps[target]
        buffers.input_ids[:, 0] = rows.tokens
        lengths = torch.tensor(rows.lengths)
        buffers.place(
            lengths.numpy(), None, batch.block_table.numpy(), batch.window_block_table.numpy(),
        )  # fmt: skip
        # Copies, as from an engine that allocates anew in each step; strides are kept.
        inputs = WindowedInputs(
            *(
                tuple(one.clone() for one in value) if isinstance(value, tuple) else value.clone()
                for value in buffers.inputs
            )
        )
        with torch.inference_mode():
            next_ids, _ = step(*inputs, rows.kv_caches)
        rows.advance(next_ids)
        shapes.append(target)
    assert [shape.context_len for shape in dict.fromkeys(shapes)] == [128, 256, 384]
    assert len(compiles) == 3


@pytest.mark.slow
def test_buffers_and_captured_programs_have_the_same_inputs(windowed):
    """By name, shape and dtype, whatever the widths; and each group says where its tables begin."""
    for context in (128, 384):
        shape = DecodeShape(Family.TARGET, 2, 1, context)
        _, captured = build_program(windowed.config, shape)
        bound = target_buffers(windowed.bucketer, shape, {}).inputs
        assert {n: (t.shape, t.dtype) for n, t in named_inputs(captured).items()} == {
            n: (t.shape, t.dtype) for n, t in named_inputs(bound).items()
        }
        assert [table.shape[1] for table in bound.block_tables] == [context // 16, 4]
        names = windowed.loader().load(shape).inputs
        assert {"block_tables.0", "block_tables.1"} <= set(names)
        assert {"position_offsets.0", "position_offsets.1"} <= set(names)


@pytest.mark.slow
def test_pad_rows_and_an_idle_rank_write_to_the_null_block_alone(windowed, theirs):
    rows = Rows(windowed.config, theirs, 2)
    for row in range(2):
        rows.prefill(row, list(range(100)))
    dispatcher = Dispatcher(windowed.bucketer, windowed.loader(), rows.tensors)
    batch = rows.batch()
    dispatcher.run(batch)
    before = {name: kept.clone() for name, kept in named_kv_caches(rows.kv_caches).items()}
    dispatcher.run_idle(dispatcher.select(Step(batch.rows)))
    for name, kept in named_kv_caches(rows.kv_caches).items():
        assert torch.equal(kept, before[name]), name
        assert not kept[NULL_BLOCK].any()


@pytest.mark.slow
def test_plan_and_replay_count_the_windowed_layer_by_its_own_table(windowed):
    plan = json.loads(samples.neffbuild("plan", str(windowed.path), "--json").stdout)
    widths = {
        unit["context_len"]: (unit["block_table_width"], unit["window_table_width"])
        for unit in plan["units"]
    }
    assert widths == {128: (8, 4), 256: (16, 4), 384: (24, 4)}
    document = execute_replay(windowed.config, windowed.store, 8)
    assert (document["misses"], document["compiles"]) == (0, 0)
    entry = kv_bytes_per_position(windowed.config.serve, windowed.config.model)
    assert entry == 2 * 2 * 16 * 4
    steps = {unit["bucket_name"]: unit["steps"] for unit in document["units"]}
    expected = 0
    for name, count in steps.items():
        batch, context = (int(word.strip("bctx")) for word in name.split("_")[1:])
        expected += count * batch * (context + 4 * BLOCK_SIZE) * entry
    assert document["kv_bytes_read"] == expected
    simulated = json.loads(
        samples.neffbuild("replay", str(windowed.path), "--steps", "8", "--json").stdout
    )
    assert simulated["kv_bytes_read"] == expected


def test_a_model_whose_windows_are_not_stated_is_refused_before_anything_is_compiled(tmp_path):
    write_config(tmp_path)
    stated = {name: value for name, value in MODEL.items() if name != "sliding_window"}
    (tmp_path / "model/config.json").write_text(json.dumps(stated))
    refused = samples.neffbuild("compile", str(tmp_path / "serve.yaml"))
    assert refused.returncode == 2
    assert "sliding_window of the model's config.json is missing" in refused.stderr
    assert not (tmp_path / "cache/v1/entries").exists()
