"""The configs for Trainium that come with the repository are what their comments say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from neffbuild.cache.plan import Plan, Status
from neffbuild.config.load import load_config
from neffbuild.grid.kv_pool import neuron_kv_pool
from neffbuild.toolchain.planning import plan_with
from neffbuild.toolchain.registry import load_toolchain

CONFIGS = Path(__file__).parents[2] / "configs"
NEURON = sorted(CONFIGS.glob("trn?/*.yaml"))


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NEURON_CC_FLAGS", "NEURON_LOGICAL_NC_CONFIG", "VLLM_NEURON_BACKEND"):
        monkeypatch.delenv(name, raising=False)


def planned(path: Path) -> Plan:
    config = load_config(path)
    return plan_with(config, load_toolchain(config.toolchain.name), lambda keys: {})


def test_there_is_one_of_each_for_each_chip() -> None:
    trn2, trn3 = (
        {path.name for path in NEURON if path.parent.name == chip} for chip in ("trn2", "trn3")
    )
    assert trn2 == trn3
    assert len(trn2) == 5


@pytest.mark.parametrize("path", NEURON, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_unit_is_keyed(path: Path) -> None:
    assert load_config(path).notes == ()
    plan = planned(path)
    assert plan.identity.target == path.parent.name
    assert {unit.status for unit in plan.units} == {Status.MISSING}
    assert len({unit.key for unit in plan.units}) == len(plan.units)
    assert len({unit.bucket_name for unit in plan.units}) == len(plan.units)


@pytest.mark.parametrize(
    ("name", "families", "scopes"),
    [
        ("trn2/llama-3.1-8b", {"target": 12, "prefill": 1}, 1),
        ("trn3/llama-3.1-8b", {"target": 12, "prefill": 1}, 1),
        ("trn2/llama-3.3-70b-eagle3",
         {"target-with-spec": 16, "target-without-spec": 16, "draft": 16,
          "prefill": 1, "draft-prefill": 1}, 1),
        ("trn2/llama-3.3-70b-decode-pool", {"target": 12}, 1),
        ("trn2/llama-3.3-70b-prefill-pool", {"prefill": 1}, 1),
        ("trn2/qwen3-30b-a3b-experts", {"target": 40, "prefill": 4}, 4),
        ("trn3/qwen3-30b-a3b-experts", {"target": 20, "prefill": 2}, 2),
    ],
)  # fmt: skip
def test_counts(name: str, families: dict[str, int], scopes: int) -> None:
    counts = planned(CONFIGS / f"{name}.yaml").counts
    assert counts["by_family"] == families
    assert list(counts["by_rank_scope"].values()) == [sum(families.values()) // scopes] * scopes


@pytest.mark.parametrize("path", NEURON, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_pinned_pool_is_what_the_formula_gives(path: Path) -> None:
    config = load_config(path)
    pinned = config.serve.num_gpu_blocks_override
    unpinned = replace(
        config, serve=config.serve.model_copy(update={"num_gpu_blocks_override": None})
    )
    pool = neuron_kv_pool(unpinned, target=path.parent.name, physical_cores=2, environment={})
    assert pool.unresolved is None
    assert pinned in (None, pool.blocks)
    # Where it is not pinned, the plan says on what the keys rest.
    assert bool(planned(path).config.notes) is (pinned is None)
