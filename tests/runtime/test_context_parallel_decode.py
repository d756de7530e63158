"""Decoding with decode context parallelism equals decoding without, over real processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from dcp_rank import INTERLEAVES, MAX_MODEL_LEN, PROMPTS, alone, bucketer, decoded
from runtime_samples import MODEL

from neffbuild.config.errors import ConfigError
from neffbuild.grid.shapes import Family
from neffbuild.models.architecture import LlamaArchitecture
from neffbuild.models.context_parallel import ContextParallelDecoder

RANKS = 2
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What every rank made of the prompts."""
    folder = tmp_path_factory.mktemp("dcp")
    results = [folder / f"rank{rank}.pt" for rank in range(RANKS)]
    words = [str(RANKS), str(folder / "rendezvous")]
    processes = [
        subprocess.Popen(
            [sys.executable, str(HERE / "dcp_rank.py"), str(rank), *words, str(result)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, result in enumerate(results)
    ]
    try:
        for process in processes:
            _, said = process.communicate(timeout=240)
            assert process.returncode == 0, said
    finally:
        for process in processes:
            process.kill()
    return [torch.load(result, weights_only=True) for result in results]


@pytest.mark.parametrize("interleave", INTERLEAVES)
@pytest.mark.parametrize("lengths", PROMPTS, ids=str)
def test_two_ranks_decode_as_one_across_a_bucket_boundary(ranks, lengths, interleave):
    with torch.inference_mode():
        tokens, logits = decoded(lengths, alone(len(lengths)))
    needs = [max(lengths) + step for step in (0, len(tokens) - 1)]
    contexts = {
        bucketer(RANKS).decode_shape(Family.TARGET, num_seqs=1, context_need=need).context_len
        for need in needs
    }
    assert len(contexts) == 2, "no boundary is crossed"
    for rank in ranks:
        found_tokens, found_logits = rank[(lengths, interleave)]
        assert found_tokens == tokens
        torch.testing.assert_close(found_logits, logits, rtol=1e-3, atol=1e-3)
    # Every rank has the whole of every attention, so it says the same to the last bit.
    assert torch.equal(*(rank[(lengths, interleave)][1] for rank in ranks))
    assert len({token for row in tokens for token in row}) > 5


def test_a_ranks_table_is_as_wide_as_its_share():
    halved = bucketer(RANKS)
    shape = halved.decode_shape(Family.TARGET, num_seqs=1, context_need=MAX_MODEL_LEN)
    assert halved.block_table_width(shape) * RANKS == bucketer(1).block_table_width(shape)


def test_sliding_windows_under_context_parallelism_are_refused():
    architecture = LlamaArchitecture.from_config(MODEL | {"sliding_window": 64})
    with pytest.raises(ConfigError, match="no sliding windows under decode context parallelism"):
        ContextParallelDecoder(architecture, torch.float32)
