"""Sections of our own, overrides, and where the cache is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from config_workspace import SERVE, Workspace

from neffbuild.config.build import CacheConfig, FarmConfig, ToolchainConfig, cache_directory
from neffbuild.config.errors import ConfigError
from neffbuild.config.load import load_config, load_vllm_command


def test_sections(workspace: Workspace) -> None:
    config = workspace.load(
        toolchain={"name": "neuronx", "versions": {"neuronx-cc": "2.28"}, "flags": ["-O1"]},
        cache={"name": "llama", "remotes": [{"url": "s3://b/p", "mode": "ro"}], "min_sequence": 3},
        farm={"executor": "ray", "workers": 4, "timeout": 60, "memory": 1 << 30},
    )
    assert config.source == str(workspace.file)
    assert config.toolchain.versions == {"neuronx-cc": "2.28"}
    assert config.toolchain.flags == ("-O1",)
    assert config.cache.remotes[0].url == "s3://b/p"
    assert (config.farm.workers, config.farm.timeout) == (4, 60.0)


@pytest.mark.parametrize("empty", [None, {}])
def test_empty_sections_are_the_defaults(workspace: Workspace, empty: Any) -> None:
    config = workspace.load(toolchain=empty, cache=empty, farm=empty)
    assert config.toolchain == ToolchainConfig()
    assert config.cache == CacheConfig()
    assert config.farm == FarmConfig()


@pytest.mark.parametrize(
    ("section", "field", "value", "allowed", "hint"),
    [
        ({"toolchain": {"traget": "x"}}, "toolchain.traget", "x",
         "allowed in toolchain: name, target, route, engine, versions, flags", "target"),
        ({"cache": {"remote": []}}, "cache.remote", [], "remotes", "remotes"),
        ({"cache": {"remotes": [{"url": "x", "Mode": "ro"}]}}, "cache.remotes.0.Mode", "ro",
         "allowed in cache.remotes.0: url, mode", "mode"),
        ({"farm": {"qqq": 1}}, "farm.qqq", 1, "allowed in farm: executor", None),
        ({"toolchain": {"versions": {"torch": 2.10}}}, "toolchain.versions.torch", 2.1,
         "a text", "quotes"),
        ({"toolchain": {"flags": "--a"}}, "toolchain.flags", "--a", "a list", None),
        ({"toolchain": {"name": ""}}, "toolchain.name", "", "not empty", None),
        ({"toolchain": {"name": 3}}, "toolchain.name", 3, "a text", "quotes"),
        ({"toolchain": {"versions": []}}, "toolchain.versions", [], "a mapping", None),
        ({"cache": {"remotes": [{"mode": "ro"}]}}, "cache.remotes.0.url", {"mode": "ro"},
         "a value", "must be set"),
        ({"cache": {"remotes": [{"url": "x", "mode": "w"}]}}, "cache.remotes.0.mode", "w",
         "rw or ro", None),
        ({"cache": {"remotes": ["s3://b"]}}, "cache.remotes.0", "s3://b", "a mapping", None),
        ({"cache": {"name": "a/b"}}, "cache.name", "a/b", "letters, digits", None),
        ({"cache": {"require_signature": "yes"}}, "cache.require_signature", "yes",
         "true, false", None),
        ({"cache": {"min_sequence": -1}}, "cache.min_sequence", -1, "at least 0", None),
        ({"farm": {"workers": 0}}, "farm.workers", 0, "at least 1", None),
        ({"farm": {"workers": True}}, "farm.workers", True, "an integer", None),
        ({"farm": {"workers": "4"}}, "farm.workers", "4", "an integer", None),
        ({"farm": {"workers": 2.5}}, "farm.workers", 2.5, "an integer", None),
        ({"farm": {"timeout": 0}}, "farm.timeout", 0, "above 0", None),
        (
            {"farm": {"memory_fraction": 1.5}},
            "farm.memory_fraction",
            1.5,
            "farm.memory_fraction is 1.5; allowed: above 0, at most 1",
            None,
        ),
        (
            {"farm": {"node_wait": float("inf")}},
            "farm.node_wait",
            float("inf"),
            "farm.node_wait is inf; allowed: a finite number",
            None,
        ),
        ({"farm": {"resources": {"": 1}}}, "farm.resources", "", "not empty", None),
        ({"farm": {"timeout": "1h"}}, "farm.timeout", "1h", "a number", None),
        ({"farm": {"executor": "slurm"}}, "farm.executor", "slurm", "local or ray", None),
        ({"toolchain": {"target": []}}, "toolchain.target", [], "a text", None),
        ({"cache": {"keys": [5]}}, "cache.keys.0", 5, "a text", "quotes"),
        ({"zzz": {}}, "zzz", {}, "unknown section 'zzz'", None),
        ({"farm": [1]}, "farm", [1], "a mapping of options", None),
        ({"frm": {}}, "frm", {}, "allowed: serve, toolchain, cache, farm", "farm"),
        ({"max_num_seqs": 4}, "max_num_seqs", 4, "unknown section", "serve.max_num_seqs"),
    ],
)  # fmt: skip
def test_refusals(
    workspace: Workspace,
    section: dict[str, Any],
    field: str,
    value: Any,
    allowed: str,
    hint: str | None,
) -> None:
    error = workspace.refused(**section)
    assert (error.field, error.value) == (field, value)
    assert field in error.message
    assert allowed in error.message
    if hint is None:
        assert error.hint is None
    else:
        assert hint in (error.hint or "")


def test_every_wrong_field_is_listed(workspace: Workspace) -> None:
    error = workspace.refused(farm={"workers": 0, "retries": -1}, cache={"nam": 1})
    for field in ("farm.workers", "farm.retries", "cache.nam"):
        assert field in error.message


def test_what_json_cannot_hold(workspace: Workspace) -> None:
    assert "farm" in workspace.refused(farm={"timeout": float("inf")}).message
    workspace.write()
    workspace.file.write_text(workspace.file.read_text() + "farm: {workers: !!set {a}}\n")
    with pytest.raises(ConfigError, match="farm"):
        load_config(workspace.file)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("toolchain: {}\n", "serve"),
        ("serve: [1]\n", "serve"),
        ("serve:\n", "serve"),
        ("serve: x\n", "serve"),
        ("sevre: {model: m}\n", "sevre"),
        ("max-num-seqs: 4\n", "max-num-seqs"),
        ("1: 2\n", "1"),
    ],
)
def test_files_without_a_serve_config(tmp_path: Path, text: str, field: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert caught.value.field == field
    assert str(path) in caught.value.message


def test_overrides_win(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    path = workspace.write(cache={"local": "here", "name": "n"})
    assert load_config(path).cache.local == str(workspace.root / "here")
    (workspace.root / "cwd").mkdir()
    monkeypatch.chdir(workspace.root / "cwd")
    overrides = {"cache": {"local": "there", "remotes": [{"url": "tier"}]}, "farm": {"workers": 2}}
    config = load_config(path, overrides)
    assert config.cache.local == str(workspace.root / "cwd" / "there")
    assert config.cache.remotes[0].url == str(workspace.root / "cwd" / "tier")
    assert config.cache.name == "n"
    assert config.farm.workers == 2
    monkeypatch.chdir(workspace.root)
    command = load_vllm_command(["vllm", "serve", "model", "--max-num-seqs", "1"], overrides)
    assert command.cache.local == str(workspace.root / "there")


def test_paths_of_the_file_are_relative_to_it(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIER", "/tiers")
    remotes = [{"url": "tier"}, {"url": "$TIER/a"}, {"url": "file:///x"}, {"url": "s3://b"}]
    keys = ["ci.pub", "/etc/release.pub"]
    config = workspace.load(cache={"local": "~/c", "remotes": remotes, "keys": keys})
    assert config.cache.keys == (str(workspace.root / "ci.pub"), "/etc/release.pub")
    assert config.cache.local == str(workspace.root / "home" / "c")
    assert [remote.url for remote in config.cache.remotes] == [
        str(workspace.root / "tier"),
        "/tiers/a",
        "file:///x",
        "s3://b",
    ]


def test_the_cache_directory(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    config = workspace.load()
    home = workspace.root / "home"
    assert cache_directory(config.cache) == home / ".cache" / "neffbuild"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "xdg"))
    assert cache_directory(config.cache) == home / "xdg" / "neffbuild"
    monkeypatch.setenv("NEFFBUILD_CACHE", "~/mine")
    assert cache_directory(config.cache) == home / "mine"
    assert cache_directory(CacheConfig(local="/set")) == Path("/set")


def test_loading_needs_neither_torch_nor_transformers(workspace: Workspace) -> None:
    program = (
        "import sys\nfrom pathlib import Path\nfrom neffbuild.config.load import load_config\n"
        f"load_config(Path({str(workspace.write())!r}))\n"
        "heavy = {'torch', 'transformers', 'vllm', 'huggingface_hub', 'numpy', 'boto3', 'ray'}\n"
        "sys.exit(' '.join(heavy & sys.modules.keys()) or 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_config_survives_being_written_out_again(workspace: Workspace) -> None:
    config = workspace.load(SERVE)
    workspace.file.write_text(yaml.safe_dump({"serve": config.serve.model_dump(mode="json")}))
    assert load_config(workspace.file).serve == config.serve
