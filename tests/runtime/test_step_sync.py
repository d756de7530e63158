"""Every data-parallel rank runs a step in the same programs, for one reduce."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from step_sync_samples import bucketer_of, config_of
from sync_rank import run

from neffbuild.config.errors import ConfigError
from neffbuild.grid.ranks import COMPONENT_DP_SIZES, steps_are_synced
from neffbuild.grid.select import IDLE, StepState
from neffbuild.runtime.step_sync import RankLost, StepSync

STEPS = 2_000
HERE = Path(__file__).parent


def start(
    ranks: int,
    rendezvous: Path,
    verify: list[int] | None,
    dies_at: int | None = None,
    leaves_out: int | None = None,
) -> list[subprocess.Popen[str]]:
    """A process per rank; the last kills itself at step `dies_at`, and does not prepare `leaves_out`."""
    words = [str(ranks), str(STEPS), str(rendezvous)]
    words += map(json.dumps, (verify, dies_at, leaves_out))
    return [
        subprocess.Popen(
            [sys.executable, str(HERE / "sync_rank.py"), str(rank), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"},
        )
        for rank in range(ranks)
    ]


def documents(processes: list[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    found = []
    for process in processes:
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
        found.append(json.loads(out))
    return found


@pytest.mark.parametrize(("ranks", "verify"), [(2, None), (4, None), (2, [2, 4])])
def test_every_rank_picks_the_same_shapes_in_every_step(
    tmp_path: Path, ranks: int, verify: list[int] | None
) -> None:
    ran = documents(start(ranks, tmp_path / "rendezvous", verify))
    first = ran[0]["shapes"]
    assert len(first) == STEPS
    assert all(one["shapes"] == first for one in ran)
    assert [one["collectives"] for one in ran] == [STEPS] * ranks
    # Of themselves the ranks would have run many steps in other programs than their peers.
    assert all(one["own_differs"] > STEPS / 10 for one in ran)
    reasons = {shapes[2] for shapes in first if len(shapes) > 1}
    assert {"drafts_to_verify", "near_max_model_len", "post_transfer_without_spec"} <= reasons
    assert {"holds_prefill", "forced_without_spec", "nothing_drafted"} <= reasons
    # All idle: the smallest programs there are.
    assert "decode_b1_s1_ctx256" in {shapes[0] for shapes in first}


def test_without_the_sync_ranks_diverge() -> None:
    config = config_of(2)
    bucketer = bucketer_of(config, None)
    alone = [run(bucketer, StepSync(None), rank, 2, STEPS)["shapes"] for rank in range(2)]
    different = sum(one != other for one, other in zip(*alone, strict=True))
    assert different > STEPS / 4


def test_a_rank_alone_asks_nobody() -> None:
    for config in (
        config_of(1),
        config_of(4, expert_parallel=False),
        config_of(4, expert_parallel=False, attention_dp_size=1),
    ):
        assert not steps_are_synced(config.serve)
        sync = StepSync.from_config(config, None)
        ran = run(bucketer_of(config, None), sync, 0, 4, 50)
        assert (ran["collectives"], ran["own_differs"]) == (0, 0)


@pytest.mark.parametrize("component", COMPONENT_DP_SIZES)
def test_a_component_spread_over_ranks_has_steps_synced(component: str) -> None:
    assert steps_are_synced(config_of(4, expert_parallel=False, **{component: 2}).serve)
    assert not steps_are_synced(config_of(1, expert_parallel=False, **{component: 2}).serve)


def test_a_group_that_is_missing_or_of_another_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no process group was handed in"):
        StepSync.from_config(config_of(2), None)
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    try:
        with pytest.raises(ConfigError, match="has 1 ranks; allowed: data_parallel_size, 2"):
            StepSync.from_config(config_of(2), dist.group.WORLD)
        with pytest.raises(ConfigError, match="no group that this rank is in"):
            StepSync.from_config(config_of(2), dist.GroupMember.NON_GROUP_MEMBER)
    finally:
        dist.destroy_process_group()


def test_a_step_is_reduced_once() -> None:
    sync = StepSync(None)
    state = StepState(3, 700)
    assert sync.prepare(0, state) == state
    assert sync.prepare(0, StepState(1, 1)) == state
    assert sync.prepare(5) == IDLE
    with pytest.raises(ConfigError, match="step 4 was prepared after step 5"):
        sync.prepare(4, state)


def group_of_its_own(rank: int, ranks: int, store: Path, seconds: float = 20) -> dist.ProcessGroup:
    """A group made without the default one, as vLLM's data-parallel group is."""
    prefixed = dist.PrefixStore("step", dist.FileStore(str(store), ranks))
    group = dist.ProcessGroup(prefixed, rank, ranks)
    gloo = dist.ProcessGroupGloo(prefixed, rank, ranks, timeout=timedelta(seconds=seconds))
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    return group


def syncs(tmp_path: Path, seconds: float = 20) -> list[StepSync]:
    """Those of two ranks, which are threads here."""
    with ThreadPoolExecutor(2) as pool:
        groups = pool.map(lambda rank: group_of_its_own(rank, 2, tmp_path / "r", seconds), range(2))
        return [StepSync.from_config(config_of(2), group) for group in groups]


def test_a_group_that_torch_knows_no_backend_of_reduces_as_any(tmp_path: Path) -> None:
    states = [StepState(3, 1 << 40), StepState(5, 10, draft_room=7)]
    with ThreadPoolExecutor(2) as pool:
        synced = pool.map(lambda sync, state: sync.prepare(0, state), syncs(tmp_path), states)
        # More than the vector holds is too much for any program: all ranks learn it, none waits.
        assert list(synced) == [StepState(5, (1 << 31) - 1, draft_room=7)] * 2


def test_a_reduce_that_failed_is_not_made_again(tmp_path: Path) -> None:
    alone, _ = syncs(tmp_path, seconds=0.3)
    for number in (0, 0, 1):
        with pytest.raises(RankLost):
            alone.prepare(number)
    assert alone.collectives == 1


def test_a_peer_that_dies_is_an_error_and_no_hang(tmp_path: Path) -> None:
    survivor, victim = start(2, tmp_path / "rendezvous", None, dies_at=300)
    _, err = survivor.communicate(timeout=120)
    assert victim.wait(timeout=120) == -signal.SIGKILL
    victim.communicate()
    assert survivor.returncode == 1
    assert "RankLost: the ranks' states of a step could not be reduced" in err


def test_a_step_that_one_rank_leaves_out_is_an_error_on_all(tmp_path: Path) -> None:
    for process in start(2, tmp_path / "rendezvous", None, leaves_out=300):
        _, err = process.communicate(timeout=120)
        assert process.returncode == 1
        assert "RankLost: the ranks prepare different steps" in err
        assert "steps 300 to 301" in err


@pytest.mark.parametrize(
    ("numbers", "told"),
    [
        ((5, 6), "5 to 6"),
        ((0, (1 << 31) - 1), "0 to 2147483647"),
        (((1 << 31) - 1, 1 << 31), "0 to 2147483647"),
        ((1 << 40, (1 << 40) + 2), "0 to 2"),
    ],
)
def test_ranks_at_different_steps_learn_it_and_go_no_further(
    tmp_path: Path, numbers: tuple[int, int], told: str
) -> None:
    def prepare(sync: StepSync, number: int) -> int:
        with pytest.raises(RankLost, match=f"this one step {number}, .* steps {told}") as lost:
            sync.prepare(number)
        with pytest.raises(RankLost) as again:
            sync.prepare(number + 1)
        assert again.value is lost.value
        return sync.collectives

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(prepare, syncs(tmp_path), numbers)) == [1, 1]


def test_steps_are_counted_beyond_int32(tmp_path: Path) -> None:
    numbers = [(1 << 31) - 1, 1 << 31, 1 << 40, 1 << 70]

    def prepare(sync: StepSync) -> list[StepState]:
        return [sync.prepare(number, StepState(2, 7)) for number in numbers]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(prepare, syncs(tmp_path))) == [[StepState(2, 7)] * len(numbers)] * 2
