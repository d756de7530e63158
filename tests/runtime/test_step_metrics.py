"""What a dispatcher counts, under the names that vLLM Neuron's dashboards look for."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest
import runtime_samples as samples
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from neffbuild.config.errors import ConfigError, MissingUnit
from neffbuild.grid.shapes import DecodeShape, Family, PrefillShape
from neffbuild.grid.step import Step
from neffbuild.runtime.dispatcher import Dispatcher
from neffbuild.runtime.loader import Loader, config_manifest
from neffbuild.runtime.step_metrics import StepMetrics, execution_label
from neffbuild.toolchain.registry import load_toolchain

EXECUTIONS = "vllm_neuron:neff_execution_count_total"


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def values(registry: CollectorRegistry, name: str) -> dict[str, float]:
    """bucket_name → value of a metric, as a scrape shows it."""
    return {
        sample.labels["bucket_name"]: sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
        if sample.name == name
    }


def loader_without(served: samples.Served, *lost: DecodeShape) -> Loader:
    manifest = config_manifest(served.config, served.store)
    keys = {unit.key for unit in manifest.units if unit.shape in lost}
    entries = {key: entry for key, entry in manifest.entries.items() if key not in keys}
    return Loader(
        dataclasses.replace(manifest, entries=entries), served.store, load_toolchain("inductor")
    )


LABELS = {
    "decode": (DecodeShape(Family.TARGET, 4, 1, 16384), 3, "decode_b3"),
    "without context buckets": (DecodeShape(Family.TARGET, 4, 1, 16384, False), 3, "decode_b3"),
    "with drafts": (DecodeShape(Family.TARGET_WITH_SPEC, 4, 6, 16384), 4, "decode_b4_s6"),
    "without": (DecodeShape(Family.TARGET_WITHOUT_SPEC, 4, 1, 16384), 4, "decode_b4_s1"),
    "an idle rank": (DecodeShape(Family.TARGET, 4, 1, 16384), 0, "decode_b0"),
    "a draft": (DecodeShape(Family.DRAFT, 4, 6, 16384), 3, "draft_fused_s24"),
    "prefill": (PrefillShape(Family.PREFILL, 2048), 1, "prefill_s2048"),
    "segmented prefill": (PrefillShape(Family.PREFILL, 2048, 512), 1, "prefill_s2048_kv512"),
    "the draft's prefill": (PrefillShape(Family.DRAFT_PREFILL, 512), 1, "draft_fused_s512"),
}


@pytest.mark.parametrize(("program", "rows", "label"), LABELS.values(), ids=LABELS)
def test_labels_are_the_fields(program, rows, label) -> None:
    assert execution_label(program, rows) == label


def test_dflash_labels_are_its_own() -> None:
    draft = DecodeShape(Family.DRAFT, 4, 10, 16384)
    assert execution_label(draft, 3, "dflash") == "dflash_b4_q10"
    prefill = PrefillShape(Family.DRAFT_PREFILL, 512)
    assert execution_label(prefill, 1, "dflash") == prefill.bucket_name


def test_a_dispatcher_counts_what_it_runs(served: samples.Served, registry) -> None:
    metrics = StepMetrics.from_config(served.config, served.bucketer, registry=registry)
    assert values(registry, "vllm_neuron:num_seqs_padding_count") == {
        "decode_b1": 0,
        "decode_b4": 0,
    }
    assert "prefill_s512" in values(registry, "vllm_neuron:num_batched_tokens_padding_count")
    requests = samples.Requests(served.config, [5, 6, 7])
    dispatcher = Dispatcher(served.bucketer, served.loader(), requests.tensors, observer=metrics)
    dispatcher.warm_up()
    assert values(registry, EXECUTIONS) == {}
    for lengths in ([5, 6, 7], [300, 6, 7], [5]):
        requests.lengths, requests.tokens = lengths, [7] * len(lengths)
        dispatcher.run(requests.batch())
    dispatcher.run_idle(dispatcher.select(Step(requests.batch().rows)))
    assert values(registry, EXECUTIONS) == {"decode_b3": 2, "decode_b1": 1, "decode_b0": 1}
    assert values(registry, "vllm_neuron:num_seqs_padding_sum") == {"decode_b4": 2, "decode_b1": 1}
    assert values(registry, "vllm_neuron:num_seqs_padding_count") == {
        "decode_b4": 2,
        "decode_b1": 2,
    }
    assert values(registry, "neffbuild_fallback_steps_total") == {}


def test_stand_ins_and_misses_are_counted_by_what_was_wanted(
    served: samples.Served, registry, caplog
) -> None:
    """Each shape's first step is logged, every step is counted."""
    lost = samples.shape(1, 128), samples.shape(4, 128)
    loader = loader_without(served, *lost, samples.shape(4, 512))
    metrics = StepMetrics.from_config(served.config, served.bucketer, registry=registry)
    requests = samples.Requests(served.config, [5])
    dispatcher = Dispatcher(
        served.bucketer, loader, requests.tensors, fallback="larger", observer=metrics
    )
    dispatcher.warm_up()
    for lengths in ([5], [6], [5, 6], [7], [6, 7]):
        requests.lengths, requests.tokens = lengths, [7] * len(lengths)
        dispatcher.run(requests.batch())
    assert values(registry, "neffbuild_fallback_steps_total") == {
        "decode_b1_ctx128": 3,
        "decode_b4_ctx128": 2,
    }
    assert values(registry, EXECUTIONS) == {"decode_b1": 3, "decode_b2": 2}
    assert loader.counters.fallbacks == 5
    logged = [one.getMessage() for one in caplog.records if "its steps run in" in one.getMessage()]
    assert [one.rsplit(" ", 1)[1] for one in logged] == ["decode_b1_ctx256", "decode_b4_ctx256"]
    requests.lengths, requests.tokens = [400, 3], [7, 7]
    for _ in range(2):
        with pytest.raises(MissingUnit, match="decode_b4_ctx512"):
            dispatcher.run(requests.batch())
    assert values(registry, "neffbuild_missing_steps_total") == {"decode_b4_ctx512": 2}
    # An idle rank runs what its peers run.
    with pytest.raises(MissingUnit):
        dispatcher.run_idle(dispatcher.select(Step(requests.batch().rows)))


def test_prefill_and_drafts(registry) -> None:
    metrics = StepMetrics("target", draft_model_name="draft", method="eagle3", registry=registry)
    metrics.ran_prefill(PrefillShape(Family.PREFILL, 512, 512), 500)
    metrics.ran_prefill(PrefillShape(Family.DRAFT_PREFILL, 512, 512), 500)
    draft = DecodeShape(Family.DRAFT, 4, 6, 16384)
    metrics.ran(draft, draft, 3)
    models = {
        (sample.labels["model_name"], sample.labels["bucket_name"])
        for family in registry.collect()
        for sample in family.samples
        if sample.name == EXECUTIONS
    }
    assert models == {
        ("target", "prefill_s512_kv512"),
        ("draft", "draft_fused_s512"),
        ("draft", "draft_fused_s24"),
    }
    assert values(registry, "vllm_neuron:num_batched_tokens_padding_sum") == {"prefill_s512": 12}
    assert values(registry, "vllm_neuron:num_seqs_padding_sum") == {}


def test_two_of_one_process_count_together(registry) -> None:
    shape = samples.shape(4, 128)
    for _ in range(2):
        StepMetrics("model", registry=registry).ran(shape, shape, 3)
    assert values(registry, EXECUTIONS) == {"decode_b3": 2}


def test_names_that_somebody_else_has_are_refused(registry) -> None:
    Counter("vllm_neuron:neff_execution_count", "theirs", registry=registry)
    with pytest.raises(ConfigError, match="cannot be registered") as raised:
        StepMetrics("model", registry=registry)
    assert "registry of your own" in raised.value.hint


COUNT = """
import sys
from neffbuild.grid.shapes import DecodeShape, Family
from neffbuild.runtime.step_metrics import StepMetrics
shape = DecodeShape(Family.TARGET, 4, 1, 128)
metrics = StepMetrics("model")
for _ in range(int(sys.argv[1])):
    metrics.ran(shape, shape, 3)
"""
SCRAPE = """
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
registry = CollectorRegistry()
MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


def in_process(program: str, folder, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *words],
        env=os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_processes_add_up(tmp_path) -> None:
    for steps in ("2", "3"):
        ran = in_process(COUNT, tmp_path, steps)
        assert ran.returncode == 0, ran.stderr
    scraped = in_process(SCRAPE, tmp_path).stdout
    label = '{bucket_name="decode_b3",model_name="model"}'
    assert f"vllm_neuron:neff_execution_count_total{label} 5.0" in scraped
    assert (
        'vllm_neuron:num_seqs_padding_sum{bucket_name="decode_b4",model_name="model"} 5.0'
        in scraped
    )


def test_a_shared_directory_that_is_not_there_is_named(tmp_path) -> None:
    ran = in_process(COUNT, tmp_path / "none", "1")
    assert "PROMETHEUS_MULTIPROC_DIR is" in ran.stderr
    assert "no directory that can be written" in ran.stderr
