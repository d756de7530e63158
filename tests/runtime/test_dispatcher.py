"""The dispatcher and the loader over really compiled programs."""

from __future__ import annotations

import dataclasses

import pytest
import runtime_samples as samples
import torch
from hypothesis import given
from hypothesis import strategies as st

from neffbuild.config.errors import (
    AboveLadder,
    ConfigError,
    IntegrityError,
    MissingUnit,
    ToolchainRefusal,
)
from neffbuild.grid.select import IDLE, StepState
from neffbuild.grid.step import Row, Step
from neffbuild.models.decode import named_kv_caches
from neffbuild.runtime.dispatcher import Dispatcher
from neffbuild.runtime.loader import Loader, config_manifest
from neffbuild.runtime.step_sync import StepSync
from neffbuild.toolchain.registry import load_toolchain

# num_computed_tokens of the longest row → the context it must run in. A step needs one position more.
EDGES = {
    "the first decode step": (1, 128),
    "one position below a bucket": (126, 128),
    "exactly a bucket": (127, 128),
    "one above": (128, 256),
    "exactly the last bucket": (255, 256),
    "one above the last bucket": (256, 512),
    "the last step before max_model_len": (510, 512),
    "exactly max_model_len": (511, 512),
}


@pytest.fixture(scope="module")
def programs(served):
    """Every program of the config, loaded once."""
    loader = served.loader()
    loader.load_all()
    return loader


@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize(("longest", "context"), EDGES.values(), ids=EDGES)
def test_a_step_at_the_edge_of_a_bucket_computes_what_the_eager_decoder_does(
    served, programs, rows, longest, context
):
    requests = samples.Requests(served.config, [longest, *range(1, rows)])
    expected = requests.reference_logits()
    dispatcher = Dispatcher(served.bucketer, programs, requests.tensors)
    result = dispatcher.run(requests.batch())
    assert result.shapes.target == samples.shape(1 if rows == 1 else 4, context)
    assert result.outputs["logits"].shape == (rows, 1, 256)
    torch.testing.assert_close(result.outputs["logits"], expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(result.outputs["next_token_ids"], expected.argmax(-1).int())


@pytest.mark.parametrize("lengths", [[512], [1, 600], [1] * 5])
def test_a_step_no_program_holds_is_refused(served, programs, lengths):
    dispatcher = Dispatcher(served.bucketer, programs, {})
    with pytest.raises(AboveLadder):
        dispatcher.select(Step([Row(length) for length in lengths]))


@given(st.lists(st.integers(1, 511), min_size=1, max_size=4))
def test_every_step_lands_on_a_unit_of_the_plan(served, programs, lengths):
    dispatcher = Dispatcher(served.bucketer, programs, {})
    target = dispatcher.select(Step([Row(length) for length in lengths])).target
    assert target in {unit.shape for unit in programs.manifest.units}
    assert target.num_seqs >= len(lengths)
    assert target.context_len >= max(lengths) + 1


def test_pad_rows_write_to_the_null_block_alone(served, programs):
    requests = samples.Requests(served.config, [100, 101, 102, 103])
    dispatcher = Dispatcher(served.bucketer, programs, requests.tensors)
    dispatcher.run(requests.batch())
    # One row leaves: its place in the program's buffers held a real slot just now.
    requests.lengths, requests.tokens = [101, 102, 103], requests.tokens[:3]
    before = {name: t.clone() for name, t in named_kv_caches(requests.kv_caches).items()}
    dispatcher.run(requests.batch())
    written = {
        int(requests.slots(row, torch.tensor(length)))
        for row, length in enumerate(requests.lengths)
    }
    for name, tensor in named_kv_caches(requests.kv_caches).items():
        changed = (tensor != before[name]).flatten(2).any(-1).flatten().nonzero()[:, 0].tolist()
        assert {slot for slot in changed if slot >= samples.BLOCK_SIZE} == written


def test_all_programs_share_one_set_of_weights(served, programs):
    requests = samples.Requests(served.config, [5])
    dispatcher = Dispatcher(served.bucketer, programs, requests.tensors)
    before = dispatcher.run(requests.batch()).outputs["logits"].clone()
    requests.model.lm_head.weight.mul_(2)
    for length in (5, 200):
        requests.lengths = [length]
        expected = requests.reference_logits()
        torch.testing.assert_close(dispatcher.run(requests.batch()).outputs["logits"], expected)
    assert not torch.allclose(expected, before)


def test_a_prefill_row_is_refused(served, programs):
    requests = samples.Requests(served.config, [0])
    dispatcher = Dispatcher(served.bucketer, programs, requests.tensors)
    with pytest.raises(ConfigError, match="prefill row"):
        dispatcher.run(requests.batch())


def test_missing_weights_are_named(served, programs):
    requests = samples.Requests(served.config, [5])
    tensors = {n: t for n, t in requests.tensors.items() if n != "model.norm.weight"}
    with pytest.raises(ConfigError, match=r"needs model\.norm\.weight"):
        Dispatcher(served.bucketer, programs, tensors).run(requests.batch())


def test_a_block_table_narrower_than_the_program_is_refused(served, programs):
    requests = samples.Requests(served.config, [5])
    batch = requests.batch()
    dispatcher = Dispatcher(served.bucketer, programs, requests.tensors)
    with pytest.raises(ConfigError, match="cannot be trimmed"):
        dispatcher.run(batch._replace(block_table=batch.block_table[:, :7]))


def without(manifest, *shapes):
    """The manifest as it is when these shapes have not been compiled."""
    keys = {unit.key for unit in manifest.units if unit.shape in shapes}
    entries = {key: entry for key, entry in manifest.entries.items() if key not in keys}
    return dataclasses.replace(manifest, entries=entries)


def loader_of(served, manifest, **options):
    return Loader(
        manifest, served.store, load_toolchain("inductor"), config=str(served.path), **options
    )


def test_a_step_whose_program_is_missing_names_unit_key_and_command(served):
    manifest = config_manifest(served.config, served.store)
    lost = samples.shape(1, 256)
    [key] = [unit.key for unit in manifest.units if unit.shape == lost]
    loader = loader_of(served, without(manifest, lost))
    requests = samples.Requests(served.config, [5])
    dispatcher = Dispatcher(served.bucketer, loader, requests.tensors)
    dispatcher.run(requests.batch())
    requests.lengths = [200]
    with pytest.raises(MissingUnit) as raised:
        dispatcher.run(requests.batch())
    command = f"neffbuild compile {served.path} --only decode_b1_ctx256"
    for said in ("decode_b1_ctx256", key, served.store.url, command):
        assert said in raised.value.message
    assert (loader.counters.hits, loader.counters.misses) == (1, 1)
    assert loader.counters.compiles == 0


def test_warm_up_names_everything_that_is_missing_before_it_loads_anything(served):
    lost = samples.shape(1, 256), samples.shape(4, 512)
    loader = loader_of(served, without(config_manifest(served.config, served.store), *lost))
    with pytest.raises(MissingUnit, match=r"decode_b1_ctx256.*also missing: decode_b4_ctx512"):
        loader.load_all()
    assert loader.counters.hits == 0


def test_a_shape_that_is_no_unit_of_the_manifest_is_missing(programs):
    with pytest.raises(MissingUnit, match=r"decode_b2_ctx128 \(no manifest has a key"):
        programs.load(samples.shape(2, 128))


def test_each_program_is_loaded_once(served):
    loader = served.loader()
    assert loader.load(samples.shape(1, 128)) is loader.load(samples.shape(1, 128))
    assert loader.counters.hits == 1


def test_a_config_that_was_never_compiled_says_what_to_do(served, tmp_path):
    other = samples.served(samples.write_config(tmp_path / "other", block_size=32))
    with pytest.raises(MissingUnit, match="no manifest") as raised:
        Loader.from_config(other.config, served.store)
    assert "neffbuild compile" in raised.value.hint


def test_another_model_is_refused(served):
    architecture = dict(served.config.model.architecture) | {"rope_theta": 1.0}
    loader = loader_of(
        served, config_manifest(served.config, served.store), architecture=architecture
    )
    with pytest.raises(ToolchainRefusal, match=r"another model.*rope_theta"):
        loader.load(samples.shape(1, 128))


def test_a_damaged_program_is_never_opened(own_served):
    loader = own_served.loader()
    target = samples.shape(1, 128)
    [key] = [unit.key for unit in loader.manifest.units if unit.shape == target]
    record = loader.manifest.entries[key].files["program.wrapper.so"]
    blob = own_served.store.blob_path(record.digest)
    content = bytearray(blob.read_bytes())
    content[len(content) // 2] ^= 1
    blob.chmod(0o644)
    blob.write_bytes(content)
    with pytest.raises(IntegrityError):
        loader.load(target)
    assert loader.load(samples.shape(4, 128))


def test_a_prepared_step_runs_in_the_shapes_of_its_peers(served, programs):
    """Another rank's rows are longer and more: this one's step runs in their program, and is the same."""
    requests = samples.Requests(served.config, [100])
    expected = requests.reference_logits()
    sync = Synced(StepState(3, 300))
    dispatcher = Dispatcher(served.bucketer, programs, requests.tensors, sync=sync)
    batch = requests.batch()
    with pytest.raises(ConfigError, match="this one was not prepared"):
        dispatcher.run(batch)
    prepared = dispatcher.prepare(0, Step(batch.rows))
    result = dispatcher.run(batch, prepared)
    assert result.shapes.target == samples.shape(4, 512)
    torch.testing.assert_close(result.outputs["logits"], expected, rtol=1e-4, atol=1e-4)


def test_an_idle_rank_runs_its_peers_program_and_writes_to_the_null_block_alone(served, programs):
    requests = samples.Requests(served.config, [100, 101, 102, 103])
    sync = Synced(IDLE)
    dispatcher = Dispatcher(served.bucketer, programs, requests.tensors, sync=sync)
    dispatcher.run(requests.batch(), dispatcher.prepare(0, Step(requests.batch().rows)))
    before = {name: kept.clone() for name, kept in named_kv_caches(requests.kv_caches).items()}
    idle = dispatcher.prepare(1)
    assert idle.target == samples.shape(1, 128)
    dispatcher.run_idle(idle)
    dispatcher.run_idle(dispatcher.prepare(2, Step([Row(100), Row(101)])))
    for name, kept in named_kv_caches(requests.kv_caches).items():
        assert torch.equal(kept[1:], before[name][1:]), name


class Synced(StepSync):
    """A rank whose one peer has the same in every step."""

    def __init__(self, peer: StepState) -> None:
        super().__init__(None)
        self._peer = peer

    @property
    def active(self) -> bool:
        return True

    def prepare(self, number: int, state: StepState = IDLE) -> StepState:
        return super().prepare(number, StepState(*map(max, self._peer, state)))


def test_a_larger_program_stands_in_where_that_is_allowed(served, caplog):
    lost = samples.shape(1, 128), samples.shape(4, 128)
    loader = loader_of(served, without(config_manifest(served.config, served.store), *lost))
    requests = samples.Requests(served.config, [5])
    expected = requests.reference_logits()
    dispatcher = Dispatcher(served.bucketer, loader, requests.tensors, fallback="larger")
    dispatcher.warm_up()
    for _ in range(2):
        result = dispatcher.run(requests.batch())
        torch.testing.assert_close(result.outputs["logits"], expected, rtol=1e-4, atol=1e-4)
    assert loader.counters.fallbacks == 2
    assert [r.getMessage() for r in caplog.records if "its steps run in" in r.getMessage()] == [
        caplog.messages[-1]
    ]
    assert caplog.messages[-1].endswith("its steps run in decode_b1_ctx256")
    with pytest.raises(MissingUnit):
        Dispatcher(served.bucketer, loader, requests.tensors).run(requests.batch())


def test_nothing_stands_in_for_the_largest(served):
    lost = samples.shape(4, 512)
    loader = loader_of(served, without(config_manifest(served.config, served.store), lost))
    requests = samples.Requests(served.config, [400, 3])
    dispatcher = Dispatcher(served.bucketer, loader, requests.tensors, fallback="larger")
    dispatcher.warm_up()
    with pytest.raises(MissingUnit, match="decode_b4_ctx512"):
        dispatcher.run(requests.batch())
