"""From a plan to NEFFs in another cache, through the stand-in compiler; and every way that can fail."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import neffs
import neuron_project
import pytest
import standin
from neuron_project import BLOCKS, REFERENCE, UNITS, XLA, NeuronProject

from neffbuild.cache.catalog import Hit, read_entry
from neffbuild.cache.directory import DirectoryStore
from neffbuild.config.errors import ToolchainRefusal
from neffbuild.config.load import load_config
from neffbuild.toolchain.base import Captured, Unit
from neffbuild.toolchain.failures import CompilerFailure
from neffbuild.toolchain.neuronx import NeuronxToolchain, hosts
from neffbuild.toolchain.neuronx.neff import read_neff_file
from neffbuild.toolchain.planning import plan_config

XLA_START = (
    "compile graph.hlo --framework XLA --target trn2 --output graph.neff "
    "--logfile log-neuron-cc.txt --auto-cast=none --verbose=35 -O1"
)
MODULE = b"ML\xefR" + b"a portable artifact"


def test_a_config_is_compiled_pushed_and_pulled(project: NeuronProject) -> None:
    config = project.write_xla()
    assert project.call("plan", config, "--json").document["counts"]["missing"] == 6
    ran = project.run("compile", config, "--json")
    assert ran.status == 0, ran
    asked = project.received()
    graphs = {hashlib.sha256(neuron_project.hlo(n)).hexdigest() for n in range(6)}
    assert {one["graph"] for one in asked} == graphs
    for one in asked:
        assert " ".join(one["words"][:-2]) == XLA_START
        assert one["words"][-2:] == [
            "--internal-hlo2tensorizer-options=--modular-flow-mac-threshold=10",
            "--internal-backend-options=--enable-verifier=false --enable-nested-dynamic-loop",
        ]
    # The graphs have been read, and only then compiled under the key of their own unit.
    store = DirectoryStore(project.cache)
    for unit in project.call("plan", config, "--json").document["units"]:
        hit = read_entry(store, unit["key"])
        assert isinstance(hit, Hit)
        entry = hit.entry
        assert list(entry.files) == ["graph.neff"]
        number = UNITS.index(unit["bucket_name"])
        content = neuron_project.hlo(number)
        assert entry.graph_digest == hashlib.sha256(content).hexdigest()
        neff = read_neff_file(store.blob_path(entry.files["graph.neff"].digest))
        facts = entry.statistics["neff"]
        assert facts == {
            **neff.header.document(),
            "members": len(neff.members),
            "payload_bytes": neff.payload_bytes,
        }
        assert facts["build_version"] == standin.VERSION
        assert entry.statistics["command"][:2] == ["neuronx-cc", "compile"]
        assert entry.statistics["graph_bytes"] == len(content)
        assert str(project.root) not in json.dumps(entry.document())
    assert project.call("compile", config).out.startswith("nothing to do: all 6 units")
    assert project.call("verify", config, "--json").document["ok"]

    store_folder, other = str(project.root / "store"), str(project.root / "other")
    assert project.call("push", config, "--to", store_folder, "--tag", "n:1").status == 0
    pulled = project.call("pull", store_folder, "--tag", "n:1", "--cache", other)
    assert pulled.status == 0, pulled
    assert project.call("verify", config, "--cache", other, "--json").document["ok"]
    assert project.call("verify", store_folder, "--json").document["ok"]
    assert len(project.received()) == 6


def test_the_farm_leaves_nothing_of_the_compiler(project: NeuronProject) -> None:
    assert project.run("compile", project.write_xla()).status == 0
    left = [path for path in project.root.rglob("*") if "neuron" in path.name]
    assert [path.name for path in left] == ["neuronx-cc"], left
    assert not list((project.root / "tmp").glob("neffbuild-farms-*/*/*"))


def test_workers_see_no_environment_but_the_recipes(project: NeuronProject) -> None:
    secret = {"AWS_SECRET_ACCESS_KEY": "s", "VLLM_NEURON_NEW": "1", "NEURON_CC_FLAGS": "-O3"}
    assert project.run("compile", project.write_xla(), env=secret).status == 0
    for one in project.received():
        assert "-O3" in one["words"]
        assert "VLLM_NEURON_NEW" in one["environment"]
        assert "AWS_SECRET_ACCESS_KEY" not in one["environment"]


FAULTS = {
    "EVRF007": ("compiler_error", "NCC_EVRF007: the program has more instructions", "--optlevel=1"),
    "EBVF030": ("compiler_error", "NCC_EBVF030: ", "smaller buckets"),
    "EVRF009": ("compiler_error", "NCC_EVRF009: ", "num_gpu_blocks_override"),
    "EOOM001": ("compiler_error", "NCC_EOOM001: ", "fewer KV blocks"),
    "EOOM002": ("compiler_error", "NCC_EOOM002: ", "fewer KV blocks"),
    "EVRF051": ("compiler_error", "NCC_EVRF051: ", "fp8e4m3"),
    "EVRF059": ("missing_dependency", "NCC_EVRF059: ", "nki-intermediate-cache"),
    "EMOD025": ("compiler_error", "NCC_EMOD025: ", "fixed sizes"),
    "ESPP004": ("compiler_error", "NCC_ESPP004: ", "float64"),
    "EXYZ123": ("compiler_error", "NCC_EXYZ123: Something new", "documentation"),
    "logged_EVRF007": ("compiler_error", "NCC_EVRF007: ", "--optlevel=1"),
    "kill_itself": ("out_of_memory", "neuronx-cc was killed (signal 9, SIGKILL)", "memory"),
    "exit_137": ("out_of_memory", "neuronx-cc was killed (exit code 137)", "memory"),
    "F137": ("out_of_memory", "neuronx-cc was killed (exit code 70)", "memory"),
    "abort_itself": ("signal", "neuronx-cc aborted (signal 6, SIGABRT)", "log"),
    "F134": ("signal", "neuronx-cc aborted (exit code 70)", "log"),
    "segfault_itself": ("signal", "neuronx-cc crashed (signal 11, SIGSEGV)", "log"),
    "F139": ("signal", "neuronx-cc crashed (exit code 70)", "log"),
    "exit_70": ("compiler_error", "neuronx-cc failed (exit code 70)", "log"),
    "exit_1": ("compiler_error", "neuronx-cc failed (exit code 1)", "log"),
    "half": ("compiler_error", "exit code 0, but graph.neff is no whole NEFF: data_size", "killed"),
    "empty": (
        "compiler_error",
        "exit code 0, but graph.neff is no whole NEFF: a NEFF st",
        "killed",
    ),
    "nothing": ("compiler_error", "exit code 0, but it left no graph.neff", "killed"),
    "flood": ("compiler_error", "neuronx-cc failed (exit code 1)", "log"),
}


_FIRST = [
    *("EVRF007", "EVRF059", "logged_EVRF007", "kill_itself", "F137"),
    *("segfault_itself", "exit_70", "half", "nothing", "flood"),
]
_OTHERS = [fault for fault in FAULTS if fault not in _FIRST]


def finished(project: NeuronProject, config: str, *words: str) -> dict[str, dict[str, Any]]:
    """The results of a run in which a unit fails, by bucket name."""
    ran = project.run("compile", config, "--json-lines", *words)
    assert ran.status == 1, ran
    events = [json.loads(line) for line in ran.out.splitlines()]
    results = [event["result"] for event in events if event.get("event") == "unit_finished"]
    return {result["bucket_name"]: result for result in results}


@pytest.mark.parametrize("faults", [_FIRST, pytest.param(_OTHERS, marks=pytest.mark.slow)])
def test_every_failure_is_its_units_alone_and_says_what_to_do(
    project: NeuronProject, faults: list[str]
) -> None:
    """Five of the faults at a time, in a farm whose sixth unit is well."""
    config = project.write_xla()
    units = project.call("plan", config, "--json").document["units"]
    for start in range(0, len(faults), 5):
        some = faults[start : start + 5]
        standin.order(
            project.tools, **{unit["key"][:16]: f for unit, f in zip(units, some, strict=False)}
        )
        results = finished(project, config, "--retries", "0")
        for unit, fault in zip(units, some, strict=False):
            kind, text, advice = FAULTS[fault]
            result = results[unit["bucket_name"]]
            assert (result["outcome"], result["cause_kind"]) == ("failed", kind), (fault, result)
            assert text in result["cause"], (fault, result)
            assert advice in result["advice"], (fault, result)
            assert str(project.root) not in result["cause"]
        if start == 0:
            assert results[units[-1]["bucket_name"]]["outcome"] == "built"
    standin.order(project.tools)
    assert project.run("compile", config).status == 0


def test_a_compiler_out_of_memory_is_tried_again_alone_and_a_graph_too_large_is_not(
    project: NeuronProject,
) -> None:
    config = project.write_xla()
    key = project.call("plan", config, "--json").document["units"][0]["key"]
    for fault, attempts in (("F137", 2), ("EOOM001", 1)):
        standin.order(project.tools, **{key[:16]: fault})
        results = finished(project, config)
        failed = [unit for unit in results.values() if unit["outcome"] == "failed"]
        assert [(unit["key"], unit["attempts"]) for unit in failed] == [(key, attempts)]


def test_a_compiler_that_hangs_is_ended(project: NeuronProject) -> None:
    config = project.write_xla()
    key = project.call("plan", config, "--json").document["units"][0]["key"]
    standin.order(project.tools, **{key[:16]: "hang"})
    began = time.monotonic()
    ran = project.run("compile", config, "--json", "--timeout", "4", "--retries", "0")
    assert time.monotonic() - began < 60
    (failed,) = (unit for unit in ran.document["units"] if unit["outcome"] == "failed")
    assert (failed["key"], failed["cause_kind"]) == (key, "timeout")


def test_what_the_compiler_leaves_running_is_not_waited_for(project: NeuronProject) -> None:
    config = project.write_xla()
    standin.order(project.tools, any="leave_a_daemon")
    ran = project.run("compile", config, "--only", "decode_b1_ctx1024", "--json")
    assert ran.status == 0, ran
    assert ran.document["units"][0]["compile_seconds"] < 60


def test_a_flag_the_compiler_does_not_know_is_its_to_refuse(project: NeuronProject) -> None:
    config = project.write_xla(flags=["--never-heard-of=1"])
    ran = project.run("compile", config, "--only", "decode_b1_ctx1024", "--json")
    (unit,) = (one for one in ran.document["units"] if one["outcome"] == "failed")
    assert "NCC_EARG002: the compiler does not know a flag" in unit["cause"]
    assert "unrecognized arguments: --never-heard-of=1" in unit["cause"]


def test_another_compiler_than_planned_is_refused_before_any_compile(
    project: NeuronProject,
) -> None:
    config = project.write_xla()
    standin.order(project.tools, version="2.27.5334.0")
    ran = project.call("compile", config, "--json")
    assert ran.status == 2
    said = "neuronx-cc 2.28.7631.0 is planned, 2.27.5334.0+5b7a0f21 is installed"
    assert said in ran.error["message"]
    (project.tools / "neuronx-cc").unlink()
    assert project.call("compile", config, "--json").error["message"] == "neuronx-cc is not on PATH"
    assert project.received() == []


def test_another_build_of_one_version_is_another_compiler(project: NeuronProject) -> None:
    """What follows the `+` is all that tells a compiler that was built again from the one before."""
    project.write_xla()
    versions = {tool: version for tool, version in XLA["versions"].items() if tool != "neuronx-cc"}
    config = project.write(
        "asked.yaml", toolchain={**XLA, "versions": versions}, num_gpu_blocks_override=BLOCKS
    )
    words = ("--only", "decode_b1_ctx1024", "--json")
    assert project.run("compile", config, *words).document["counts"]["built"] == 1
    assert project.run("compile", config, *words).document["counts"]["cached"] == 1
    standin.order(project.tools, build="0123abcd")
    units = project.run("plan", config, "--json").document["units"]
    assert {one["status"] for one in units} == {"missing"}
    exact = {**versions, "neuronx-cc": f"{standin.VERSION}+{standin.BUILD}"}
    pinned = project.write(
        "pinned.yaml", toolchain={**XLA, "versions": exact}, num_gpu_blocks_override=BLOCKS
    )
    units = project.run("plan", pinned, "--json").document["units"]
    assert [one["status"] for one in units].count("cached") == 1
    assert (
        "neuronx-cc 2.28.7631.0+5b7a0f21 is planned, 2.28.7631.0+0123abcd is installed"
        in project.run("compile", pinned, "--json").error["message"]
    )
    assert len(project.received()) == 1


def test_a_mistake_in_the_config_has_its_own_advice(project: NeuronProject) -> None:
    config = project.write_xla(flags=["--auto-cast"])
    error = project.call("compile", config, "--json").error
    assert (error["field"], error["hint"]) == ("toolchain.flags", "write --auto-cast=VALUE")


def test_another_graph_in_the_folder_is_another_unit(project: NeuronProject) -> None:
    """Its name, the config and all versions are the same: nothing else tells it from the one before."""
    config = project.write_xla()
    words = ("compile", config, "--only", "decode_b1_*")
    assert project.call(*words).status == 0
    assert len(project.received()) == 2
    assert project.call(*words).status == 0
    assert len(project.received()) == 2
    with (project.root / "graphs" / "decode_b1_ctx1024" / "graph.hlo").open("ab") as file:
        file.write(b"of other model code")
    units = project.call("plan", config, "--json").document["units"]
    assert {one["bucket_name"]: one["status"] for one in units[:2]} == {
        "decode_b1_ctx1024": "missing",
        "decode_b1_ctx4096": "cached",
    }
    assert project.call(*words).status == 0
    assert len(project.received()) == 3


def test_without_the_folder_of_graphs_nothing_is_keyed(project: NeuronProject) -> None:
    config = project.write_xla()
    shutil.rmtree(project.root / "graphs")
    units = project.call("plan", config, "--json").document["units"]
    assert {one["status"] for one in units} == {"unresolved"}
    assert all("is not here, and its graphs are in the keys" in one["reason"] for one in units)
    assert project.call("compile", config).status == 2


@pytest.mark.parametrize(
    ("version", "found"),
    [
        ("2.28.7631.0rc1", "2.28.7631.0rc1+5b7a0f21 is installed"),
        ("unknown", "neuronx-cc, which does not say its version, is installed"),
    ],
)
def test_a_compiler_whose_version_is_another_or_not_said_is_not_the_planned_one(
    project: NeuronProject, version: str, found: str
) -> None:
    standin.order(project.tools, version=version)
    error = project.call("compile", project.write_xla(), "--json").error["message"]
    assert found in error
    assert "none is installed" not in error


def test_a_worker_refuses_another_compiler_than_its_recipe_names(
    project: NeuronProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit = reference_unit(project)
    monkeypatch.setenv("PATH", project.environment["PATH"])
    recipe = json.loads(json.dumps(unit.recipe))
    recipe["toolchain"]["versions"]["neuronx-cc"] = "2.27.5334.0"
    with pytest.raises(ToolchainRefusal, match=r"2\.27\.5334\.0 is planned, 2\.28\.7631\.0\+5b"):
        compiled(Unit(unit.config, unit.shape, recipe, unit.key), project)
    assert project.received() == []


def reference_unit(project: NeuronProject, **toolchain: Any) -> Unit:
    """A unit of the native route; its config pins no more than the compiler that is on PATH."""
    name = project.write("native.yaml", toolchain={**REFERENCE, **toolchain})
    config = load_config(project.root / name)
    plan = plan_config(config, NeuronxToolchain(), DirectoryStore(project.cache))
    planned = plan.units[0]
    assert planned.recipe is not None
    assert planned.key is not None
    recipe = json.loads(json.dumps(planned.recipe))
    # The capture's tools are of the environment with torch-mlir.
    for tool in ("torch", "torch-mlir"):
        del recipe["toolchain"]["versions"][tool]
    return Unit(config, planned.shape, recipe, planned.key)


def compiled(unit: Unit, project: NeuronProject) -> Any:
    scratch = project.root / "tmp" / f"{unit.key[:16]}-1"
    scratch.mkdir()
    captured = Captured(hashlib.sha256(MODULE).hexdigest(), SimpleNamespace(module=MODULE))
    return NeuronxToolchain().compile(unit, captured, scratch)


def test_the_native_route_compiles_a_module(
    project: NeuronProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit = reference_unit(project, flags=["--enable-saturate-infinity", "-lnc", "1"])
    monkeypatch.setenv("PATH", project.environment["PATH"])
    artifact = compiled(unit, project)
    (one,) = project.received()
    assert " ".join(one["words"]) == (
        "compile module.mlir --framework XLA --target trn2 --lnc 1 -O2 --model-type transformer "
        "--auto-cast=none --enable-saturate-infinity --output module.neff"
    )
    assert one["graph"] == hashlib.sha256(MODULE).hexdigest()
    assert list(artifact.files) == ["module.neff"]
    neff = read_neff_file(artifact.files["module.neff"])
    assert neff.header.lnc_size == 1
    assert artifact.statistics["command"][1:] == one["words"]
    assert not any(os.sep in word for word in artifact.statistics["command"])
    # The compiler's scratch tree is where it belongs.
    assert len(list((project.root / "tmp").glob("*/neuronx-cc/neuronxcc-*"))) == 1


def test_the_native_route_believes_the_neff_and_not_the_status(
    project: NeuronProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit = reference_unit(project)
    monkeypatch.setenv("PATH", project.environment["PATH"])
    standin.order(project.tools, any="half")
    with pytest.raises(CompilerFailure, match=r"exit code 0, but module\.neff is no whole NEFF"):
        compiled(unit, project)


def test_explain_names_the_flag_that_differs(project: NeuronProject) -> None:
    plain, changed = project.write_xla("a.yaml"), project.write_xla("b.yaml", ["-O2", "--new=x"])
    ran = project.call("explain", plain, UNITS[0], changed, "--json")
    flags = {one["path"]: (one["unit"], one["other"]) for one in ran.document["differences"]}
    assert flags == {
        "toolchain.flags.--optlevel": ("1", "2"),
        "toolchain.flags.--new": ("(absent)", "x"),
    }
    assert (
        'toolchain.flags.--optlevel: "1" → "2"'
        in project.call("explain", plain, UNITS[0], changed).out
    )


def test_graphs_that_are_missing_or_none_are_named(project: NeuronProject) -> None:
    config = project.write_xla()
    (project.root / "graphs" / UNITS[0] / "graph.hlo").unlink()
    (project.root / "graphs" / UNITS[1] / "graph.hlo").write_text("HloModule text")
    flat = project.root / "graphs" / f"{UNITS[2]}.hlo"
    (project.root / "graphs" / UNITS[2] / "graph.hlo").rename(flat)
    ran = project.run("compile", config, "--json")
    results = {unit["bucket_name"]: unit for unit in ran.document["units"]}
    assert results[UNITS[0]]["cause_kind"] == results[UNITS[1]]["cause_kind"] == "refused"
    assert f"has no graph for {UNITS[0]}" in results[UNITS[0]]["cause"]
    assert "is no HloModuleProto" in results[UNITS[1]]["cause"]
    assert results[UNITS[2]]["outcome"] == "built"


REFUSALS = [
    ({"engine": ...}, "graphs of the route native"),
    ({"phases": ...}, "the reference decoder has no prefill programs: set toolchain.phases"),
    ({"hlo_dir": "graphs"}, "toolchain.hlo_dir holds graphs of vLLM Neuron's"),
    ({"target": ...}, "toolchain.target is not set; allowed: trn1"),
]


@pytest.mark.parametrize(("change", "why"), REFUSALS)
def test_what_cannot_be_built_is_refused_before_the_farm(
    project: NeuronProject, change: dict[str, Any], why: str
) -> None:
    toolchain = {k: v for k, v in {**REFERENCE, **change}.items() if v is not ...}
    if "engine" not in toolchain:
        toolchain = {**neuron_project.NATIVE}
    config = project.write("c.yaml", toolchain=toolchain, num_gpu_blocks_override=600)
    ran = project.call("compile", config, "--json")
    assert ran.status == 2
    assert why in ran.error["message"]


def test_the_reference_decoder_is_of_one_rank(project: NeuronProject) -> None:
    config = project.write("c.yaml", toolchain=REFERENCE, tensor_parallel_size=2)
    assert project.call("plan", config, "--json").document["counts"]["units"] == 6
    assert "one rank only" in project.call("compile", config, "--json").error["message"]


def test_neffs_are_not_run_here(tmp_path: Path) -> None:
    (tmp_path / "module.neff").write_bytes(neffs.make_neff())
    with pytest.raises(ToolchainRefusal, match="Neuron's runtime and a Neuron device"):
        NeuronxToolchain().load(tmp_path, {})


def test_a_host_is_suited_by_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = {"target": "trn2", "versions": {"nki": "0.7.0"}}
    fit = NeuronxToolchain().fit
    assert fit(platform).refusal is None
    assert fit({**platform, "target": "trn2+lnc1"}).rank < fit(platform).rank
    for installed, refusal in (
        ("0.7.0+1a2b", None),
        ("0.6.0", "nki 0.6.0 is installed here"),
    ):
        with monkeypatch.context() as here:
            here.setattr(hosts, "installed_versions", lambda _, nki=installed: {"nki": nki})
            assert fit(platform).refusal == refusal
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    assert fit({**platform, "target": "trn2+lnc1"}).refusal is None
    assert fit(platform).refusal == "NEURON_LOGICAL_NC_CONFIG is 1 here, and it is for 2"
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn3")
    assert fit(platform).refusal == "NEURON_PLATFORM_TARGET_OVERRIDE is trn3 here"
    assert fit({"target": "x86-64"}).refusal == "its target is 'x86-64'"
