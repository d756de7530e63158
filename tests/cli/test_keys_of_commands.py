"""Keys as the command line answers them: what must not change them, and what must."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cli_samples
import pytest
import yaml
from cli_samples import EAGLE3, INDUCTOR, SERVE, Project

SERVE_LINE = [
    "--max-model-len=4096",
    "--max-num-seqs",
    "4",
    "--block-size",
    "32",
    "--max-num-batched-tokens",
    "2048",
    "--additional-config",
    '{"neuron_config": {"decode_context_length_buckets": [1024]}}',
]


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, list[str]]:
    """A project and the keys of its config `config.yaml`."""
    project = Project(tmp_path_factory.mktemp("planned"))
    return project, project.keys(project.write(toolchain=INDUCTOR, speculative_config=EAGLE3))


def test_keys_are_the_same_wherever_and_whoever_plans(
    planned: tuple[Project, list[str]], tmp_path: Path
) -> None:
    project, keys = planned
    for name in ("cwd", "home", "tmp"):
        (tmp_path / name).mkdir()
    elsewhere = {
        "HOME": str(tmp_path / "home"),
        "TMPDIR": str(tmp_path / "tmp"),
        "PATH": f"{tmp_path}:/opt/bin:{os.environ['PATH']}",
        "USER": "somebody",
        "LOGNAME": "somebody",
        "HOSTNAME": "another-host",
        "LANG": "en_US.UTF-8",
        "TZ": "Asia/Tokyo",
        "PYTHONHASHSEED": "7",
        "NEFFBUILD_CACHE": str(tmp_path / "cache"),
    }
    config = str(project.root / "config.yaml")
    assert project.keys(config, cwd=tmp_path / "cwd", env=elsewhere) == keys


def test_keys_are_the_same_for_another_user_on_another_host(
    planned: tuple[Project, list[str]], tmp_path: Path
) -> None:
    project, keys = planned
    prefix = cli_samples.as_another_user(tmp_path)
    if prefix is None or shutil.which("setpriv") is None:
        pytest.skip("only root can become another user")
    if subprocess.run(["unshare", "--uts", "true"], capture_output=True).returncode == 0:
        prefix = ["unshare", "--uts", "sh", "-c", 'hostname elsewhere; exec "$@"', "sh", *prefix]
    env = {"HOME": "/nonexistent", "TMPDIR": str(tmp_path), "NEFFBUILD_CACHE": str(tmp_path / "c")}
    assert project.keys("config.yaml", prefix=prefix, env=env) == keys


def test_keys_do_not_depend_on_unrelated_variables(planned: tuple[Project, list[str]]) -> None:
    project, keys = planned
    unrelated = {
        "POD_IP": "10.0.0.7",
        "WORKER_ID": "worker-3",
        "VLLM_PORT": "5557",
        "MASTER_PORT": "29501",
        "CUDA_VISIBLE_DEVICES": "3",
        "NEURON_RT_VISIBLE_CORES": "0-7",
        "OMP_NUM_THREADS": "7",
        "CXXFLAGS": "-O0",
        "BUILD_ID": "1234",
    }
    assert project.keys("config.yaml", env=unrelated) == keys


PORTS = {
    "host": "10.0.0.7",
    "port": 9000,
    "served_model_name": ["prod"],
    "api_key": ["secret"],
    "data_parallel_rank": 3,
    "data_parallel_address": "10.0.0.8",
    "kv_transfer_config": {"kv_connector": "NixlConnector", "kv_port": 14579, "kv_ip": "10.0.0.9"},
}


def test_addresses_ports_and_ranks_do_not_change_keys(project: Project) -> None:
    first = project.keys(project.write("a.yaml", toolchain=INDUCTOR, **PORTS))
    other = {
        **PORTS,
        "host": "10.0.1.7",
        "port": 9001,
        "served_model_name": ["other"],
        "api_key": ["changed"],
        "data_parallel_rank": 4,
        "data_parallel_address": "10.0.1.8",
        "kv_transfer_config": {
            "kv_connector": "NixlConnector",
            "kv_port": 20000,
            "kv_ip": "10.0.1.9",
        },
    }
    assert project.keys(project.write("b.yaml", toolchain=INDUCTOR, **other)) == first


def reversed_order(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: reversed_order(value[name]) for name in reversed(value)}
    return value


def as_texts(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: as_texts(item) for name, item in value.items()}
    if isinstance(value, list):
        return [as_texts(item) for item in value]
    return json.dumps(value) if isinstance(value, int | bool) else value


SPELLED: dict[str, Any] = {
    **SERVE,
    "enable_expert_parallel": False,
    "enable_prefix_caching": True,
    "speculative_config": EAGLE3,
    "an_unknown_option": 8,
    "another_unknown_option": True,
}
SPELLINGS: dict[str, dict[str, Any]] = {
    "another order of keys": reversed_order(SPELLED),
    "numbers and booleans as texts": as_texts(SPELLED),
    "dashes": {name.replace("_", "-"): value for name, value in SPELLED.items()},
    "JSON texts": {
        name: json.dumps(value) if isinstance(value, dict) else value
        for name, value in SPELLED.items()
    },
    "defaults left out": {
        name: value
        for name, value in SPELLED.items()
        if name not in ("enable_expert_parallel", "enable_prefix_caching")
    },
    "null": {**SPELLED, "quantization": None, "num_gpu_blocks_override": None},
    "defaults written out": {
        **SPELLED,
        "dtype": "bfloat16",
        "kv_cache_dtype": "auto",
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "cp_kv_cache_interleave_size": 1,
        "gpu_memory_utilization": 0.92,
        "compilation_config": {},
        "speculative_config": {
            **EAGLE3,
            "max_model_len": 4096,
            "draft_tensor_parallel_size": 1,
        },
        "additional_config": {
            "neuron_config": {
                "num_seqs_buckets": [1, 2, 4],
                "decode_context_length_buckets": [1024],
                "verify_query_len_buckets": [6],
            }
        },
    },
}


def test_one_config_spelled_differently_has_one_set_of_keys(project: Project) -> None:
    def keys(name: str, serve: Mapping[str, Any]) -> list[str]:
        document = {"serve": dict(serve), "toolchain": INDUCTOR}
        text = json.dumps(document) if name.endswith(".json") else yaml.safe_dump(document)
        (project.root / name).write_text(text, encoding="utf-8")
        return project.keys_in(project.call("plan", name, "--json"))

    expected = keys("config.yaml", SPELLED)
    assert keys("config.json", SPELLED) == expected
    for name, serve in SPELLINGS.items():
        assert keys("config.yaml", serve) == expected, name


def test_a_command_line_a_vllm_file_and_our_file_have_the_same_keys(project: Project) -> None:
    line = ["--", "vllm", "serve", "./model", *SERVE_LINE]
    expected = project.keys(*line)
    split = [part for word in SERVE_LINE for part in word.split("=", 1)]
    assert project.keys("--", "vllm", "serve", "./model", *split, "--port", "9000") == expected
    module = ["--", "python3", "-m", "vllm.entrypoints.openai.api_server", "--model", "model"]
    assert project.keys(*module, *SERVE_LINE) == expected
    (project.root / "vllm.yaml").write_text(yaml.safe_dump(SERVE), encoding="utf-8")
    assert project.keys("vllm.yaml") == expected
    assert project.keys(project.write(toolchain={"name": "inductor"})) == expected
    # What no file says is the default, which may be written out.
    written = {"name": "inductor", "target": "x86-64-v3", "route": "aot", "engine": "reference"}
    assert project.keys(project.write(toolchain=written)) == expected


def test_a_flag_has_one_spelling_or_is_refused(project: Project) -> None:
    def plan(*flags: str) -> Any:
        config = project.write(toolchain={**INDUCTOR, "flags": list(flags)})
        return project.call("plan", config, "--json")

    name = "cpp.enable_unsafe_math_opt_flag"
    expected = plan(f"{name}=true").document["units"]
    assert plan(f"--{name}=true").document["units"] == expected
    assert plan(f"--{name}=True").document["units"] == expected
    assert plan().document["units"] != expected
    for flags in ((f"--{name} true",), (f"--{name}", "true")):
        refused = plan(*flags)
        assert refused.status == 2
        assert refused.error["field"] == "toolchain.flags"
        assert refused.error["hint"] == "write flags as name=value"


def strings(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for item in value.items() for text in strings(list(item))]
    if isinstance(value, list):
        return [text for item in value for text in strings(item)]
    return [value] if isinstance(value, str) else []


def documents(store: Path) -> list[Path]:
    found = [path for path in (store / "v1").rglob("*.json") if "blobs" not in path.parts]
    assert found
    return found


def test_no_document_of_a_store_names_a_path(compiled: Project, tmp_path: Path) -> None:
    remote = tmp_path / "remote"
    assert compiled.run("push", "config.yaml", "--to", str(remote), "--tag", "t").status == 0
    for path in [*documents(compiled.cache), *documents(remote)]:
        text = path.read_text(encoding="utf-8")
        assert str(compiled.root) not in text, path
        texts = strings(json.loads(text))
        assert os.uname().nodename not in texts, path
        assert [one for one in texts if one.startswith(("/", "~"))] == [], path


def test_a_cache_copied_moved_or_unpacked_elsewhere_has_every_unit(
    compiled: Project, tmp_path: Path
) -> None:
    def check(cache: Path) -> None:
        ran = compiled.run("plan", "config.yaml", "--check", "--cache", str(cache), "--json")
        assert ran.status == 0
        assert ran.document["counts"]["cached"] == 6
        verified = compiled.run("verify", "config.yaml", "--cache", str(cache), "--json")
        assert verified.status == 0
        assert verified.document["entries_checked"] == 6

    copied, moved = tmp_path / "copied", tmp_path / "moved"
    shutil.copytree(compiled.cache, copied)
    check(copied)
    shutil.move(copied, moved)
    check(moved)
    with tarfile.open(tmp_path / "cache.tar", "w") as archive:
        archive.add(moved, arcname="unpacked")
    shutil.rmtree(moved)
    with tarfile.open(tmp_path / "cache.tar") as archive:
        archive.extractall(tmp_path, filter="data")
    check(tmp_path / "unpacked")
    assert compiled.run("plan", "config.yaml", "--check", "--cache", str(moved)).status == 1


def test_a_host_without_the_compiler_says_what_to_pin_and_then_has_the_same_keys(
    planned: tuple[Project, list[str]], tmp_path: Path
) -> None:
    project, keys = planned
    nothing = {"PATH": str(tmp_path)}
    assert project.keys("config.yaml", env=nothing) == keys
    unpinned = project.write(
        "unpinned.yaml", toolchain={"name": "inductor"}, speculative_config=EAGLE3
    )
    ran = project.run("plan", unpinned, "--check", "--json", env=nothing)
    assert ran.status == 1
    assert ran.document["counts"]["unresolved"] == len(keys)
    for unit in ran.document["units"]:
        assert unit["key"] is None
        assert "pin it with toolchain.versions.g++" in unit["reason"]
