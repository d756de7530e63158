"""The labels of vLLM Neuron against those its sources give as examples."""

from __future__ import annotations

import pytest
from grid_samples import UNIFORM, VARLEN, bucketer
from hypothesis import given
from hypothesis import strategies as st

from neffbuild.grid.expand import WarmUp, expand
from neffbuild.grid.labels import engine_labels
from neffbuild.grid.shapes import DecodeShape, Family, PrefillShape, Shape, SymbolicShape


@pytest.mark.parametrize(
    ("shape", "method", "labels"),
    [
        (DecodeShape(Family.TARGET, 4, 1, 16384), None, ["decode_b4_ctx16384"]),
        (DecodeShape(Family.TARGET_WITH_SPEC, 4, 6, 16384), "eagle3", ["decode_b4_s6_ctx16384"]),
        (DecodeShape(Family.TARGET_WITHOUT_SPEC, 4, 1, 131072), "eagle3",
         ["decode_b4_s1_ctx131072"]),
        (DecodeShape(Family.TARGET, 4, 1, 131072, False), None,
         ["decode_b4_ctx131072", "decode_b4"]),
        (DecodeShape(Family.TARGET_WITH_SPEC, 4, 6, 131072, False), "dflash",
         ["decode_b4_s6_ctx131072", "decode_b4_s6"]),
        (DecodeShape(Family.DRAFT, 4, 6, 16384), "eagle3", ["draft_fused_s24"]),
        (DecodeShape(Family.DRAFT, 6, 7, 16384), "eagle3", ["draft_fused_s42"]),
        (DecodeShape(Family.DRAFT, 4, 10, 16384), "dflash", ["dflash_b4_q10"]),
        (PrefillShape(Family.PREFILL, 2048, 2048), None, ["prefill_s2048_kv2048"]),
        (PrefillShape(Family.PREFILL, 128), "eagle3", ["prefill_s128"]),
        (PrefillShape(Family.DRAFT_PREFILL, 2048, 2048), "eagle3", ["draft_fused_s2048"]),
        (PrefillShape(Family.DRAFT_PREFILL, 2048, 2048), "dflash", []),
        (SymbolicShape(Family.TARGET), None, []),
    ],
)  # fmt: skip
def test_labels(shape: Shape, method: str | None, labels: list[str]) -> None:
    assert list(engine_labels(shape, method)) == labels


@given(
    st.sets(st.integers(1, 64), min_size=1, max_size=4).map(lambda b: tuple(sorted(b))),
    st.integers(1, 7),
    st.sampled_from([UNIFORM, VARLEN]),
)
def test_only_drafts_share_a_label(num_seqs, spec_tokens, support) -> None:
    subject = bucketer(support, num_seqs=num_seqs, contexts=(4096, 8192), spec_tokens=spec_tokens)
    grid = expand(subject, WarmUp.FULL_PRODUCT)
    of_targets = [
        engine_labels(gridded.shape)[0]
        for gridded in grid.shapes
        if gridded.shape.family is not Family.DRAFT
    ]
    assert len(set(of_targets)) == len(of_targets)
    of_drafts = {
        engine_labels(gridded.shape)[0]
        for gridded in grid.shapes
        if gridded.shape.family is Family.DRAFT
    }
    assert len(of_drafts) == len(num_seqs)
