"""The real neuronx-cc, held to what the stand-in is: its version, its command line, its NEFFs, its errors.

Needs neuronx-cc on PATH and, for the graphs, `neffbuild[neuron]` in this environment; no device.
`NEURON_TEST_TARGET` names the chip (trn2 by default).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from cli_samples import MODEL, Project, Ran

from neffbuild.cache.catalog import Hit, read_entry
from neffbuild.cache.directory import DirectoryStore
from neffbuild.toolchain.neuronx.neff import Neff, read_neff_file
from neffbuild.toolchain.neuronx.versions import compiler_version

TARGET = os.environ.get("NEURON_TEST_TARGET", "trn2")
_SMALL = {**MODEL, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def compiled(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, Ran, Ran]:
    """A project of the reference decoder, one compile of it, and another into another cache."""
    pytest.importorskip("torch_mlir", reason="needs `pip install 'neffbuild[neuron]'`")
    project = Project(tmp_path_factory.mktemp("neuron"))
    project.environment["PATH"] = os.environ["PATH"]
    (project.root / "model" / "config.json").write_text(json.dumps(_SMALL))
    config = write(project, "config.yaml")
    other = str(project.root / "again")
    first = _compile(project, config)
    return project, first, _compile(project, config, "--cache", other)


def write(project: Project, name: str, *flags: str, engine: str = "reference") -> str:
    return project.write(
        name,
        toolchain={
            "name": "neuronx",
            "engine": engine,
            "target": TARGET,
            "phases": "decode",
            "flags": list(flags),
        },
        max_num_seqs=1,
        max_model_len=1024,
        additional_config={"neuron_config": {"decode_context_length_buckets": [256]}},
    )


def _compile(project: Project, *words: str) -> Ran:
    with project.start("compile", *words, "--json", "--workers", "1") as process:
        out, err = process.communicate(timeout=4 * 3600)
    return Ran(process.returncode, out.decode(), err.decode())


def neffs_of(project: Project, cache: Path) -> dict[str, Neff]:
    store = DirectoryStore(cache)
    found = {}
    for unit in project.call("plan", "config.yaml", "--cache", str(cache), "--json").document[
        "units"
    ]:
        hit = read_entry(store, unit["key"])
        assert isinstance(hit, Hit)
        path = store.blob_path(hit.entry.files["module.neff"].digest)
        found[unit["bucket_name"]] = read_neff_file(path)
    return found


def test_the_compiler_says_its_version(compiler: str) -> None:
    assert compiler_version() is not None, "`neuronx-cc --version` is not understood"


def test_the_compiler_knows_every_flag_we_give_it(compiler: str) -> None:
    said = subprocess.run([compiler, "compile", "--help"], capture_output=True, text=True)
    text = said.stdout + said.stderr
    for flag in (
        "--framework",
        "--target",
        "--model-type",
        "--auto-cast",
        "--optlevel",
        "--output",
    ):
        assert flag in text, flag


def test_a_grid_is_compiled_to_neffs_that_the_reader_takes(
    compiled: tuple[Project, Ran, Ran],
) -> None:
    project, ran, _ = compiled
    assert ran.status == 0, ran
    found = neffs_of(project, project.cache)
    assert set(found) == {"decode_b1_ctx256", "decode_b1_ctx1024"}
    for neff in found.values():
        assert any(member.name.endswith("info.json") for member in neff.members)
        assert neff.header.build_version
    assert project.call("verify", "config.yaml", "--json").document["ok"]


def test_what_two_compiles_of_one_unit_differ_in_is_shown(
    compiled: tuple[Project, Ran, Ran], record_property: object
) -> None:
    """Published sources disagree on whether NEFFs are reproducible: members and sizes must agree, and
    whether the payload does is printed for whoever runs this."""
    project, _, again = compiled
    assert again.status == 0, again
    first, second = (neffs_of(project, cache) for cache in (project.cache, project.root / "again"))
    for name, neff in first.items():
        assert [m.name for m in neff.members] == [m.name for m in second[name].members]
        record_property(  # type: ignore[operator]
            f"{name} payload identical", neff.header.digest == second[name].header.digest
        )


def test_a_bad_flag_is_the_compilers_to_refuse(compiled: tuple[Project, Ran, Ran]) -> None:
    project, _, _ = compiled
    ran = _compile(project, write(project, "bad.yaml", "--never-heard-of-in-any-release=1"))
    assert ran.status == 1
    assert {unit["cause_kind"] for unit in ran.document["units"]} == {"compiler_error"}


def test_the_neuron_packager_reads_what_the_reader_reads(
    compiled: tuple[Project, Ran, Ran],
) -> None:
    packager = shutil.which("neuron-packager")
    if packager is None:
        pytest.skip("no neuron-packager on PATH: install aws-neuronx-tools")
    project, _, _ = compiled
    store = DirectoryStore(project.cache)
    unit = project.call("plan", "config.yaml", "--json").document["units"][0]
    hit = read_entry(store, unit["key"])
    assert isinstance(hit, Hit)
    neff = project.root / "module.neff"
    shutil.copyfile(store.blob_path(hit.entry.files["module.neff"].digest), neff)
    said = subprocess.run([packager, "info", str(neff)], capture_output=True, text=True)
    assert said.returncode == 0, said
    read = read_neff_file(neff)
    assert read.header.uuid in said.stdout.replace(
        "-", ""
    ).lower() or read.header.build_version in (said.stdout)


def test_the_runtime_loads_a_neff(compiled: tuple[Project, Ran, Ran], device: Path) -> None:
    bench = shutil.which("neuron-bench")
    if bench is None:
        pytest.skip("no neuron-bench on PATH: install aws-neuronx-tools")
    project, _, _ = compiled
    store = DirectoryStore(project.cache)
    for unit in project.call("plan", "config.yaml", "--json").document["units"]:
        hit = read_entry(store, unit["key"])
        assert isinstance(hit, Hit)
        neff = project.root / f"{unit['bucket_name']}.neff"
        shutil.copyfile(store.blob_path(hit.entry.files["module.neff"].digest), neff)
        said = subprocess.run(
            [bench, "exec", "-n", "2", "-w", "1", "--fixed-nc-count=1", str(neff)],
            capture_output=True,
            text=True,
        )
        assert said.returncode == 0, said


def test_torch_neuronx_files_the_neff_of_a_step_as_published(compiler: str, tmp_path: Path) -> None:
    """Engine torch-neuronx in its compile-only mode, and its cache where it was pulled to."""
    pytest.importorskip("torch_neuronx", reason="needs TorchNeuron (torch-neuronx 2.13 or later)")
    project = Project(tmp_path)
    project.environment["PATH"] = os.environ["PATH"]
    (project.root / "model" / "config.json").write_text(json.dumps(_SMALL))
    config = write(project, "config.yaml", engine="torch-neuronx")
    ran = _compile(project, config)
    assert ran.status == 0, ran
    remote, serving = str(tmp_path / "remote"), tmp_path / "serving"
    assert project.run("push", config, "--to", remote, "--tag", "m:1").status == 0
    into = ["--layout", "torch-neuronx", "--into", str(serving)]
    assert project.run("pull", remote, "--tag", "m:1", *into).status == 0
    assert len(list(serving.glob("??/??/*.neff"))) == len(neffs_of(project, project.cache))
