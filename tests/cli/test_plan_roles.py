"""`neffbuild plan` for the roles of a disaggregated deployment, and what an engine would refuse."""

from __future__ import annotations

from typing import Any

import pytest
from cli_samples import Project, Ran

TOOLCHAIN = {
    "name": "neuronx",
    "target": "trn2",
    "versions": {
        "neuronx-cc": "2.27.5334.0",
        "nki": "0.6.0",
        "libtorch-neuronx-lite": "2.11.0.1.0.1284",
        "vllm-neuron": "0.24.0.1.1.0",
    },
}
PREFILL = "prefill_s2048_kv2048"


def plan(project: Project, *words: str, phases: str | None = None, **serve: Any) -> Ran:
    toolchain = {**TOOLCHAIN, **({"phases": phases} if phases else {})}
    return project.call("plan", project.write(toolchain=toolchain, **serve), *words)


def role(name: str) -> dict[str, Any]:
    return {"kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": name}}


def test_a_decode_pool_says_what_it_lacks(project: Project) -> None:
    document = plan(project, "--json", **role("kv_consumer")).document
    assert document["phases"] == ["decode"]
    assert document["counts"]["by_family"] == {"target": 6}
    (gap,) = document["prefill_gaps"]
    assert gap["family"] == "prefill"
    text = plan(project, **role("kv_consumer")).out
    assert f"prefill is not covered: {gap['reason']}" in text
    # 4 rows of 4096 / 32 blocks, and the null block.
    assert gap["reason"].startswith(f"{PREFILL} missing")
    assert "513 KV blocks or more rule out" in gap["reason"]


@pytest.mark.parametrize(
    ("name", "phases"), [("kv_producer", ["prefill"]), ("kv_both", ["decode", "prefill"])]
)
def test_roles_with_prefill_lack_nothing(project: Project, name: str, phases: list[str]) -> None:
    document = plan(project, "--json", **role(name)).document
    assert (document["phases"], document["prefill_gaps"]) == (phases, [])
    (unit,) = [one for one in document["units"] if one["family"] == "prefill"]
    assert (unit["bucket_name"], unit["num_batched_tokens"], unit["kv_segment"]) == (
        PREFILL, 2048, 2048,
    )  # fmt: skip
    assert "not covered" not in plan(project, **role(name)).out


def test_a_decode_pool_may_have_prefill_programs(project: Project) -> None:
    document = plan(project, "--json", phases="both", **role("kv_consumer")).document
    assert document["counts"]["by_family"] == {"target": 6, "prefill": 1}
    assert document["prefill_gaps"] == []


def test_replicas_with_programs_of_their_own(project: Project) -> None:
    ran = plan(project, "--json", data_parallel_size=2, enable_expert_parallel=True)
    counts = ran.document["counts"]
    assert (counts["units"], counts["by_rank_scope"]) == (14, {"dp0": 7, "dp1": 7})
    names = [unit["bucket_name"] for unit in ran.document["units"]]
    assert names[:2] == ["decode_b1_ctx1024@dp0", "decode_b1_ctx1024@dp1"]


def test_a_name_with_and_without_its_replica_selects_and_explains(project: Project) -> None:
    serve = {"data_parallel_size": 2, "enable_expert_parallel": True}
    config = project.write(toolchain=TOOLCHAIN, **serve)
    explained = project.call(
        "explain", config, "decode_b1_ctx1024@dp0", "decode_b1_ctx1024@dp1", "--json"
    )
    assert explained.document["differences"] == [
        {"path": "rank_scope", "unit": "dp0", "other": "dp1"}
    ]


def test_what_the_engine_would_refuse_exits_2(project: Project) -> None:
    ran = plan(project, "--json", max_num_batched_tokens=1000)
    assert ran.status == 2
    error = ran.document["error"]
    assert (error["field"], error["value"]) == ("serve.max_num_batched_tokens", 1000)
    assert "allowed: 512, 1024, 2048, or at least 4096" in error["message"]


def test_an_unknown_phase_is_refused(project: Project) -> None:
    error = plan(project, "--json", phases="verify").document["error"]
    assert (error["field"], error["value"]) == ("toolchain.phases", "verify")
    assert "allowed: decode, prefill or both" in error["message"]
    error = project.call("plan", project.write(toolchain={"phases": "both"}), "--json").document[
        "error"
    ]
    assert error["field"] == "toolchain.phases"
    assert "builds decode programs only" in error["message"]
