"""Engine torch-neuronx, from a plan to TorchNeuron's own cache, with a stand-in TorchNeuron installed and a
stand-in neuronx-cc on PATH."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import standin
from cli_samples import MODEL, Project

from neffbuild.toolchain.neuronx.command import compiler_variables

pytest.importorskip("torch")

PLUGIN = Path(__file__).parent / "plugin"
PINNED = {
    "neuronx-cc": f"{standin.VERSION}+{standin.BUILD}",
    "torch": version("torch").partition("+")[0],
    "torch-neuronx": "2.13.3.0.1",
}
ENGINE: Mapping[str, Any] = {
    "name": "neuronx",
    "engine": "torch-neuronx",
    "target": "trn2",
    "phases": "decode",
}
TINY = {
    **MODEL,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "tie_word_embeddings": True,
}
UNITS = ["decode_b1_ctx1024", "decode_b1_ctx4096"]
BLOCKS = 40


class TorchProject(Project):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.tools = root / "tools"
        standin.install(self.tools)
        self.environment["PATH"] = f"{self.tools}:{self.environment['PATH']}"
        self.environment["PYTHONPATH"] = str(PLUGIN)
        (root / "model" / "config.json").write_text(json.dumps(TINY))

    def configure(self, *, contexts: tuple[int, ...] = (1024,), **toolchain: Any) -> str:
        return self.write(
            toolchain={**ENGINE, **toolchain},
            sections={"farm": {"retries": 0, "memory": 1 << 30}},
            max_num_seqs=1,
            num_gpu_blocks_override=BLOCKS,
            additional_config={"neuron_config": {"decode_context_length_buckets": [*contexts]}},
        )

    def order(self, faults: Mapping[int, str]) -> None:
        """Columns of a unit's block table → how TorchNeuron misbehaves on its step."""
        (self.tools / "torch_neuronx.json").write_text(json.dumps(faults))

    def asked(self) -> list[dict[str, Any]]:
        """What TorchNeuron's backend was called with."""
        path = self.tools / "torch_neuronx.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def project(tmp_path: Path) -> TorchProject:
    return TorchProject(tmp_path)


def test_what_torch_neuronx_compiles_is_in_its_cache_on_a_serving_machine(
    project: TorchProject,
) -> None:
    config = project.configure(flags=["--enable-saturate-infinity", "-O1"])
    # As they are installed, which is not seen from this process.
    assert project.run("plan", config, "--json").document["toolchain"]["versions"] == PINNED
    config = project.configure(versions=PINNED, flags=["--enable-saturate-infinity", "-O1"])
    plan = project.run("plan", config, "--json").document
    assert [unit["bucket_name"] for unit in plan["units"]] == UNITS
    assert {unit["needs"] for unit in plan["units"]} == {None}
    assert plan["toolchain"]["engine"] == "torch-neuronx"
    ran = project.run("compile", config, "--json")
    assert ran.status == 0, ran
    for asked in project.asked():
        told = asked["environment"]
        folder = asked["folder"]
        assert {name: value.replace(folder, "") for name, value in told.items()} == {
            "NEURON_CC_FLAGS": "--enable-saturate-infinity",
            "NEURON_COMPILER_OPT_LEVEL": "-O1",
            "NEURON_LOGICAL_NC_CONFIG": "2",
            "NEURON_PLATFORM_TARGET_OVERRIDE": "trn2",
            "TORCH_NEURONX_COMPILE_ONLY": "1",
            "TORCH_NEURONX_DEBUG_DIR": "/debug",
            "TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION": "1",
            "TORCH_NEURONX_NEFF_CACHE_DIR": "/neffs",
            "TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR": "/local",
        }
        assert asked["inputs"].count([BLOCKS, 32, 2, 4]) == 2
        assert asked["inputs"].count([TINY["vocab_size"], 64]) == 1
    widths = [[1, 32], [1, 128]]
    assert (
        sorted(width for asked in project.asked() for width in widths if width in asked["inputs"])
        == widths
    )
    # One program a unit, and no operator on the way to it.
    assert len(standin.received(project.tools)) == len(UNITS)

    remote, other = str(project.root / "remote"), str(project.root / "other")
    assert project.call("push", config, "--to", remote, "--tag", "m:1").status == 0
    serving = project.root / "serving"
    into = ["--layout", "torch-neuronx", "--into", str(serving)]
    pulled = project.call("pull", remote, "--tag", "m:1", "--cache", other, *into, "--json")
    assert pulled.status == 0, pulled
    placed = sorted(path.relative_to(serving) for path in serving.rglob("*") if path.is_file())
    assert len(placed) == len(UNITS)
    contents = set()
    for path in (project.cache / "v1" / "entries").glob("*/*.json"):
        entry = json.loads(path.read_text())
        [key] = entry["statistics"]["engine_keys"]
        place = f"{key[:2]}/{key[2:4]}/{key}.neff"
        assert Path(place) in placed
        assert list(entry["files"]) == [f"engine/torch-neuronx/{place}", "module.neff"]
        assert len({file["digest"] for file in entry["files"].values()}) == 1
        assert entry["statistics"]["neff"]["build_version"] == standin.VERSION
        told = entry["statistics"]["engine_environment"]
        assert told["NEURON_COMPILER_OPT_LEVEL"] == "-O1"
        assert str(project.root) not in json.dumps(entry)
        contents.add((serving / place).read_bytes())
    assert len(contents) == len(UNITS)
    # A serving process is told what the compiles were.
    env = project.call("env", config, "--root", str(serving), "--cache", other, "--json")
    assert (env.status, env.document["check"]["hits"]) == (0, len(UNITS)), env
    settings = {one["name"]: one["value"] for one in env.document["settings"]}
    assert told.items() <= settings.items()
    assert project.call("verify", config, "--cache", other, "--json").document["ok"]
    assert project.call("compile", config).out.startswith("nothing to do: all 2 units")


def test_flags_that_torch_neuronx_gives_anyway_are_not_in_its_key() -> None:
    stated = ["--auto-cast=none", "--lnc=1", "--model-type=transformer", "--optlevel=2"]
    assert compiler_variables({"target": "trn2+lnc1", "flags": stated}) == {
        "NEURON_PLATFORM_TARGET_OVERRIDE": "trn2",
        "NEURON_LOGICAL_NC_CONFIG": "1",
        "NEURON_COMPILER_OPT_LEVEL": "-O2",
    }
    flags = ["--auto-cast=all", "--lnc=2", "--optlevel=1", "--internal-x=-a -b"]
    told = compiler_variables({"target": "trn3", "flags": flags})
    assert told["NEURON_CC_FLAGS"] == "--auto-cast=all '--internal-x=-a -b'"


FAULTS = {
    "nothing": ("compiler_error", "TorchNeuron ended well and has filed no NEFF"),
    "eager": ("compiler_error", "TorchNeuron has filed 3 NEFFs for one step"),
    "half": ("compiler_error", "is no whole NEFF"),
    "raise": ("compiler_error", "TorchNeuron ended with exit code 1: "),
    "killed": ("out_of_memory", "TorchNeuron was killed"),
    "EVRF009": ("compiler_error", "NCC_EVRF009: the graph's tensors do not fit"),
}


_FIRST = ["nothing", "half"]
_OTHERS = [fault for fault in FAULTS if fault not in _FIRST]


@pytest.mark.parametrize("faults", [_FIRST, pytest.param(_OTHERS, marks=pytest.mark.slow)])
def test_anything_but_one_whole_neff_is_a_failure(project: TorchProject, faults: list[str]) -> None:
    contexts = [*(512 * number for number in range(1, len(faults))), 4096]
    project.order({context // 32: fault for context, fault in zip(contexts, faults, strict=True)})
    standin.order(project.tools, EVRF009="EVRF009")
    ran = project.run("compile", project.configure(contexts=tuple(contexts[:-1])), "--json")
    assert ran.status == 1, ran
    causes = {
        unit["bucket_name"]: (unit["cause_kind"], unit["cause"]) for unit in ran.document["units"]
    }
    assert len(causes) == len(faults)
    for context, fault in zip(contexts, faults, strict=True):
        kind, said = FAULTS[fault]
        found, cause = causes[f"decode_b1_ctx{context}"]
        assert (found, said in cause) == (kind, True), cause
    assert not list((project.cache / "v1").glob("entries/*/*.json"))


def test_a_host_without_it_plans_and_does_not_compile(project: TorchProject) -> None:
    project.environment["PYTHONPATH"] = ""
    config = project.configure(versions=PINNED)
    plan = project.run("plan", config, "--json")
    assert plan.status == 0
    assert plan.document["refusal"] is None
    ran = project.run("compile", config, "--json")
    assert ran.status == 2
    assert "install the version that is planned" in ran.error["message"]
    assert project.asked() == []
    assert standin.received(project.tools) == []


def test_another_version_than_planned_is_refused(project: TorchProject) -> None:
    config = project.configure(versions={"torch-neuronx": "2.14.3.0.1"})
    ran = project.run("compile", config, "--json")
    assert ran.status == 2
    assert "torch-neuronx 2.14.3.0.1 is planned, 2.13.3.0.1 is installed" in ran.error["message"]


def test_the_compilers_version_is_in_the_key(project: TorchProject) -> None:
    """It is not in TorchNeuron's own."""
    ours = project.keys(project.configure(versions=PINNED))
    later = {**PINNED, "neuronx-cc": "2.29.0.0"}
    assert not set(ours) & set(project.keys(project.configure(versions=later)))


@pytest.mark.parametrize(
    ("toolchain", "said"),
    [
        ({"target": "inf2"}, "compiles for trn2 and trn3 only, and toolchain.target is inf2"),
        ({"hlo_dir": "graphs"}, "toolchain.engine is torch-neuronx: leave one of them out"),
        ({"phases": "both"}, "no prefill programs: set toolchain.phases to decode"),
    ],
)
def test_what_it_cannot_build_is_refused_with_the_reason(
    project: TorchProject, toolchain: dict[str, Any], said: str
) -> None:
    config = project.configure(versions=PINNED, **toolchain)
    assert said in project.call("plan", config, "--json").document["refusal"]
