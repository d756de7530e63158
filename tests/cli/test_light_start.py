"""What the command line does not cost: torch, seconds, or a compile that is there already."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli_samples import INDUCTOR, Project

from neffbuild.cache.catalog import commit_entry, record_files
from neffbuild.cache.directory import DirectoryStore
from neffbuild.cache.entry import Entry
from neffbuild.config.load import load_config
from neffbuild.toolchain.planning import plan_config
from neffbuild.toolchain.registry import load_toolchain

HEAVY = {"torch", "boto3", "ray", "vllm", "numpy", "transformers"}
PROBE = """
import json, sys
from neffbuild.cli.main import main
try:
    main()
finally:
    loaded = sorted({name.partition(".")[0] for name in sys.modules})
    open(sys.argv[0], "w").write(json.dumps(loaded))
"""


def modules_of(project: Project, *words: str) -> tuple[set[str], str]:
    """Top-level modules in a process that ran `neffbuild WORDS`, and what it printed."""
    answer = project.root / "modules.json"
    code = f"import sys; sys.argv[0] = {str(answer)!r}\n{PROBE}"
    completed = subprocess.run(
        [sys.executable, "-P", "-c", code, *words],
        cwd=project.root,
        env=project.environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert completed.returncode == 0, completed.stderr
    return set(json.loads(answer.read_text())), completed.stdout


def cpu_seconds(project: Project, *words: str) -> float:
    """User and system time of one command."""
    with project.start(*words, stdout=subprocess.DEVNULL) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_utime + usage.ru_stime


@pytest.fixture
def large(project: Project) -> str:
    """A config of 10,000 units: 100 batch buckets × 100 context buckets."""
    lists = {
        "num_seqs_buckets": list(range(1, 101)),
        "decode_context_length_buckets": [128 * number for number in range(1, 100)],
    }
    return project.write(
        toolchain=INDUCTOR,
        max_model_len=16384,
        max_num_seqs=100,
        additional_config={"neuron_config": lists},
    )


@pytest.mark.parametrize("words", [["--help"], ["plan", "--help"], ["--version"]])
def test_help_imports_nothing_heavy(project: Project, words: list[str]) -> None:
    loaded, shown = modules_of(project, *words)
    assert shown
    assert not loaded & (HEAVY | {"pydantic", "rich", "yaml"})


@pytest.mark.parametrize(
    "command", ["plan", "plan --json", "report", "verify", "explain", "doctor"]
)
def test_planning_commands_import_nothing_heavy(
    complete: tuple[Project, int], command: str
) -> None:
    project, _ = complete
    name, *options = command.split()
    config = [] if name == "doctor" else ["config.yaml"]
    unit = ["decode_b1_ctx1024"] if name == "explain" else []
    loaded, _ = modules_of(project, name, *config, *unit, *options)
    assert "neffbuild" in loaded
    assert not loaded & HEAVY


@pytest.fixture
def complete(project: Project) -> tuple[Project, int]:
    """A config of the inductor toolchain whose every unit is in the cache, without a compiler."""
    config = load_config(project.root / project.write(toolchain=INDUCTOR, dtype="float32"))
    store = DirectoryStore(project.cache)
    plan = plan_config(config, load_toolchain("inductor"), store)
    program = project.root / "program.so"
    program.write_bytes(b"program")
    for unit in plan.units:
        assert unit.recipe is not None
        files = {"program.so": program}
        entry = Entry(unit.recipe, record_files(files), "0" * 64, "1" * 64)
        commit_entry(store, entry, files)
    return project, len(plan.units)


def test_a_second_compile_does_nothing_and_imports_no_torch(complete: tuple[Project, int]) -> None:
    project, units = complete
    loaded, shown = modules_of(project, "compile", "config.yaml")
    assert shown == f"nothing to do: all {units} units are cached in {project.cache}\n"
    assert not loaded & HEAVY
    # It leaves the manifest that serving processes look for, and a third one has nothing to write.
    manifests = list((project.cache / "v1/manifests").iterdir())
    assert len(manifests) == 1

    def files() -> dict[Path, int]:
        found = (path for path in project.cache.rglob("*") if path.is_file())
        return {path: path.stat().st_mtime_ns for path in found}

    written = files()
    modules_of(project, "compile", "config.yaml")
    assert files() == written


def test_help_costs_little(project: Project) -> None:
    assert any(cpu_seconds(project, "--help") < 0.4 for _ in range(3))


@pytest.mark.parametrize("options", [[], ["--json"]], ids=["text", "json"])
def test_a_plan_of_ten_thousand_units_takes_no_longer_than_a_glance(
    project: Project, large: str, options: list[str]
) -> None:
    assert "\n10000 units (10000 target): " in project.run("plan", large).out
    # 0.8 on a machine of its own; beside other work the same instructions take longer.
    assert any(cpu_seconds(project, "plan", large, *options) < 1.6 for _ in range(3))
