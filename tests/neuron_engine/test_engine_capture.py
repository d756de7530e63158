"""`neffbuild compile` with engine vllm-neuron on the route xla: what the engine is told, what becomes of what
it leaves, and of what it does not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from engine_project import (
    BLOCKS,
    ROWS,
    UNITS,
    WINDOWED,
    EngineProject,
    block_tables,
    causes,
    graph_name,
    outcomes,
    stored_tree,
)

from neffbuild.cache.layouts.layout import State
from neffbuild.cache.layouts.tree import Tree
from neffbuild.cache.layouts.vllm_neuron import VllmNeuron

# The longest of a row is started first, and leaves the others beside it.
ALL_DONE = {name: "built" if name.endswith("4096") else "cached" for name in UNITS}


def test_a_start_compiles_a_row_and_each_unit_gets_its_entry(
    project: EngineProject, tmp_path: Path
) -> None:
    project.order(other_order=True)
    config = project.configure()
    ran = project.run("compile", config, "--json", env={"VLLM_API_KEY": "s", "AWS_PROFILE": "p"})
    assert outcomes(ran) == ALL_DONE, ran.err
    assert (len(project.starts()), project.compiles()) == (len(ROWS), len(UNITS))
    for unit in ran.document["units"]:
        rows, context = (int(part.lstrip("bctx")) for part in unit["bucket_name"].split("_")[1:])
        root = tmp_path / unit["key"]
        files = stored_tree(project, unit["key"], root)
        [key] = project.entries()[unit["key"]]["statistics"]["engine_keys"]
        assert {name.split("/")[0] for name in files} == {key}
        found = VllmNeuron().examine(Tree(root), key)
        assert (found.state, found.files.keys()) == (State.COMPLETE, files.keys())
        assert block_tables(files[f"{key}/graph.hlo"]) == {(rows, context // 32)}
    again = project.run("compile", config)
    assert "nothing to do" in again.out
    assert len(project.starts()) == len(ROWS)


def test_what_a_start_is_told(project: EngineProject) -> None:
    config = project.configure(neuron={"decode_context_length_buckets": [1024, 2048]})
    loud = {"VLLM_CONFIGURE_LOGGING": "0", "VLLM_SOMETHING_NEW": "1", "AWS_PROFILE": "p"}
    quiet = {"NEURON_LIBTORCH_REMOTE_CACHE": "/nfs", "VLLM_NEURON_PARALLEL_COMPILE_WORKERS": "9"}
    ran = project.run("compile", config, "--only", "decode_b2_*", env={**loud, **quiet})
    assert ran.status == 0, ran.err
    [start] = project.starts()
    options, environment = start["options"], start["environment"]
    assert options["max_num_seqs"] == 2
    assert options["additional_config"]["neuron_config"] == {
        "num_seqs_buckets": [2],
        "decode_context_length_buckets": [1024, 2048],
    }
    assert (options["max_model_len"], options["num_gpu_blocks_override"]) == (4096, BLOCKS)
    scratch = environment.pop("TMPDIR").removesuffix("/tmp")
    assert Path(options["model"]).parent == Path(scratch)
    assert environment == {
        "HF_HUB_OFFLINE": "1",
        "NEURON_LIBTORCH_CACHE_ROOT": f"{scratch}/vllm",
        "NEURON_LIBTORCH_COMPILATION_TIMEOUT": "604800",
        "NEURON_LIBTORCH_PARALLEL_COMPILE_WORKERS": "1",
        "NEURON_PLATFORM_TARGET_OVERRIDE": "trn2",
        "VLLM_CACHE_ROOT": f"{scratch}/vllm",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NEURON_BACKEND": "vllm_neuron",
        "VLLM_NEURON_BARRIER_TIMEOUT": "604800",
        "VLLM_NEURON_CPU_COMPILE": "1",
        "VLLM_NEURON_DISABLE_PARALLEL_TRACE": "1",
        "VLLM_NEURON_SKIP_ENCODER_WARMUP": "1",
        "VLLM_NEURON_SKIP_PREFILL_WARMUP": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # in the recipe, so the start has it too
        "VLLM_SOMETHING_NEW": "1",
    }


def test_prefill_programs_are_a_row_of_their_own(project: EngineProject) -> None:
    config = project.configure(toolchain={"phases": "prefill"})
    ran = project.run("compile", config, "--json")
    assert outcomes(ran) == {"prefill_s2048_kv2048": "built"}, ran.out
    [start] = project.starts()
    assert "VLLM_NEURON_SKIP_PREFILL_WARMUP" not in start["environment"]
    assert start["environment"]["VLLM_NEURON_SKIP_DECODE_WARMUP"] == "1"
    assert start["options"]["max_num_seqs"] == 4


def test_a_model_finds_its_checkpoint(project: EngineProject) -> None:
    project.order(needs_checkpoint=True)
    config = project.configure()
    ran = project.run("compile", config, "--json", "--only", "decode_b1_*")
    assert "model.safetensors" in causes(ran)["decode_b1_ctx4096"][1]
    (project.root / "model" / "model.safetensors").write_bytes(b"constants")
    ran = project.run("compile", config, "--json", "--only", "decode_b1_*")
    assert set(outcomes(ran).values()) <= {"built", "cached"}, ran.out


def test_the_second_unit_of_a_row_compiles_only_what_is_its_own(project: EngineProject) -> None:
    project.order(fails=[graph_name(2, 1024)], once=True)
    config = project.configure()
    ran = project.run("compile", config, "--json", "--only", "decode_b2_*")
    assert set(outcomes(ran).values()) <= {"built", "cached"}, ran.out
    # The first start is over when the second graph fails; the next finds the first one's finished.
    assert len(project.starts()) == 2
    assert project.compiles() == 3


def test_units_of_a_row_wait_for_the_one_that_makes_them(project: EngineProject) -> None:
    project.order(seconds=1)
    config = project.configure(farm={"workers": 2, "memory": 1 << 28})
    ran = project.run("compile", config, "--json", "--only", "decode_b1_*")
    assert outcomes(ran) == {"decode_b1_ctx1024": "cached", "decode_b1_ctx4096": "built"}
    assert len(project.starts()) == 1
    # One compile made both.
    seconds = {entry["statistics"]["compile_seconds"] for entry in project.entries().values()}
    assert len(seconds) == 1


def test_a_graph_that_fails_costs_its_own_unit_alone(project: EngineProject) -> None:
    project.order(fails=[graph_name(2, 1024)])
    ran = project.run("compile", project.configure(), "--json")
    assert ran.status == 1
    assert outcomes(ran) == {**ALL_DONE, "decode_b2_ctx1024": "failed"}
    kind, cause = causes(ran)["decode_b2_ctx1024"]
    assert kind == "compiler_error"
    assert "neuronx-cc failed (exit code 70)" in cause
    assert "of decode_b2_ctx1024 is not finished: there is no .compilation_complete" in cause
    assert len(project.starts()) == len(ROWS) + 1


@pytest.mark.parametrize(
    ("faults", "kind", "said"),
    [
        ({"fails": [graph_name(1, 4096)], "status": -9}, "out_of_memory", "was killed"),
        (
            {"times_out": [graph_name(1, 4096)]},
            "timeout",
            "Shared compilation timeout after 600.0s",
        ),
        ({"killed": [graph_name(1, 4096)]}, "out_of_memory", "ended by signal 9"),
        (
            {"trace_fails": [graph_name(1, 4096)]},
            "compiler_error",
            "Model graph extraction failed for",
        ),
        ({"lane_fails": True}, "compiler_error", "Parallel trace fork failed (rank=1)"),
        ({"no_sentinel": [graph_name(1, 4096)]}, "compiler_error", "no .compilation_complete"),
        ({"no_shapes": [graph_name(1, 4096)]}, "compiler_error", "does not say what it is of"),
    ],
)
def test_how_a_start_fails(
    project: EngineProject, faults: dict[str, object], kind: str, said: str
) -> None:
    project.order(**faults)
    ran = project.run("compile", project.configure(), "--json", "--only", "decode_b1_ctx4096")
    assert ran.status == 1
    cause = causes(ran)["decode_b1_ctx4096"]
    assert cause[0] == kind
    assert said in cause[1]
    assert "decode_b1_ctx4096" in cause[1]
    assert str(project.root) not in cause[1].partition("; log:")[0]


def test_a_start_that_hangs_is_ended_by_the_farm(project: EngineProject) -> None:
    project.order(hangs=True)
    config = project.configure(farm={"timeout": 3})
    ran = project.run("compile", config, "--json", "--only", "decode_b1_ctx4096")
    assert causes(ran)["decode_b1_ctx4096"][0] == "timeout"


def test_without_texts_the_graph_itself_tells(project: EngineProject) -> None:
    project.order(no_texts=True, other_order=True)
    ran = project.run("compile", project.configure(), "--json", "--only", "decode_b4_*")
    assert set(outcomes(ran).values()) <= {"built", "cached"}, ran.out


def test_windows_and_unbucketed_contexts_are_told_apart(project: EngineProject) -> None:
    project.order(no_texts=True)
    (project.root / "model" / "config.json").write_text(json.dumps(WINDOWED))
    config = project.configure(neuron={"decode_context_length_buckets": [1152, 2048]})
    ran = project.run("compile", config, "--json", "--only", "decode_b1_*")
    assert len(outcomes(ran)) == 3
    assert set(outcomes(ran).values()) <= {"built", "cached"}, ran.out
    config = project.configure(neuron={"decode_context_length_buckets": None}, max_model_len=4000)
    ran = project.run("compile", config, "--json", "--only", "decode_b1*")
    assert outcomes(ran) == {"decode_b1": "built"}, ran.out


def test_what_is_of_no_unit_is_said_and_not_stored(project: EngineProject) -> None:
    project.order(extra=True)
    ran = project.run("compile", project.configure(), "--json", "--only", "decode_b1_*")
    assert set(outcomes(ran).values()) <= {"built", "cached"}, ran.out
    entries = project.entries().values()
    [stranger] = {
        key for entry in entries for key in entry["statistics"].get("engine_entries_of_no_unit", ())
    }
    assert not any(stranger in name for entry in entries for name in entry["files"])


def test_two_buckets_of_one_graph_are_named(project: EngineProject) -> None:
    config = project.configure(neuron={"decode_context_length_buckets": [128, 256]}, block_size=256)
    ran = project.run("compile", config, "--json", "--only", "decode_b1_*")
    assert outcomes(ran)["decode_b1_ctx4096"] == "built"
    for name in ("decode_b1_ctx128", "decode_b1_ctx256"):
        kind, cause = causes(ran)[name]
        assert kind == "compiler_error"
        assert "may be of decode_b1_ctx128 and decode_b1_ctx256" in cause


def test_ranks_whose_keys_differ_get_an_entry_each(project: EngineProject) -> None:
    project.order(key_of_each_rank=[graph_name(1, 4096)])
    config = project.configure(tensor_parallel_size=2)
    ran = project.run("compile", config, "--json", "--only", "decode_b1_*")
    assert set(outcomes(ran).values()) <= {"built", "cached"}, ran.out
    keys = [len(entry["statistics"]["engine_keys"]) for entry in project.entries().values()]
    assert sorted(keys) == [1, 2]


def test_a_later_run_compiles_what_it_lacks_and_nothing_else(project: EngineProject) -> None:
    project.order(fails=[graph_name(2, 1024)])
    config = project.configure()
    ran = project.run("compile", config, "--json", "--only", "decode_b2_*")
    assert outcomes(ran) == {"decode_b2_ctx1024": "failed", "decode_b2_ctx4096": "built"}
    before = project.compiles()
    project.order()
    ran = project.run("compile", config, "--json", "--only", "decode_b2_*")
    assert outcomes(ran)["decode_b2_ctx1024"] == "built", ran.out
    assert project.compiles() == before + 1


def test_a_whole_start_of_the_engine_finds_everything(project: EngineProject) -> None:
    config = project.configure()
    assert project.run("compile", config).status == 0
    remote, root = str(project.root / "remote"), project.root / "engine"
    assert project.run("push", config, "--to", remote, "--tag", "m:1").status == 0
    into = ["--layout", "vllm-neuron", "--into", str(root / "neuron" / "compile_cache")]
    ran = project.run("pull", remote, "--tag", "m:1", "--cache", str(project.root / "c2"), *into)
    assert ran.status == 0, ran.err
    compiled = project.compiles()
    options = {
        **project.starts()[0]["options"],
        "model": str(project.root / "model"),
        "max_num_seqs": ROWS[-1],
        "additional_config": {
            "neuron_config": {
                "num_seqs_buckets": ROWS,
                "decode_context_length_buckets": [1024],
            }
        },
    }
    told = project.starts()[0]["environment"]
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"from vllm import LLM; LLM(**{options!r})"],
        env={**project.environment, **told, "VLLM_CACHE_ROOT": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Local cache hit for key") == len(UNITS)
    assert project.compiles() == compiled
