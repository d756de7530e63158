"""Commands on a config for engine vllm, where no vLLM is: what they say, and what to do."""

from __future__ import annotations

from typing import Any

import pytest
from cli_samples import INDUCTOR, Project

VLLM: dict[str, Any] = {
    **INDUCTOR,
    "engine": "vllm",
    "target": "x86-64-v3+avx512",
    "versions": INDUCTOR["versions"] | {"vllm": "0.32.0"},
}


@pytest.fixture
def config(project: Project) -> str:
    return project.write(toolchain=VLLM, additional_config=...)


def test_the_plan_is_one_symbolic_unit(project: Project, config: str) -> None:
    document = project.call("plan", "--json", config).document
    [unit] = document["units"]
    assert (unit["bucket_name"], unit["symbolic"]) == ("step_any", True)
    sizes = ("num_seqs", "query_len", "context_len", "block_table_width")
    assert [unit[name] for name in sizes] == [None] * len(sizes)
    assert document["toolchain"]["engine"] == "vllm"
    assert document["counts"]["by_family"] == {"target": 1}
    assert "num_seqs, query_len and context_len are symbolic" in project.call("plan", config).out
    other = project.call("plan", "--json", project.write("other.yaml", toolchain=INDUCTOR)).document
    assert not any(unit["symbolic"] for unit in other["units"])


CHANGES: dict[str, dict[str, Any]] = {
    "toolchain.versions.vllm": {
        "toolchain": VLLM | {"versions": VLLM["versions"] | {"vllm": "0.33.0"}}
    },
    "toolchain.versions.torch": {
        "toolchain": VLLM | {"versions": VLLM["versions"] | {"torch": "2.14.0"}}
    },
    "toolchain.target": {"toolchain": VLLM | {"target": "x86-64-v3+amx"}},
    "serve.dtype": {"dtype": "float32"},
    "serve.tensor_parallel_size": {"tensor_parallel_size": 2},
    "model.architectures": {"hf_overrides": {"architectures": ["RenamedLlamaForCausalLM"]}},
}


@pytest.mark.parametrize(("ingredient", "change"), CHANGES.items(), ids=CHANGES)
def test_explain_names_what_differs(
    project: Project, config: str, ingredient: str, change: dict[str, Any]
) -> None:
    other = project.write("other.yaml", **{"toolchain": VLLM, "additional_config": ..., **change})
    document = project.call("explain", "--json", config, "step_any", other).document
    assert ingredient in [one["path"] for one in document["differences"]]
    assert document["key"] != document["other_key"]


def test_where_the_model_lies_is_no_difference(project: Project, config: str) -> None:
    (project.root / "model").rename(project.root / "moved")
    moved = project.write("moved.yaml", toolchain=VLLM, additional_config=..., model="moved")
    (project.root / "model").symlink_to("moved")
    document = project.call("explain", "--json", config, "step_any", moved).document
    assert document["differences"] == []


def test_replay_says_why_it_does_not_apply(project: Project, config: str) -> None:
    ran = project.call("replay", "--json", config)
    assert ran.status == 2
    assert "no buckets to replay" in ran.error["message"]
    assert ran.error["hint"]


def test_verify_counts_every_state_as_uncovered_until_the_one_unit_is_there(
    project: Project, config: str
) -> None:
    ran = project.call("verify", "--json", config)
    assert ran.status == 1
    document = ran.document
    [state] = document["uncovered_states"]
    assert (state["num_seqs"], state["reason"]) == ([1, 4], "step_any is missing")
    assert document["states_checked"] == 4 * 4094
    assert document["prefill_gaps"] == []


def test_compile_says_what_it_needs(project: Project, config: str) -> None:
    ran = project.call("compile", "--json", config)
    assert ran.status == 2
    assert "vllm 0.32.0 is planned, none is installed" in ran.error["message"]
    assert "another host" in ran.error["hint"]


def test_what_is_not_pinned_and_not_installed_is_unresolved(project: Project) -> None:
    unpinned = project.write(toolchain=VLLM | {"versions": INDUCTOR["versions"]})
    [unit] = project.call("plan", "--json", unpinned).document["units"]
    assert unit["status"] == "unresolved"
    assert "toolchain.versions.vllm" in unit["reason"]
