"""Whatever is wrong with what a user gives: one message that names it, and never a traceback."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cli_samples
import pytest
import yaml
from cli_samples import INDUCTOR, SERVE, Project


def text(project: Project, content: str | bytes) -> list[str]:
    file = project.root / "config.yaml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return ["plan", str(file)]


def serve(project: Project, **options: Any) -> list[str]:
    return ["plan", project.write(toolchain=INDUCTOR, **options)]


def section(project: Project, **sections: Any) -> list[str]:
    return ["plan", project.write(sections=sections)]


def buckets(project: Project, **lists: Any) -> list[str]:
    return serve(project, additional_config={"neuron_config": lists})


def with_model(project: Project, command: str, **keys: Any) -> list[str]:
    document = {**cli_samples.MODEL, **keys}
    (project.root / "model/config.json").write_text(json.dumps(document), encoding="utf-8")
    return [command, project.write(toolchain=INDUCTOR)]


# Case → (words, exit status, what the message must hold).
CASES: dict[str, tuple[Callable[[Project], list[str]], int, list[str]]] = {
    "missing file": (lambda p: ["plan", "nope.yaml"], 2, ["nope.yaml"]),
    "directory": (lambda p: ["plan", "model"], 2, ["model", "directory"]),
    "binary file": (lambda p: text(p, b"\x00\xff\xfe\x80" * 100), 2, ["config.yaml", "UTF-8"]),
    "weights by mistake": (lambda p: text(p, b"a" * (2 << 20)), 2, ["too many"]),
    "empty file": (lambda p: text(p, ""), 2, ["is empty"]),
    "bad YAML": (lambda p: text(p, "serve: [1,\n  x: }"), 2, ["config.yaml, line 2"]),
    "list": (lambda p: text(p, "- 1\n"), 2, ["allowed: a mapping"]),
    "unreadable name": (lambda p: ["plan", "a\udcff→.yaml"], 2, ["there is no file"]),
    "no name": (lambda p: ["plan", ""], 2, ["the config's name is ''"]),
    "a URL": (lambda p: ["plan", "ftp://host/a.yaml"], 2, ["'ftp://host/a.yaml' is a URL"]),
    "a variable before vllm": (
        lambda p: ["plan", "--", "FOO=bar", "vllm", "serve", "model"],
        2,
        ["'FOO=bar' stands before `vllm serve`"],
    ),
    "vllm in quotes": (
        lambda p: ["plan", "--", "vllm serve model --port 1"],
        2,
        ["the whole `vllm serve` line is one word"],
    ),
    "two configs": (lambda p: [*serve(p), "b.yaml"], 2, ["unexpected argument 'b.yaml'"]),
    "unknown section": (
        lambda p: text(p, yaml.safe_dump({"serv": SERVE})),
        2,
        ["unknown section 'serv'", "allowed: serve, toolchain, cache, farm"],
    ),
    "unknown field": (
        lambda p: section(p, cache={"locl": "x"}),
        2,
        ["cache.locl is unknown", "allowed in cache: name, local"],
    ),
    "unknown toolchain": (
        lambda p: ["plan", p.write(toolchain={"name": "inducto"})],
        2,
        # Those of other tests are there too where one process runs both.
        ["'inducto'", "is installed; available: ", "hostile, inductor, modest"],
    ),
    "unknown target": (
        lambda p: ["plan", p.write(toolchain={**INDUCTOR, "target": "arm"})],
        2,
        ["'arm'", "allowed: x86-64-v3, x86-64-v4, native"],
    ),
    "unknown tool pinned": (
        lambda p: ["plan", p.write(toolchain={"name": "inductor", "versions": {"gcc": "1"}})],
        2,
        ["'gcc'", "its tools: torch, g++"],
    ),
    "unknown flag": (
        lambda p: ["plan", p.write(toolchain={**INDUCTOR, "flags": ["-O9"]})],
        2,
        ["'-O9'", "allowed names: "],
    ),
    "no model": (lambda p: serve(p, model=...), 2, ["serve.model is not set; allowed"]),
    "model that is not there": (lambda p: serve(p, model="nope"), 2, ["'nope'", "looked at"]),
    "architectures that are no list": (
        lambda p: with_model(p, "compile", architectures=True),
        2,
        ["no reference model for architecture True; supported: LlamaForCausalLM"],
    ),
    "an empty list of architectures": (
        lambda p: with_model(p, "compile", architectures=[]),
        2,
        ["no reference model for architecture []"],
    ),
    "a model with no size of its latent": (
        lambda p: with_model(p, "replay", kv_lora_rank={}),
        2,
        ["kv_lora_rank is {}; allowed: a positive integer"],
    ),
    "a window of more than 63 bits": (
        lambda p: with_model(p, "plan", sliding_window=1 << 63),
        2,
        [
            "sliding_window is 9223372036854775808",
            "allowed: a positive integer up to 9223372036854775807",
        ],
    ),
    "a window that is no integer": (
        lambda p: with_model(p, "plan", sliding_window="4096"),
        2,
        ["sliding_window is '4096'; allowed: a positive integer"],
    ),
    "a rotary scaling to no length": (
        lambda p: with_model(p, "plan", rope_scaling={"type": "linear", "factor": 1e308}),
        2,
        ["rotary scaling is 1e+308", "allowed: a positive number"],
    ),
    "text for a number": (
        lambda p: serve(p, max_num_seqs="many"),
        2,
        ["serve.max_num_seqs is 'many'; allowed: an integer of at least 1"],
    ),
    "float for a number": (lambda p: serve(p, block_size=1.5), 2, ["serve.block_size is 1.5"]),
    "unsorted buckets": (
        lambda p: buckets(p, num_seqs_buckets=[2, 1, 4]),
        2,
        ["num_seqs_buckets is [2, 1, 4]", "strictly ascending"],
    ),
    "buckets without the last": (
        lambda p: buckets(p, num_seqs_buckets=[1, 2]),
        2,
        ["num_seqs_buckets is [1, 2]", "ends with 4"],
    ),
    "a single bucket": (
        lambda p: buckets(p, decode_context_length_buckets=1024),
        2,
        ["decode_context_length_buckets is 1024", "allowed: a list"],
    ),
    "a bucket off the tile": (
        lambda p: buckets(p, decode_context_length_buckets=[1000]),
        2,
        ["entry 1000 is not a multiple of 128"],
    ),
    "no buckets": (lambda p: buckets(p, decode_context_length_buckets=[]), 2, ["is []"]),
    "JSON that is none": (
        lambda p: serve(p, additional_config='{"neuron_config": {'),
        2,
        ["serve.additional_config is"],
    ),
    "option before the command": (
        lambda p: ["--cache", "x", "plan", "config.yaml"],
        2,
        ["--cache stands before the command"],
    ),
    "no such command": (lambda p: ["plant"], 2, ["plant"]),
    "no -- before vllm": (lambda p: ["plan", "vllm", "serve", "m", "--port", "1"], 2, ["--port"]),
    "no vllm serve": (lambda p: ["plan", "--", "vllm", "bench", "m"], 2, ["vllm serve"]),
    "workers": (lambda p: ["compile", p.write(), "--workers", "0"], 2, ["--workers", "0"]),
    "limit": (lambda p: ["compile", p.write(), "--limit", "x"], 2, ["--limit", "'x'"]),
    "only": (
        lambda p: ["compile", p.write(), "--only", "prefill*"],
        2,
        ["--only 'prefill*' matches none of the 6 units"],
    ),
    "a tag of no form": (
        lambda p: ["push", p.write(), "--to", "r", "--tag", "a:b:c"],
        2,
        ["'a:b' cannot be part of a tag"],
    ),
    "nowhere to push": (lambda p: ["push", p.write()], 2, ["no store to push to"]),
    "neither tag nor digest": (lambda p: ["pull", "r"], 2, ["--tag NAME:TAG or --digest D"]),
    "a digest that is none": (
        lambda p: ["pull", "r", "--digest", "xyz"],
        2,
        ["--digest 'xyz'", "64 lower-case hex digits"],
    ),
    "an unknown scheme": (
        lambda p: ["pull", "gs://b/p", "--tag", "a:b"],
        2,
        ["gs:// is not supported"],
    ),
    "a tag for a config": (lambda p: ["verify", p.write(), "--tag", "a:b"], 2, ["--tag goes"]),
    "explain without a unit": (lambda p: ["explain", p.write()], 2, ["CONFIG UNIT [OTHER]"]),
    "explain a unit that is none": (
        lambda p: ["explain", p.write(), "decode_b9_ctx1024"],
        2,
        ["has no unit 'decode_b9_ctx1024'"],
    ),
    "verify of what is not there": (
        lambda p: ["verify", "nope", "--repair"],
        2,
        ["no file or directory nope (a config file or a store was expected)"],
    ),
    "no time at all": (lambda p: ["gc", "r", "--grace", "0s"], 2, ["'0s' is zero", "1s"]),
    "cache that is a URL": (
        lambda p: [*serve(p), "--cache", "s3://bucket/x"],
        2,
        ["--cache", "'s3://bucket/x' is a URL", "a local cache is a directory", "cache.remotes"],
    ),
    "cache.local that is a URL": (
        lambda p: section(p, cache={"local": "file:///x"}),
        2,
        ["cache.local is 'file:///x', a URL", "a local cache is a directory"],
    ),
    "cache that is a file": (lambda p: [*serve(p), "--cache", "config.yaml"], 2, ["--cache"]),
    "cache.local that is a file": (
        lambda p: section(p, cache={"local": "config.yaml"}),
        3,
        ["config.yaml", "Not a directory"],
    ),
    "cache below a file": (lambda p: [*serve(p), "--cache", "config.yaml/x"], 3, ["config.yaml/x"]),
    "compile into a file": (
        lambda p: ["compile", p.write(), "--cache", "config.yaml/x"],
        3,
        ["config.yaml/x"],
    ),
    "pull into a file": (
        lambda p: ["pull", "r", "--tag", "a:b", "--cache", "config.yaml/x"],
        3,
        [""],
    ),
    "a store that is not there": (lambda p: ["pull", "r", "--tag", "a:b"], 3, ["no tag a:b"]),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_named(project: Project, case: str) -> None:
    words_of, status, expected = CASES[case]
    words = words_of(project)
    # After `--` it would be an option of vLLM's.
    split = words.index("--") if "--" in words else len(words)
    ran = project.call(*words[:split], "--json", *words[split:])
    assert ran.status == status, ran
    error = ran.error
    for part in expected:
        assert part in error["message"], error
    assert "\n" not in error["message"]
    assert set(error) == {"kind", "field", "value", "message", "hint"}


@pytest.mark.parametrize(
    "case",
    ["text for a number", "unknown toolchain", "cache.local that is a file", "no -- before vllm"],
)
def test_people_get_the_same_message_and_what_to_do(project: Project, case: str) -> None:
    words_of, status, _ = CASES[case]
    words = words_of(project)
    error = project.call(*words, "--json").error
    ran = project.call(*words)
    assert ran.status == status
    assert ran.out == ""
    hint = f"\n  hint: {error['hint']}" if error["hint"] else ""
    assert ran.err == f"neffbuild: error: {error['message']}{hint}\n"


@pytest.mark.parametrize("url", ["s3://bucket/x", "file:///x", "$PLACE/x"])
def test_a_url_for_the_local_cache_is_refused_and_makes_no_folder(
    project: Project, url: str
) -> None:
    config = project.write()
    project.environment.update(NEFFBUILD_CACHE=url, PLACE="s3://bucket")
    before = sorted(project.root.iterdir())
    for words in (["compile", config], ["pull", "r", "--tag", "a:b"]):
        ran = project.run(*words, "--json")
        assert ran.status == 2
        assert ran.error["field"] == "NEFFBUILD_CACHE"
        assert "a local cache is a directory" in ran.error["message"]
        assert "cache.remotes" in ran.error["hint"]
    assert sorted(project.root.iterdir()) == before


def test_errors_carry_field_and_value(project: Project) -> None:
    error = project.call(*buckets(project, num_seqs_buckets=[2, 1, 4]), "--json").error
    assert error["kind"] == "config"
    assert error["field"] == "serve.additional_config.neuron_config.num_seqs_buckets"
    assert error["value"] == [2, 1, 4]
    assert error["hint"] == "write [1, 2, 4]"
    usage = project.call("compile", "c.yaml", "--workers", "0", "--json").error
    assert usage["field"] == "--workers"


def test_every_problem_of_a_config_is_listed_at_once(project: Project) -> None:
    ran = project.call(*serve(project, max_num_seqs=0, block_size="x", dtype=[]), "--json")
    assert ran.status == 2
    for name in ("max_num_seqs", "block_size", "dtype"):
        assert f"serve.{name}" in ran.error["message"]


def test_json_may_stand_anywhere_after_the_command(project: Project) -> None:
    config = project.write()
    expected = project.call("plan", config, "--json").document
    assert project.call("plan", "--json", config).document == expected
    assert project.call("plan", "--json", "--", config).document == expected
    # What stands after `--` is somebody else's, and an error is then no document.
    ran = project.call("plan", "--", "vllm", "serve", "nope", "--json")
    assert ran.status == 2
    assert ran.out == ""


def test_json_before_the_command_is_answered_in_json(project: Project) -> None:
    error = project.call("--json", "plan", project.write()).error
    assert error["message"] == "--json stands before the command"
    assert "neffbuild COMMAND … --json" in error["hint"]


def test_without_a_command_there_is_help(project: Project) -> None:
    ran = project.call()
    assert ran.status == 2
    assert "Commands:" in ran.err


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_output_survives_a_poor_encoding(project: Project, encoding: str) -> None:
    env = {"PYTHONIOENCODING": encoding, "LC_ALL": "C"}
    assert project.run("--help", env=env).status == 0
    ran = project.run("plan", "a\udcff→.yaml", "--json", env=env)
    assert ran.status == 2
    assert ran.error["value"] == "a\udcff→.yaml"


class TestReadOnlyCache:
    """As a user who may read the cache and not write it."""

    @pytest.fixture
    def reader(self, compiled: Project, project: Project) -> Project:
        project.write()
        shutil.copytree(compiled.cache, project.cache)
        for folder, _, files in os.walk(project.cache):
            for name in (".", *files):
                path = Path(folder, name)
                path.chmod(path.stat().st_mode & ~0o222)
        return project

    @pytest.fixture
    def run(self, reader: Project) -> Callable[..., Any]:
        prefix = cli_samples.as_another_user(reader.root / "tmp")
        if prefix is not None and shutil.which("setpriv") is None:
            pytest.skip("needs setpriv to become another user")
        return lambda *words: reader.run(*words, prefix=prefix or ())

    def test_what_is_complete_works(self, run: Callable[..., Any], reader: Project) -> None:
        assert run("plan", "config.yaml", "--check").status == 0
        assert "nothing to do" in run("compile", "config.yaml").out
        assert run("verify", "config.yaml").status == 0
        assert run("report", "config.yaml").status == 0
        pushed = run("push", "config.yaml", "--to", "tmp/remote", "--tag", "t")
        assert pushed.status == 0
        assert "could not be remembered" in pushed.err

    def test_a_compile_is_refused_before_it_starts(
        self, run: Callable[..., Any], reader: Project
    ) -> None:
        reader.write("more.yaml", max_num_seqs=8)
        ran = run("compile", "more.yaml", "--json")
        assert ran.status == 3
        assert "Permission denied" in ran.error["message"]
        assert ran.error["hint"] == "check who owns the path and its permissions"
        # No unit was compiled in vain.
        assert ran.err == ""

    def test_a_store_that_cannot_be_written_refuses_a_push(
        self, run: Callable[..., Any], reader: Project
    ) -> None:
        ran = run("push", "config.yaml", "--to", "home/remote", "--json")
        assert ran.status == 3
        assert "home/remote" in ran.error["message"]
        assert "Permission denied" in ran.error["message"]

    def test_a_pull_into_it_is_refused(
        self, run: Callable[..., Any], compiled: Project, tmp_path: Path
    ) -> None:
        remote = tmp_path / "remote"
        assert compiled.run("push", "config.yaml", "--to", str(remote), "--tag", "t").status == 0
        ran = run("pull", str(remote), "--tag", "default:t", "--cache", str(tmp_path / "mine"))
        assert ran.status == 3
        assert "Permission denied" in ran.err
