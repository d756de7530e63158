"""Prefill in the grid: roles, counts, labels, and which shapes a prompt can reach."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from grid_samples import bucketer, build_config
from hypothesis import given, settings
from hypothesis import strategies as st

from neffbuild.config.build import BuildConfig, ToolchainConfig
from neffbuild.config.errors import ConfigError
from neffbuild.config.findings import Findings
from neffbuild.config.neuron_engine import PrefillBuckets, neuron_prefill
from neffbuild.grid.bucketer import Bucketer, QueryLenSupport
from neffbuild.grid.coverage import check_coverage, prefill_gaps
from neffbuild.grid.expand import Grid, Need, WarmUp, expand
from neffbuild.grid.phases import Phase, leaves_prefill_to_others, served_phases
from neffbuild.grid.shapes import PrefillShape

BOTH = (Phase.DECODE, Phase.PREFILL)


def neuron_bucketer(**options: Any) -> Bucketer:
    """The bucketer of vLLM Neuron, its prefill buckets settled by its own rules."""
    config = build_config(**options)
    findings = Findings("test")
    prefill = neuron_prefill(config, findings)
    assert not findings.problems
    return Bucketer.from_config(
        config, query_len_support=QueryLenSupport.UNIFORM, prefill=prefill, phases=BOTH
    )


def names(grid: Grid) -> list[str]:
    return [gridded.shape.bucket_name for gridded in grid.shapes]


@pytest.mark.parametrize(
    ("options", "labels"),
    [
        ({"max_num_batched_tokens": 2048}, ["prefill_s2048_kv2048"]),
        ({"max_num_batched_tokens": 8192}, ["prefill_s8192_kv8192"]),
        ({"max_num_batched_tokens": 2048, "spec_tokens": 5},
         ["prefill_s2048_kv2048", "draft_prefill_s2048_kv2048"]),
        ({"max_model_len": 1000, "max_num_batched_tokens": 2048, "enable_prefix_caching": False},
         ["prefill_s128", "prefill_s256", "prefill_s512", "prefill_s1000"]),
        ({"max_model_len": 256, "max_num_batched_tokens": 256, "enable_prefix_caching": False,
          "spec_tokens": 2},
         ["prefill_s128", "prefill_s256", "draft_prefill_s128", "draft_prefill_s256"]),
    ],
)  # fmt: skip
def test_labels(options: dict[str, Any], labels: list[str]) -> None:
    subject = neuron_bucketer(contexts=None, **options)
    assert names(expand(subject, WarmUp.FULL_PRODUCT, (Phase.PREFILL,))) == labels


LADDERS = st.sets(st.integers(1, 3000), min_size=1, max_size=6).map(lambda s: tuple(sorted(s)))
SEGMENTS = st.sets(st.sampled_from([0, 512, 1024, 2048]), min_size=1).map(
    lambda s: tuple(sorted(s))
)


@given(LADDERS, SEGMENTS, st.integers(0, 3), st.sampled_from(WarmUp))
def test_counts(
    tokens: tuple[int, ...], segments: tuple[int, ...], spec_tokens: int, warm_up: WarmUp
) -> None:
    """Buckets × segment sizes, twice that with a draft; never by context."""
    config = build_config(spec_tokens=spec_tokens)
    subject = Bucketer.from_config(
        config,
        query_len_support=QueryLenSupport.VARLEN,
        prefill=PrefillBuckets(tokens, segments),
        phases=(Phase.PREFILL,),
    )
    grid = expand(subject, warm_up)
    assert len(grid.shapes) == len(tokens) * len(segments) * (2 if spec_tokens else 1)
    assert len(set(names(grid))) == len(grid.shapes)
    assert all(isinstance(gridded.shape, PrefillShape) for gridded in grid.shapes)


@settings(max_examples=60)
@given(
    st.integers(2, 60),
    st.sets(st.integers(1, 60), max_size=4),
    st.integers(1, 80),
    st.integers(0, 2),
)
def test_a_shape_is_required_when_some_prompt_reaches_it(
    max_model_len: int, shorter: set[int], step: int, spec_tokens: int
) -> None:
    """Every prompt, cut into steps in every way, against what the grid says."""
    most = min(step, max_model_len)
    tokens = (*sorted(size for size in shorter if size < most), most)
    subject = Bucketer.from_config(
        build_config(max_model_len=max_model_len, contexts=None, spec_tokens=spec_tokens),
        query_len_support=QueryLenSupport.VARLEN,
        prefill=PrefillBuckets(tokens, (0,)),
        phases=(Phase.PREFILL,),
    )
    reached = set()
    for prompt in range(1, max_model_len):
        for chunk in range(1, min(prompt, most) + 1):
            reached.add(min(size for size in tokens if size >= chunk))
    grid = expand(subject, WarmUp.REACHABLE)
    for gridded in grid.shapes:
        assert isinstance(gridded.shape, PrefillShape)
        assert (gridded.need is Need.REQUIRED) == (gridded.shape.num_batched_tokens in reached)
        assert (gridded.reason is None) == (gridded.need is Need.REQUIRED)


def config_of(phases: str | None = None, role: str | None = None) -> BuildConfig:
    transfer = {"kv_transfer_config": {"kv_role": role}} if role else {}
    toolchain = ToolchainConfig(name="any", phases=phases)
    return replace(build_config(**transfer), toolchain=toolchain)


@pytest.mark.parametrize(
    ("phases", "role", "served"),
    [
        (None, None, BOTH),
        (None, "kv_both", BOTH),
        (None, "kv_producer", (Phase.PREFILL,)),
        (None, "kv_consumer", (Phase.DECODE,)),
        ("both", "kv_consumer", BOTH),
        ("decode", None, (Phase.DECODE,)),
        ("prefill", "kv_both", (Phase.PREFILL,)),
    ],
)
def test_phases_by_role(phases: str | None, role: str | None, served: tuple[Phase, ...]) -> None:
    config = config_of(phases, role)
    assert served_phases(config, prefill_programs=True) == served
    assert leaves_prefill_to_others(config) is (served == (Phase.DECODE,))


@pytest.mark.parametrize("role", [None, "kv_producer", "kv_consumer", "kv_both"])
def test_an_engine_without_prefill_programs_decodes(role: str | None) -> None:
    assert served_phases(config_of(None, role), prefill_programs=False) == (Phase.DECODE,)
    assert served_phases(config_of("decode", role), prefill_programs=False) == (Phase.DECODE,)
    with pytest.raises(ConfigError, match="builds decode programs only; allowed: decode") as error:
        served_phases(config_of("both", role), prefill_programs=False)
    assert (error.value.field, error.value.value) == ("toolchain.phases", "both")


def test_a_grid_is_of_the_phases_served() -> None:
    subject = neuron_bucketer(num_seqs=(1,), contexts=None, max_num_batched_tokens=2048)
    decode, prefill = ["decode_b1"], ["prefill_s2048_kv2048"]
    for phases, expected in ((BOTH, decode + prefill), (BOTH[:1], decode), (BOTH[1:], prefill)):
        assert names(expand(replace(subject, phases=phases), WarmUp.FULL_PRODUCT)) == expected


def test_a_worker_that_only_prefills_has_no_decode_states() -> None:
    subject = replace(neuron_bucketer(max_num_batched_tokens=2048), phases=(Phase.PREFILL,))
    coverage = check_coverage(
        subject, expand(subject, WarmUp.FULL_PRODUCT).with_need(Need.REQUIRED)
    )
    assert (coverage.states_checked, coverage.uncovered, coverage.prefill_gaps) == (0, (), ())
    assert check_coverage(subject, ()).prefill_gaps != ()


@pytest.mark.parametrize(
    ("options", "blocks"),
    [
        # 4 rows of 131072 / 128 blocks, and the null block.
        ({}, 4097),
        ({"max_num_seqs": 3, "num_seqs": (3,), "max_model_len": 4000, "contexts": None}, 97),
        ({"decode_context_parallel_size": 4}, 1025),
    ],
)
def test_a_decode_only_role_says_what_it_lacks_and_what_rules_it_out(
    options: dict[str, Any], blocks: int
) -> None:
    (gap,) = prefill_gaps(bucketer(**options), ())
    assert "a request whose KV load failed or that was preempted" in gap.reason
    assert f"(which {blocks} KV blocks or more rule out)" in gap.reason
