"""Plans of the neuronx toolchain, from the command line."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cli_samples import EAGLE3
from neuron_project import BLOCKS, NATIVE, REFERENCE, NeuronProject

PROBE = """
import json, sys
from neffbuild.cli.main import main
try:
    main()
finally:
    json.dump(sorted(sys.modules), open("modules.json", "w"))
"""


@pytest.mark.parametrize("toolchain", [NATIVE, REFERENCE], ids=["vllm-neuron", "reference"])
@pytest.mark.parametrize("command", ["plan", "compile"])
def test_neither_plan_nor_refusal_imports_torch(
    project: NeuronProject, toolchain: dict[str, object], command: str
) -> None:
    config = project.write(toolchain=toolchain, num_gpu_blocks_override=BLOCKS)
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROBE, command, config],
        cwd=project.root,
        env=project.environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == (0 if command == "plan" else 2), done
    loaded = {
        name.partition(".")[0] for name in json.loads((project.root / "modules.json").read_text())
    }
    assert "neffbuild" in loaded
    assert not loaded & {"torch", "numpy", "torch_mlir", "boto3", "ray", "vllm"}


def test_a_plan_needs_no_compiler_where_versions_are_pinned(project: NeuronProject) -> None:
    (project.tools / "neuronx-cc").unlink()
    config = project.write(toolchain=NATIVE, num_gpu_blocks_override=BLOCKS)
    plan = project.call("plan", config, "--json").document
    assert plan["counts"]["unresolved"] == 0
    assert plan["toolchain"]["versions"] == NATIVE["versions"]


def test_the_compiler_on_path_is_asked_where_it_is_not_pinned(project: NeuronProject) -> None:
    versions = {tool: v for tool, v in NATIVE["versions"].items() if tool != "neuronx-cc"}
    config = project.write(
        toolchain={**NATIVE, "versions": versions}, num_gpu_blocks_override=BLOCKS
    )
    pinned = project.write(
        "pinned.yaml",
        toolchain={**NATIVE, "versions": {**versions, "neuronx-cc": "2.28.7631.0+5b7a0f21"}},
        num_gpu_blocks_override=BLOCKS,
    )
    assert project.keys(config) == project.keys(pinned)
    project.environment["PATH"] = "/usr/bin:/bin"
    unresolved = project.call("plan", config, "--json").document
    assert unresolved["counts"]["unresolved"] == unresolved["counts"]["units"]
    assert "pin toolchain.versions.neuronx-cc" in unresolved["units"][0]["reason"]
    bare = project.write("bare.yaml", toolchain={"name": "neuronx", "target": "trn2"})
    assert project.call("plan", bare).out.startswith("model: neuronx for trn2\n")


def test_the_same_build_has_the_same_keys_in_another_environment(project: NeuronProject) -> None:
    config = project.write(
        toolchain={**NATIVE, "flags": ["-O1", "--auto-cast", "all"]}, num_gpu_blocks_override=BLOCKS
    )
    other = project.write("other.yaml", toolchain=NATIVE, num_gpu_blocks_override=BLOCKS)
    said = {"NEURON_CC_FLAGS": "--auto-cast=all", "NEURON_COMPILER_OPT_LEVEL": "-O1"}
    assert project.keys(config) == project.keys(other, env=said)
    assert project.keys(config) != project.keys(other)


def test_a_contradiction_is_a_mistake_of_the_config(project: NeuronProject) -> None:
    config = project.write(toolchain=NATIVE, num_gpu_blocks_override=BLOCKS)
    ran = project.run("plan", config, "--json", env={"NEURON_PLATFORM_TARGET_OVERRIDE": "trn1"})
    assert ran.status == 2
    assert ran.error["field"] == "toolchain.target"
    assert "NEURON_PLATFORM_TARGET_OVERRIDE says trn1" in ran.error["message"]


def test_doctor_says_what_is_missing(project: NeuronProject) -> None:
    def findings() -> dict[str, dict[str, object]]:
        toolchains = project.call("doctor", "--json").document["toolchains"]
        (found,) = (one for one in toolchains if one["name"] == "neuronx")
        assert found["ok"] is found["findings"][0]["ok"]
        return {one["subject"]: one for one in found["findings"]}

    found = findings()["neuronx-cc"]
    assert found["ok"]
    assert str(found["detail"]).startswith("2.28.7631.0+5b7a0f21, ")
    (project.tools / "neuronx-cc").unlink()
    found = findings()["neuronx-cc"]
    assert not found["ok"]
    assert found["detail"] == "not on PATH"


def test_doctor_says_which_packages_of_engines_are_installed(project: NeuronProject) -> None:
    plugin = Path(__file__).parents[1] / "neuron_torch" / "plugin"

    def findings(**env: str) -> dict[str, dict[str, object]]:
        toolchains = project.run("doctor", "--json", env=env).document["toolchains"]
        (found,) = (one for one in toolchains if one["name"] == "neuronx")
        assert found["ok"], "none of them is needed"
        return {one["subject"]: one for one in found["findings"]}

    found = findings()
    for tool in ("vllm-neuron", "torch-neuronx", "nki", "libtorch-neuronx-lite"):
        assert not found[tool]["ok"]
        assert str(found[tool]["detail"]).startswith("not installed: ")
        assert f"toolchain.versions.{tool}" in str(found[tool]["hint"])
    assert "engine torch-neuronx compiles where it is" in str(found["torch-neuronx"]["detail"])
    found = findings(PYTHONPATH=str(plugin))
    assert (found["torch-neuronx"]["ok"], found["torch-neuronx"]["detail"]) == (True, "2.13.3.0.1")
    assert not found["vllm-neuron"]["ok"]


def test_long_compiles_are_expected_to_be_long(project: NeuronProject) -> None:
    """From what was published: 46 seconds to 30 minutes, 10.6 to 30 GB, the longest first."""
    from neffbuild.config.load import load_config
    from neffbuild.grid.shapes import DecodeShape, Family, PrefillShape
    from neffbuild.toolchain.neuronx import NeuronxToolchain

    config = load_config(project.root / project.write(toolchain=REFERENCE))
    shapes = [
        DecodeShape(Family.TARGET, 1, 1, 128),
        DecodeShape(Family.TARGET, 8, 1, 4096),
        PrefillShape(Family.PREFILL, 2048, 2048),
    ]
    expected = [NeuronxToolchain().prior(config, shape) for shape in shapes]
    seconds = [one.seconds for one in expected]
    memory = [one.memory_bytes for one in expected]
    assert seconds == sorted(seconds)
    assert (seconds[0], seconds[-1]) == (46.0, 1800.0)
    assert (min(memory), max(memory)) == (int(10.6e9), int(30e9))


@pytest.mark.parametrize(
    ("serve", "why"),
    [
        ({"tensor_parallel_size": 2}, "one rank only: tensor_parallel_size is 2"),
        ({"quantization": "fp8"}, "unquantised models only: quantization is 'fp8'"),
        ({"dtype": "float16"}, "runs float32 and bfloat16 models: dtype is 'float16'"),
        (
            {"speculative_config": {**EAGLE3, "quantization": "fp8"}},
            "has no draft with speculative_config.quantization: it is 'fp8'",
        ),
    ],
)
def test_what_the_reference_decoder_does_not_compute_is_planned_and_refused(
    project: NeuronProject, serve: dict[str, object], why: str
) -> None:
    config = project.write(toolchain=REFERENCE, **serve)
    plan = project.call("plan", config, "--json")
    assert plan.status == 0
    assert why in plan.document["refusal"]
    assert why in project.call("compile", config, "--json").error["message"]


@pytest.mark.parametrize(
    ("toolchain", "columns"), [(NATIVE, 8), (REFERENCE, 6)], ids=["vllm-neuron", "reference"]
)
def test_tables_of_sliding_windows_are_as_wide_as_the_engines(
    project: NeuronProject, toolchain: dict[str, object], columns: int
) -> None:
    """vLLM Neuron reads whole tiles of 128 positions, our own decoder the blocks that are seen."""
    model = project.root / "windowed"
    shutil.copytree(Path(__file__).parents[2] / "configs/models/quickstart-llama", model)
    document = json.loads((model / "config.json").read_text())
    windowed = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    (model / "config.json").write_text(json.dumps(document | windowed | {"sliding_window": 130}))
    config = project.write(
        toolchain=toolchain, model=str(model), block_size=32, num_gpu_blocks_override=BLOCKS
    )
    units = project.call("plan", config, "--json").document["units"]
    widths = {one["window_table_width"] for one in units if one["family"] == "target"}
    assert widths == {columns}
