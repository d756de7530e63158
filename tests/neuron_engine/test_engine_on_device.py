"""`neffbuild compile` of speculation with engine vllm-neuron: a start beside a device, whose three families
are units, and what becomes of them where there is no device, or none that is free."""

from __future__ import annotations

import fcntl
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from engine_project import (
    BLOCK,
    BLOCKS,
    UNITS,
    EngineProject,
    block_tables,
    causes,
    outcomes,
    stored_tree,
)

from neffbuild.cache.layouts.layout import State
from neffbuild.cache.layouts.tree import Tree
from neffbuild.cache.layouts.vllm_neuron import VllmNeuron

DRAFTS = 5
EAGLE3 = {"method": "eagle3", "model": "draft", "num_speculative_tokens": DRAFTS}
FAMILIES = ("decode_b{rows}_s6", "decode_b{rows}_s1", "draft_b{rows}_s6")
ROWS, CONTEXTS = (1, 2), (1024, 4096)
OF_A_ROW = len(FAMILIES) * len(CONTEXTS)


def names(*rows: int) -> set[str]:
    return {
        f"{family.format(rows=each)}_ctx{context}"
        for each in rows
        for family in FAMILIES
        for context in CONTEXTS
    }


def speculating(project: EngineProject, **options: Any) -> str:
    return project.configure(speculative_config=EAGLE3, max_num_seqs=ROWS[-1], **options)


def of_row(rows: int) -> str:
    return f"*_b{rows}_*"


def test_without_a_device_these_units_alone_are_not_compiled(project: EngineProject) -> None:
    config = speculating(project)
    plan = project.run("plan", config)
    assert plan.out.count("needs: neuron") == len(names(*ROWS))
    ran = project.run("compile", config, "--json")
    assert ran.status == 1
    failed = causes(ran)
    assert failed.keys() == names(*ROWS)
    for name, (kind, cause) in failed.items():
        assert kind == "refused"
        assert f"{name} is captured beside a Neuron device" in cause
        assert "this host has none (/dev/neuron*)" in cause
    assert project.starts() == []
    # The same target without a draft, in the same cache.
    ran = project.run("compile", project.configure(), "--json", "--only", "decode_b1_*")
    assert ran.status == 0
    assert outcomes(ran).keys() == {name for name in UNITS if "_b1_" in name}


def test_a_start_beside_a_device_compiles_the_three_families_of_a_row(
    project: EngineProject, tmp_path: Path
) -> None:
    project.attach()
    project.order(other_order=True)
    # Two rows at once would not find the cores that they both take.
    config = speculating(project, farm={"workers": 2, "memory": 1 << 28})
    assert project.run("plan", config).out.count("needs: neuron") == len(names(*ROWS))
    ran = project.run("compile", config, "--json")
    assert ran.status == 0, causes(ran)
    assert outcomes(ran).keys() == names(*ROWS)
    assert sorted(outcomes(ran).values()).count("built") == len(ROWS)
    assert (len(project.starts()), project.compiles()) == (len(ROWS), len(names(*ROWS)))
    for unit in ran.document["units"]:
        what, rows, query, context = unit["bucket_name"].split("_")
        count, tokens = int(rows[1:]), int(rows[1:]) * int(query[1:])
        root = tmp_path / "stored" / unit["key"]
        files = stored_tree(project, unit["key"], root)
        [key] = project.entries()[unit["key"]]["statistics"]["engine_keys"]
        found = VllmNeuron().examine(Tree(root), key)
        assert (found.state, found.files.keys()) == (State.COMPLETE, files.keys())
        tables = block_tables(files[f"{key}/graph.hlo"])
        assert tables == {(count, int(context[3:]) // BLOCK)}
        assert f"Shape: ({tokens},)" in files[f"{key}/example_inputs.txt"].read_text()
        graph = files[f"{key}/fxgraph.txt"].read_text()
        assert ("target_hidden_states" in graph) == (what == "draft")
        assert ("spec_decode_metadata" in graph) == ((what, query) == ("decode", "s6"))
    again = project.run("compile", config)
    assert "nothing to do" in again.out
    assert len(project.starts()) == len(ROWS)
    # What a device was needed for is not needed where it is used.
    project.host = None
    assert f"{len(names(*ROWS))} cached" in project.run("plan", config).out


def test_what_a_start_beside_a_device_is_told(project: EngineProject) -> None:
    project.attach("neuron3")
    config = speculating(project)
    cores = {"NEURON_RT_VISIBLE_CORES": "2-3", "NEURON_RT_LOG_LEVEL": "DEBUG"}
    ran = project.run("compile", config, "--json", "--only", of_row(2), env=cores)
    assert ran.status == 0, causes(ran)
    [start] = project.starts()
    options, environment = start["options"], start["environment"]
    assert "VLLM_NEURON_CPU_COMPILE" not in environment
    assert environment["NEURON_PLATFORM_TARGET_OVERRIDE"] == "trn2"
    assert environment["VLLM_NEURON_SKIP_PREFILL_WARMUP"] == "1"
    assert environment["NEURON_RT_VISIBLE_CORES"] == "2-3"
    assert "NEURON_RT_LOG_LEVEL" not in environment
    assert options["speculative_config"]["num_speculative_tokens"] == DRAFTS
    assert (options["max_num_seqs"], options["num_gpu_blocks_override"]) == (2, BLOCKS)
    scratch = Path(environment["TMPDIR"]).parent
    assert {Path(options["model"]).parent, Path(options["speculative_config"]["model"]).parent} == {
        scratch
    }
    assert "ok Neuron device: /dev/neuron3" in project.run("doctor").out


def test_prefill_programs_of_target_and_draft_come_of_one_start(project: EngineProject) -> None:
    project.attach()
    config = speculating(project, toolchain={"phases": "prefill"})
    ran = project.run("compile", config, "--json")
    assert sorted(outcomes(ran)) == ["draft_prefill_s2048_kv2048", "prefill_s2048_kv2048"]
    assert sorted(outcomes(ran).values()) == ["built", "cached"], causes(ran)
    assert (len(project.starts()), project.compiles()) == (1, 2)


def test_without_texts_tokens_and_layers_tell_the_families_apart(project: EngineProject) -> None:
    project.attach()
    project.order(no_texts=True)
    config = speculating(project, tensor_parallel_size=2)
    ran = project.run("compile", config, "--json", "--only", of_row(2))
    assert ran.status == 0, causes(ran)
    assert outcomes(ran).keys() == names(2)
    assert project.compiles() == OF_A_ROW


def test_a_later_run_has_all_families_of_a_row_beforehand(project: EngineProject) -> None:
    project.attach()
    project.order(fails=["draft_b2_s6_w32"])
    config = speculating(project)
    ran = project.run("compile", config, "--json", "--only", of_row(2))
    assert causes(ran).keys() == {"draft_b2_s6_ctx1024"}
    assert "of draft_b2_s6_ctx1024 is not finished" in causes(ran)["draft_b2_s6_ctx1024"][1]
    before = project.compiles()
    project.order()
    ran = project.run("compile", config, "--json", "--only", of_row(2))
    assert (outcomes(ran)["draft_b2_s6_ctx1024"], ran.status) == ("built", 0), causes(ran)
    assert project.compiles() == before + 1


def test_a_farm_that_is_killed_leaves_whole_entries_and_a_free_device(
    project: EngineProject,
) -> None:
    project.attach()
    project.order(compiles_for_ever=["draft_b1_s6_w128"])
    config = speculating(project)
    targets = 2 * len(CONTEXTS)
    with project.start("compile", config) as farm:
        give_up = time.monotonic() + 100
        # The row of two is stored, and of that of one the targets are compiled.
        while project.compiles() < OF_A_ROW + targets:
            assert farm.poll() is None
            assert time.monotonic() < give_up
            time.sleep(0.05)
        farm.send_signal(signal.SIGKILL)
        farm.communicate(timeout=60)
    plan = project.run("plan", config, "--json").document
    stored = {unit["bucket_name"] for unit in plan["units"] if unit["status"] == "cached"}
    assert stored == names(2)
    assert project.run("verify", str(project.cache)).status == 0
    project.order()
    ran = project.run("compile", config, "--json")
    assert ran.status == 0, causes(ran)
    assert outcomes(ran).keys() == names(*ROWS)
    assert project.compiles() == OF_A_ROW + targets + OF_A_ROW


@pytest.mark.parametrize(
    ("faults", "missing", "strangers"),
    [
        ({"no_drafts": True}, {"draft_b1_s6_ctx1024", "draft_b1_s6_ctx4096"}, 0),
        ({"more_drafts": 1}, {name for name in names(1) if "_s6_" in name}, 4),
    ],
)
def test_an_engine_that_compiles_another_set_than_planned(
    project: EngineProject, faults: dict[str, object], missing: set[str], strangers: int
) -> None:
    project.attach()
    project.order(**faults)
    config = speculating(project)
    ran = project.run("compile", config, "--json", "--only", of_row(1))
    failed = causes(ran)
    assert (ran.status, failed.keys()) == (1, missing)
    for name, (kind, cause) in failed.items():
        assert kind == "compiler_error"
        assert f"vLLM Neuron ended well, but there is no entry of {name} among those it" in cause
    # Of the planned set the rest is stored, and nothing of the other one.
    entries = project.entries().values()
    assert len(entries) == OF_A_ROW - len(missing)
    unknown = {
        key for entry in entries for key in entry["statistics"].get("engine_entries_of_no_unit", ())
    }
    assert len(unknown) == strangers
    assert not any(key in name for key in unknown for entry in entries for name in entry["files"])


def test_a_program_that_the_device_does_not_load_is_built_all_the_same(
    project: EngineProject,
) -> None:
    project.attach()
    project.order(load_fails=True)
    config = speculating(project)
    ran = project.run("compile", config, "--json", "--only", of_row(1))
    assert (ran.status, outcomes(ran).keys()) == (0, names(1)), causes(ran)


def test_a_device_that_another_process_has_is_said(project: EngineProject) -> None:
    node = project.attach(cores=2)
    config = speculating(project, tensor_parallel_size=2)
    words = ("compile", config, "--only", "draft_b1_s6_ctx1024", "--json")
    with node.open("r+b") as held:
        fcntl.lockf(held, fcntl.LOCK_EX, 1, 1)
        ran = project.run(*words[:-1])
    assert "Logical Neuron Core(s) not available - Requested:2 Available:0" in ran.err + ran.out
    assert "end what else runs on this host's device" in ran.err + ran.out
    project.attach(cores=1)
    [(_, cause)] = causes(project.run(*words)).values()
    assert "Requested:2 Available:1" in cause
    (project.root / "draft" / "model.safetensors").unlink()
    project.attach(cores=2)
    [(_, cause)] = causes(project.run(*words)).values()
    assert "Cannot find any model weights" in cause


def test_two_farms_of_a_host_take_turns_at_its_device(project: EngineProject) -> None:
    project.attach()
    project.order(seconds=1)
    config = speculating(project, farm={"workers": 2, "memory": 1 << 28})
    words = ("compile", config, "--only", of_row(1), "--cache")
    with project.start(*words, "one") as first, project.start(*words, "two") as second:
        errors = [farm.communicate(timeout=120)[1].decode() for farm in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0), errors
    assert len(project.starts()) == 2


def test_a_whole_start_beside_a_device_finds_everything(project: EngineProject) -> None:
    project.attach()
    config = speculating(project)
    assert project.run("compile", config).status == 0
    remote, root = str(project.root / "remote"), project.root / "engine"
    assert project.run("push", config, "--to", remote, "--tag", "m:1").status == 0
    into = ["--layout", "vllm-neuron", "--into", str(root / "neuron" / "compile_cache")]
    ran = project.run("pull", remote, "--tag", "m:1", "--cache", str(project.root / "c2"), *into)
    assert ran.status == 0, ran.err
    compiled, told = project.compiles(), project.starts()[0]
    options = {
        **told["options"],
        "model": str(project.root / "model"),
        "speculative_config": {**EAGLE3, "model": str(project.root / "draft")},
        "max_num_seqs": ROWS[-1],
        "additional_config": {
            "neuron_config": {
                "num_seqs_buckets": ROWS,
                "decode_context_length_buckets": [1024],
            }
        },
    }
    assert project.host is not None
    done = subprocess.run(
        [
            *project.host.prefix,
            *(sys.executable, "-P", "-c", f"from vllm import LLM; LLM(**{options!r})"),
        ],
        env={**project.environment, **told["environment"], "VLLM_CACHE_ROOT": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Local cache hit for key") == len(names(*ROWS))
    assert "[4/4] Warming up decode" in done.stderr
    assert project.compiles() == compiled
