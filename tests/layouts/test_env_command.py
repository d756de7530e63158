"""`neffbuild env`: the exact variables by route and generation, as a shell takes them, and the check that the
engine's cache is filled."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import foreign_trees as foreign
import pytest
from cli_samples import Project
from foreign_trees import key_of

from neffbuild.cache.layouts.engine_root import vllm_neuron_cache_root


def env(project: Project, *words: str, **toolchain: Any) -> dict[str, Any]:
    project.write(toolchain={"name": "neuronx", "target": "trn2", **toolchain})
    ran = project.call("env", "config.yaml", "--json", *words)
    assert ran.status == 0, ran
    return ran.document


def settings(document: dict[str, Any]) -> dict[str, str | None]:
    return {one["name"]: one["value"] for one in document["settings"]}


def test_the_native_route_of_2_33(project: Project) -> None:
    document = env(project)
    root = str(project.root / "home/.cache/vllm")
    assert (document["route"], document["plugin_version"]) == ("native", "0.29")
    assert settings(document) == {
        "VLLM_CACHE_ROOT": root,
        "NEURON_LIBTORCH_CACHE_ROOT": root,
        "VLLM_NEURON_BACKEND": "neuron_native",
        "VLLM_NEURON_DISABLE_WARMUP_COMPILE": "1",
        "NEURON_LIBTORCH_DISABLE_GRAPH_CAPTURE_BACKEND": "1",
        "NEURON_LIBTORCH_DISABLE_COMPILE_CACHE": None,
        "VLLM_NEURON_CPU_COMPILE": None,
        "TORCH_CACHING_PRECOMPILE": "0",
    }
    assert document["compile_cache"] == f"{root}/neuron/compile_cache"


def test_the_xla_route_by_generation(project: Project) -> None:
    of_2_32 = settings(env(project, route="xla", versions={"neuronx-cc": "2.27.5334.0"}))
    assert of_2_32["VLLM_NEURON_BACKEND"] == "vllm_neuron"
    assert "TORCH_CACHING_PRECOMPILE" not in of_2_32
    assert of_2_32["NEURON_LIBTORCH_DISABLE_GRAPH_CAPTURE_BACKEND"] == "1"
    of_0_21 = settings(env(project, route="xla", versions={"vllm-neuron": "0.21.0.1.0.0"}))
    assert of_0_21["VLLM_NEURON_DISABLE_GRAPH_CAPTURE_BACKEND"] == "1"
    assert of_0_21["VLLM_NEURON_DISABLE_COMPILE_CACHE"] is None
    assert not any(name.startswith("NEURON_LIBTORCH") for name in of_0_21)
    assert settings(env(project, "--plugin-version", "0.21", route="xla")) == of_0_21
    later = env(project, route="xla", versions={"neuronx-cc": "2.28.7631.0"})
    [backend] = [one for one in later["settings"] if one["name"] == "VLLM_NEURON_BACKEND"]
    assert backend["value"] == "vllm_neuron"
    assert not backend["verified"]


def test_the_native_route_of_0_24_says_what_it_needs_more(project: Project) -> None:
    document = env(project, versions={"neuronx-cc": "2.27.5334.0"})
    assert document["plugin_version"] == "0.24"
    assert settings(document)["VLLM_NEURON_LIBTORCH_NEURONX_LITE"] == "1"
    assert settings(document)["VLLM_NEURON_BACKEND"] == "neuron_native"


SCRATCHPAD = "--hbm-scratchpad-page-size"


@pytest.mark.parametrize(
    ("flags", "value", "words"),
    [
        ([], None, None),
        ([f"{SCRATCHPAD}=2048"], "2048", [f"{SCRATCHPAD}=2048"]),
        ([SCRATCHPAD, "1024"], "1024", [f"{SCRATCHPAD}=1024"]),
        ([f"-O1 {SCRATCHPAD} 512"], "512", [f"{SCRATCHPAD}=512", "--optlevel=1"]),
        ([f"{SCRATCHPAD}=512", f"{SCRATCHPAD}=2048"], "2048", [f"{SCRATCHPAD}=2048"]),
    ],
)
def test_the_scratchpad_page_size_goes_with_its_flag(
    project: Project, flags: list[str], value: str | None, words: list[str] | None
) -> None:
    found = settings(env(project, flags=flags))
    assert found.get("NEURON_SCRATCHPAD_PAGE_SIZE") == value
    # The engine of this route appends them to its own, so serving needs what compiling had.
    said = found.get("NEURON_CC_FLAGS")
    assert (shlex.split(said) if said else None) == words
    assert "NEURON_CC_FLAGS" not in settings(env(project, flags=flags, route="xla"))


def test_the_grouping_of_cores_goes_with_its_flag(project: Project) -> None:
    assert "NEURON_LOGICAL_NC_CONFIG" not in settings(env(project))
    for flag in ("--lnc=1", "-lnc 1", "--logical-nc-config=1"):
        assert settings(env(project, flags=[flag]))["NEURON_LOGICAL_NC_CONFIG"] == "1"


@pytest.mark.parametrize(
    "flag",
    [
        "--internal-backend-options=--enable-verifier=false --enable-nested-dynamic-loop",
        "--internal-backend-options='--enable-verifier=false --enable-nested-dynamic-loop'",
    ],
)
def test_a_flag_with_spaces_is_one_flag_for_who_splits_them(project: Project, flag: str) -> None:
    found = settings(env(project, flags=[flag, "-O1"]))["NEURON_CC_FLAGS"]
    assert shlex.split(found or "") == [
        "--optlevel=1",
        "--internal-backend-options=--enable-verifier=false --enable-nested-dynamic-loop",
    ]


def test_flags_of_this_shell_are_kept_and_repeated_calls_say_the_same(project: Project) -> None:
    project.environment |= {
        "NEURON_COMPILER_OPT_LEVEL": "3",
        "NEURON_CC_FLAGS": "-O1 --cache_dir=/c",
    }
    said = settings(env(project, flags=["--auto-cast=none"]))["NEURON_CC_FLAGS"]
    assert said == "--auto-cast=none --optlevel=1"
    project.environment["NEURON_CC_FLAGS"] = said
    assert settings(env(project, flags=["--auto-cast=none"]))["NEURON_CC_FLAGS"] == said


def test_what_this_shell_sets_and_keys_hold_is_set_for_the_engine(project: Project) -> None:
    assert "VLLM_NEURON_FUSED_SAMPLER" not in settings(env(project))
    project.environment["VLLM_NEURON_FUSED_SAMPLER"] = "1"
    document = env(project)
    assert settings(document)["VLLM_NEURON_FUSED_SAMPLER"] == "1"
    names = [one["name"] for one in document["settings"]]
    assert len(names) == len(set(names))


def test_an_engine_without_a_cache_is_not_told_with_variables(project: Project) -> None:
    project.write(toolchain={"name": "neuronx", "target": "trn2", "engine": "reference"})
    ran = project.call("env", "config.yaml", "--json")
    assert (ran.status, ran.document["error"]["field"]) == (2, "toolchain.engine")


def test_torch_neuronx(project: Project) -> None:
    document = env(project, engine="torch-neuronx")
    assert (document["engine"], document["route"]) == ("torch-neuronx", "native")
    assert document["plugin_version"] is None
    assert document["cache_root"] == document["compile_cache"] == "/tmp/neff_cache"
    assert settings(document) == {
        "TORCH_NEURONX_NEFF_CACHE_DIR": "/tmp/neff_cache",
        "TORCH_NEURONX_NEFF_DISABLE_CACHE": None,
        "TORCH_NEURONX_COMPILE_ONLY": None,
        "TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION": "1",
        "NEURON_PLATFORM_TARGET_OVERRIDE": "trn2",
        "NEURON_LOGICAL_NC_CONFIG": "2",
        "NEURON_COMPILER_OPT_LEVEL": "-O2",
        "NEURON_CC_FLAGS": None,
        "TORCH_NEURONX_COMPLEX_DECOMPOSE": None,
    }
    project.environment["TORCH_NEURONX_NEFF_CACHE_DIR"] = "/data/neffs"
    flags = [f"{SCRATCHPAD}=2048", "-O1", "--lnc=1", "--auto-cast=none", "--internal-a=1 2"]
    told = settings(env(project, engine="torch-neuronx", flags=flags))
    assert told["TORCH_NEURONX_NEFF_CACHE_DIR"] == "/data/neffs"
    assert told["NEURON_LOGICAL_NC_CONFIG"] == "1"
    assert told["NEURON_COMPILER_OPT_LEVEL"] == "-O1"
    assert told["NEURON_SCRATCHPAD_PAGE_SIZE"] == "2048"
    said = [f"{SCRATCHPAD}=2048", "--internal-a=1 2"]
    assert shlex.split(told["NEURON_CC_FLAGS"] or "") == said
    # A shell that took them says the same again.
    project.environment |= {name: value for name, value in told.items() if value is not None}
    assert settings(env(project, engine="torch-neuronx", flags=flags)) == told


def test_what_torch_neuronx_is_not_told(project: Project) -> None:
    project.write(toolchain={"name": "neuronx", "target": "trn2", "engine": "torch-neuronx"})
    ran = project.call("env", "config.yaml", "--plugin-version", "0.29", "--json")
    assert (ran.status, ran.error["field"]) == (2, "--plugin-version")
    project.write(toolchain={"name": "neuronx", "engine": "torch-neuronx"})
    ran = project.call("env", "config.yaml", "--json")
    assert (ran.status, ran.error["field"]) == (2, "toolchain.target")


def test_torch_neuronx_finds_what_is_stored_and_not_another_compilers(
    project: Project, tmp_path: Path
) -> None:
    project.write(toolchain={"name": "neuronx", "target": "trn2", "engine": "torch-neuronx"})
    foreign.torch_entry(tmp_path / "fleet", 0, build="2.28.7631.0")
    line = ("import", str(tmp_path / "fleet"), "--layout", "torch-neuronx")
    assert project.call(*line, "--config", "config.yaml").status == 0
    check = ("env", "config.yaml", "--root", str(tmp_path / "fleet"))
    ran = project.call(*check, "--json")
    assert ran.status == 0, ran
    assert ran.document["check"]["hits"] == 1
    assert ran.document["check"]["manifest"]
    foreign.torch_entry(tmp_path / "fleet", 0, build="2.27.5334.0")
    ran = project.call(*check)
    assert ran.status == 1
    assert "is another file than the one that is stored" in ran.err
    assert f"--layout torch-neuronx --into {tmp_path / 'fleet'}" in ran.err


def test_flags_that_no_plan_would_take_are_refused(project: Project) -> None:
    project.write(toolchain={"name": "neuronx", "target": "trn2", "flags": ["O1"]})
    ran = project.call("env", "config.yaml")
    assert ran.status == 2
    assert "is no flag" in ran.err


def test_a_shell_takes_it_as_it_is(project: Project, tmp_path: Path) -> None:
    root = tmp_path / "a cache; $(touch hacked) 'of ours'"
    foreign.vllm_entry(root / "neuron/compile_cache", 0)
    project.write(toolchain={"name": "neuronx", "target": "trn2"})
    ran = project.call("env", "config.yaml", "--root", str(root))
    assert ran.status == 0, ran
    script = f"export NEURON_LIBTORCH_DISABLE_COMPILE_CACHE=1\n{ran.out}\nenv"
    shown = subprocess.run(
        ["sh", "-eu"], input=script, capture_output=True, text=True, cwd=tmp_path, check=True
    ).stdout.splitlines()
    assert f"VLLM_CACHE_ROOT={root}" in shown
    assert "VLLM_NEURON_DISABLE_WARMUP_COMPILE=1" in shown
    assert not any("DISABLE_COMPILE_CACHE" in line for line in shown)
    assert not (tmp_path / "hacked").exists()
    comments = [line for line in ran.out.splitlines() if line.startswith("#")]
    assert any("BEFORE any remote cache is asked" in line for line in comments)
    assert any("not run on a Neuron device" in line for line in comments)
    line_break = project.call("env", "config.yaml", "--root", "a\ntouch hacked")
    assert line_break.status == 2
    assert "cannot be printed" in line_break.err


@pytest.fixture
def serving(project: Project, tmp_path: Path) -> Path:
    """The compile cache of a machine that pulled what was adopted for the config."""
    fleet, serving = tmp_path / "fleet", tmp_path / "vllm/neuron/compile_cache"
    for number in range(2):
        foreign.vllm_entry(fleet, number)
    # Planned by the tests' toolchain, since this one's own tools are not installed.
    for words in (
        ("import", str(fleet), "--layout", "vllm-neuron", "--config", "config.yaml"),
        ("push", "config.yaml", "--to", "remote", "--tag", "t", "--allow-partial"),
        ("pull", "remote", "--tag", "llama:t", "--allow-partial", "--cache", "node", "--layout",
         "vllm-neuron", "--into", str(serving)),
    ):  # fmt: skip
        ran = project.call(*words)
        assert ran.status == 0, ran
    return serving


def test_the_local_cache_has_to_be_filled_before_the_engine_starts(
    project: Project, serving: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neffbuild.cli.engine_env._require_engine", lambda _: None)
    words = ("env", "config.yaml", "--cache", "node", "--json", "--root")
    # Both spellings: what the variable is set to, and where the entries are.
    for root in (serving, serving.parents[1]):
        ran = project.call(*words, str(root))
        assert ran.status == 0, ran
        assert ran.document["cache_root"] == str(serving.parents[1])
        assert ran.document["check"]["ready"]
        assert ran.document["check"]["hits"] == 2
        assert ran.document["check"]["manifest"]
    (serving / key_of(1) / ".compilation_complete").unlink()
    foreign.vllm_entry(serving, 7)  # of somebody else: it makes up for nothing
    ran = project.call(*words, str(serving))
    assert ran.status == 1
    [lacking] = ran.document["check"]["lacking"]
    assert (lacking["place"], lacking["state"]) == (key_of(1), "incomplete")
    shutil.rmtree(serving)
    ran = project.call(*words, str(serving))
    assert ran.status == 1
    assert len(ran.document["check"]["lacking"]) == 2
    text = project.call(*words[:4], "--root", str(serving))
    assert text.status == 1
    assert "export VLLM_CACHE_ROOT=" in text.out
    assert "is not filled: 0 hits, 2 lacking" in text.err
    assert "--layout vllm-neuron --into" in text.err


def test_without_a_manifest_the_cache_has_to_hold_something_and_nothing_half(
    project: Project, tmp_path: Path
) -> None:
    project.write(toolchain={"name": "neuronx", "target": "trn2"})
    root = tmp_path / "vllm"
    line = ("env", "config.yaml", "--root", str(root), "--json")
    assert project.call(*line).status == 1
    foreign.vllm_entry(root / "neuron/compile_cache", 0)
    ran = project.call(*line)
    assert ran.status == 0
    assert ran.document["check"]["manifest"] is None
    foreign.vllm_entry(root / "neuron/compile_cache", 1, sentinel=None)
    assert project.call(*line).status == 1


def test_a_cache_in_a_folder_that_cannot_be_entered(project: Project, tmp_path: Path) -> None:
    (tmp_path / "closed/vllm").mkdir(parents=True)
    (tmp_path / "closed").chmod(0)
    prefix: tuple[str, ...] = ()
    if os.getuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("needs setpriv to be refused anything")
        less = "-dac_override,-dac_read_search"
        prefix = ("setpriv", f"--bounding-set={less}", f"--inh-caps={less}")
    project.write(toolchain={"name": "neuronx", "target": "trn2"})
    ran = project.run("env", "config.yaml", "--root", str(tmp_path / "closed/vllm"), prefix=prefix)
    (tmp_path / "closed").chmod(0o755)
    assert ran.status == 3, ran
    assert "Permission denied" in ran.err


def test_what_is_refused(project: Project) -> None:
    project.write(toolchain={"name": "hostile"})
    ran = project.call("env", "config.yaml")
    assert ran.status == 2
    assert "these variables are of Neuron's engines" in ran.err
    project.write(toolchain={"name": "neuronx", "route": "hlo"})
    assert "allowed: native, xla" in project.call("env", "config.yaml").err
    project.write(toolchain={"name": "neuronx"})
    ran = project.call("env", "config.yaml", "--plugin-version", "latest")
    assert ran.status == 2
    assert "is no version of vLLM Neuron" in ran.err


def test_where_the_engine_keeps_its_cache() -> None:
    def local(_: Path) -> str:
        return "ext4"

    for environment, file_system, root in (
        ({"VLLM_CACHE_ROOT": "/data/vllm", "HOME": "/home/u"}, lambda _: "nfs4", "/data/vllm"),
        ({"HOME": "/home/u"}, local, "/home/u/.cache/vllm"),
        ({"HOME": "/home/u", "XDG_CACHE_HOME": "/c"}, local, "/c/vllm"),
        ({"HOME": "/home/u", "USER": "u"}, lambda _: "nfs4", "/tmp/vllm_neuron_wdir_u"),
        ({"HOME": "/home/u", "USER": "u"}, lambda _: "lustre", "/tmp/vllm_neuron_wdir_u"),
    ):
        assert str(vllm_neuron_cache_root(environment, file_system)) == root
