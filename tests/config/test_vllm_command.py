"""A `vllm serve` command line is read as vLLM 0.32.0's own parser reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from config_workspace import Workspace
from hypothesis import given
from hypothesis import strategies as st

from neffbuild.config import vllm_options
from neffbuild.config.errors import ConfigError
from neffbuild.config.load import load_config, load_vllm_command
from neffbuild.config.vllm_command import parse_vllm_command


def options(*words: str) -> dict[str, Any]:
    return parse_vllm_command(["vllm", "serve", "M", *words]).options


def refusal(*words: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse_vllm_command(words)
    assert caught.value.message.startswith("the vllm command line: ")
    return caught.value


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--max-num-seqs", "8"], {"max_num_seqs": 8}),
        (["--max_num_seqs", "8"], {"max_num_seqs": 8}),
        (["--max-num_seqs=8"], {"max_num_seqs": 8}),
        (["--max-num-seqs", "4", "--max_num_seqs=8"], {"max_num_seqs": 8}),
        (["--max-model-len", "128k"], {"max_model_len": "128k"}),
        (["--max-model-len", "-1"], {"max_model_len": -1}),
        (["--gpu-memory-utilization", "0.85"], {"gpu_memory_utilization": 0.85}),
        (["--device-memory-utilization", "0.5"], {"gpu_memory_utilization": 0.5}),
        (["--enforce-eager"], {"enforce_eager": True}),
        (["--no-enable-prefix-caching"], {"enable_prefix_caching": False}),
        (["--no_enable_prefix_caching"], {"enable_prefix_caching": False}),
        (["-tp", "8"], {"tensor_parallel_size": 8}),
        (["-tp=8"], {"tensor_parallel_size": 8}),
        (["-pp", "2", "-dp", "4"], {"pipeline_parallel_size": 2, "data_parallel_size": 4}),
        (["-dcp", "2", "-ep"], {"decode_context_parallel_size": 2, "enable_expert_parallel": True}),
        (["-q", "fp8"], {"quantization": "fp8"}),
        (["-qfp8"], {"quantization": "fp8"}),
        (["-O3"], {"optimization_level": 3}),
        (["-O", "1"], {"optimization_level": 1}),
        (["-O=0"], {"optimization_level": 0}),
        (["--served-model-name", "a", "b c", "-1"], {"served_model_name": ["a", "b c", -1]}),
        (["--served-model-name=a"], {"served_model_name": ["a"]}),
        (["--middleware", "a", "--middleware", "b"], {"middleware": ["a", "b"]}),
        (["--hf-token", "--enforce-eager"], {"hf_token": True, "enforce_eager": True}),
        (["--hf-token", "x"], {"hf_token": "x"}),
        (["--max-num-se", "2"], {"max_num_seqs": 2}),
        (["-cc.mode=2"], {"compilation_config": {"mode": 2}}),
        (["-c.mode=2"], {"compilation_config": {"mode": 2}}),
        (["-t", "2", "-e"], {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
        (["--kv-transfer-config.x", "1_0"], {"kv_transfer_config": {"x": 10}}),
        (
            ["--compilation-config.mode", "2", "--compilation_config.a.b", "x"],
            {"compilation_config": {"mode": 2, "a": {"b": "x"}}},
        ),
        (
            [
                "--additional_config.neuron_config.num_seqs_buckets+",
                "1,2",
                "--additional-config.neuron_config.num_seqs_buckets+=4",
            ],
            {"additional_config": {"neuron_config": {"num_seqs_buckets": ["1", "2", "4"]}}},
        ),
        (["--kv-transfer-config.size", "80g"], {"kv_transfer_config": {"size": 80 * 10**9}}),
        (["--kv-transfer-config.x", "[1]"], {"kv_transfer_config": {"x": [1]}}),
        (["--kv-transfer-config.x", "-y"], {"kv_transfer_config": {"x": "-y"}}),
        (["--kv-transfer-config.a", "1", "--kv-transfer-config.a", "2"],
         {"kv_transfer_config": {"a": 2}}),
        (["--additional-config", "{}"], {"additional_config": "{}"}),
        (["--brand-new", "7"], {"brand_new": 7}),
        (["--brand-new=007"], {"brand_new": "007"}),
        (["--brand-new", "-7"], {"brand_new": -7}),
        (["--brand-new", "--enforce-eager"], {"brand_new": True, "enforce_eager": True}),
        (["--brand-new", "-tp", "2"], {"brand_new": True, "tensor_parallel_size": 2}),
        (["--no-brand-new"], {"brand_new": False}),
        (["--brand-new"], {"brand_new": True}),
    ],
)  # fmt: skip
def test_options(words: list[str], expected: dict[str, Any]) -> None:
    assert options(*words) == {"model": "M", **expected}


@pytest.mark.parametrize(
    "words",
    [
        ["vllm", "serve", "M"],
        ["/opt/bin/vllm", "serve", "M"],
        ["serve", "M"],
        ["vllm", "serve", "--model", "M"],
        ["vllm", "serve", "--model=M"],
        ["vllm", "serve", "--", "M"],
        ["python3", "-m", "vllm.entrypoints.openai.api_server", "--model=M"],
        ["/usr/bin/python", "-m", "vllm.entrypoints.cli.main", "serve", "M"],
    ],
)
def test_ways_to_start_it(words: list[str]) -> None:
    assert parse_vllm_command(words).options == {"model": "M"}


@given(st.permutations([("--max-num-seqs", "8"), ("-tp=2",), ("M",), ("--enforce-eager",)]))
def test_order_does_not_matter(groups: list[tuple[str, ...]]) -> None:
    words = [word for group in groups for word in group]
    assert parse_vllm_command(["vllm", "serve", *words]).options == {
        "model": "M",
        "max_num_seqs": 8,
        "tensor_parallel_size": 2,
        "enforce_eager": True,
    }


@given(st.sampled_from(sorted(vllm_options.VALUES - {"model"})), st.data())
def test_every_spelling_of_every_option(name: str, data: st.DataObject) -> None:
    spelled = "".join(
        data.draw(st.sampled_from("-_")) if letter == "_" else letter for letter in name
    )
    words = data.draw(st.sampled_from([[f"--{spelled}=5"], [f"--{spelled}", "5"]]))
    canonical = vllm_options.ALIASES.get(name, name)
    assert options(*words) == {"model": "M", canonical: 5}


@given(st.sampled_from(sorted(vllm_options.SWITCHES)))
def test_a_switch_never_takes_the_next_word(name: str) -> None:
    words = ["vllm", "serve", f"--{name.replace('_', '-')}", "M"]
    assert parse_vllm_command(words).options == {"model": "M", name: True}


@pytest.mark.parametrize(
    ("words", "needle"),
    [
        (["vllm", "bench", "M"], "not a `vllm serve` command line"),
        (["vllm"], "not a `vllm serve` command line"),
        ([], "not a `vllm serve` command line"),
        (["python", "-m", "http.server", "M"], "does not start vLLM"),
        (["vllm", "serve"], "no model is given"),
        (["vllm", "serve", "A", "B"], "unexpected word 'B': the model is already 'A'"),
        (["vllm", "serve", "A", "--model", "B"], "two models are given, 'A' and --model 'B'"),
        (["vllm", "serve", "M", "--max-num-seqs"], "--max-num-seqs needs a value"),
        (["vllm", "serve", "M", "--max-num-seqs", "--port", "1"], "--max-num-seqs needs a value"),
        (["vllm", "serve", "M", "--served-model-name"], "needs at least one value"),
        (["vllm", "serve", "M", "--enforce-eager=true"], "--enforce-eager takes no value"),
        (["vllm", "serve", "M", "--max-num", "2"], "--max-num-seqs"),
        (["vllm", "serve", "M", "-zz", "1"], "unknown short option '-zz'"),
        (["vllm", "serve", "M", "-p", "1"], "short for several options '-p'; allowed: -pcp, -pp"),
        (["vllm", "serve", "M", "--no-headless"], "vLLM has no --no-headless"),
        (["vllm", "serve", "M", "--help"], "--help prints help"),
        (["vllm", "serve", "M", "--dtype", ""], "--dtype is '', which vLLM refuses"),
        (["vllm", "serve", "M", "--block-size=None"], "--block-size is 'None', which vLLM refuses"),
        (["vllm", "serve", "M", "-O"], "-O needs a level; allowed: 0, 1, 2, 3"),
        (["vllm", "serve", "M", "--compilation-config.mode"], "needs a value"),
        (["vllm", "serve", "M", "--max-num-seqs.x", "1"], "has no parts"),
        (["vllm", "serve", "M", "--a.x", '{"k": 1, "k": 2}'], "the key 'k' is given twice"),
        (["vllm", "serve", "M", "--config"], "--config needs a file name"),
        (["vllm", "serve", "M", "--config=c.yaml"], "vLLM does not read the file"),
        (["vllm", "serve", "M", "--config", "c.json"], "reads .yaml and .yml files only"),
        (["vllm", "serve", "M", "--config", "a.yaml", "--config", "b.yaml"], "more than once"),
    ],
)  # fmt: skip
def test_what_vllm_would_refuse_or_ignore(words: list[str], needle: str) -> None:
    assert needle in refusal(*words).message


def test_parts_replace_the_whole_option_as_in_vllm() -> None:
    command = parse_vllm_command(
        ["vllm", "serve", "M", "--hf-overrides", '{"a": 1}', "--hf-overrides.b", "2"]
    )
    assert command.options["hf_overrides"] == {"b": 2}
    assert any("replaces the whole of --hf-overrides" in note for note in command.notes)


def test_a_beginning_of_a_name_is_noted() -> None:
    notes = parse_vllm_command(["vllm", "serve", "M", "--max-num-se", "2"]).notes
    assert notes == ("--max-num-se is read as --max-num-seqs, the only option so begun",)


def test_the_command_line_overrides_its_config_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "model: FILE\nmax-num-seqs: 16\nno-enforce-eager: true\nserved-model-name: [a, b]\n"
        "compilation-config: {mode: 2}\nasync-scheduling: false\ndtype: bfloat16\nseed: null\n"
    )
    command = parse_vllm_command(
        ["vllm", "serve", "--dtype", "half", "--config", str(file), "--max-num-seqs", "4"]
    )
    assert command.options == {
        "model": "FILE",
        "max_num_seqs": 4,
        "enforce_eager": False,
        "served_model_name": ["a", "b"],
        "compilation_config": '{"mode": 2}',
        "dtype": "half",
        "seed": "None",
    }
    assert len(command.notes) == 1
    assert "no-async-scheduling: true" in command.notes[0]
    named = parse_vllm_command(["vllm", "serve", "CLI", "--config", str(file)])
    assert named.options["model"] == "CLI"


def from_file(tmp_path: Path, text: str, *words: str) -> dict[str, Any]:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    return options("--config", str(file), *words)


@pytest.mark.parametrize(
    ("text", "words", "expected"),
    [
        ("max_num_s: 4", [], {"max_num_s": 4}),
        ("max-num-se: 4", [], {"max_num_seqs": 4}),
        ("max-num-seqs: [4]", [], {"max_num_seqs": 4}),
        ("served-model-name: []", [], {}),
        ("config: other.yaml", [], {}),
        ("enforce-eager: false", [], {}),
        ("no-enforce-eager: true", [], {"enforce_eager": False}),
        ("max-model-len: 131_072", [], {"max_model_len": 131072}),
        ("compilation-config.mode: 2", ["-cc.backend", "x"], {"compilation_config": {"backend": "x"}}),
        (
            "compilation-config.mode: 2",
            ["--compilation_config.backend", "x"],
            {"compilation_config": {"mode": 2, "backend": "x"}},
        ),
        ("compilation-config: {mode: 2}", ["-cc", '{"mode": 3}'], {"compilation_config": '{"mode": 3}'}),
        ("hf-overrides.a+: '1,2'", [], {"hf_overrides": {"a": ["1", "2"]}}),
    ],
)  # fmt: skip
def test_a_config_file_is_words_before_the_others(
    tmp_path: Path, text: str, words: list[str], expected: dict[str, Any]
) -> None:
    if text.startswith("max_num_s:"):
        with pytest.raises(ConfigError, match="short for several options"):
            from_file(tmp_path, text, *words)
    else:
        assert from_file(tmp_path, text, *words) == {"model": "M", **expected}


@pytest.mark.parametrize(
    ("text", "needle"),
    [
        ("enforce-eager: 'true'", "leaves the word 'true' over"),
        ("additional-config.a: [1, 128]", "leaves the word '128' over"),
        ("max-num-seqs: null", "--max-num-seqs is 'None', which vLLM refuses"),
    ],
)
def test_a_config_file_that_vllm_would_refuse(tmp_path: Path, text: str, needle: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_file(tmp_path, text)
    assert needle in caught.value.message


def test_a_bad_config_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("block-size: 32\n")
    message = refusal("vllm", "serve", "--seed", "1", "M", "--config", str(file)).message
    assert "no model unless it stands right after `serve`" in message
    file.write_text("model: M\nmax-num-seqs: 1\nmax_num_seqs: 2\n")
    assert "max_num_seqs is given twice" in refusal("vllm", "serve", "--config", str(file)).message


def test_it_means_what_the_file_means(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    lists = {"num_seqs_buckets": [1, 8], "decode_context_length_buckets": [512]}
    file = workspace.load(
        {"additional_config": {"neuron_config": lists}, "tensor_parallel_size": 2}
    )
    monkeypatch.chdir(workspace.root)
    whole = json.dumps({"neuron_config": lists})
    words = ["vllm", "serve", "model", "-tp", "2", "--block-size", "32", "--max-num-seqs", "8"]
    words += ["--max-model-len", "4096"]
    command = load_vllm_command([*words, "--additional-config", whole])
    assert command.serve == file.serve
    assert command.model == file.model
    parts = [
        "--additional_config.neuron_config.num_seqs_buckets+", "1,8",
        "--additional_config.neuron_config.decode_context_length_buckets", "[512]",
    ]  # fmt: skip
    assert load_vllm_command([*words, *parts]).serve == file.serve


def test_a_bare_vllm_config_file_means_what_the_command_means(workspace: Workspace) -> None:
    expected = workspace.load({"enforce_eager": True})
    bare = workspace.root / "vllm.yaml"
    bare.write_text(
        "model: model\nmax-model-len: 4096\nmax-num-seqs: 8\nblock-size: 32\nenforce-eager: true\n"
    )
    assert load_config(bare).serve == expected.serve
    bare.write_text(bare.read_text() + "enable-prefix-caching: false\n")
    notes = load_config(bare).notes
    assert any("no-enable-prefix-caching: true" in note for note in notes)


def test_messages_of_a_command_name_it(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workspace.root)
    with pytest.raises(ConfigError) as caught:
        load_vllm_command(["vllm", "serve", "model", "--max-num-seqs", "many"])
    assert "the vllm command line" in caught.value.message
    assert (caught.value.field, caught.value.value) == ("serve.max_num_seqs", "many")
