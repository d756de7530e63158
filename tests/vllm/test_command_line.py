"""A `vllm serve` line means here what it means to the vLLM that is installed: its own parser is asked."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import enum
import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

# Not plain `vllm`: that is also what this folder would be called as a package.
pytest.importorskip("vllm.version")

from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser

from neffbuild.config import vllm_options
from neffbuild.config.errors import ConfigError
from neffbuild.config.load import load_vllm_command
from neffbuild.config.vllm_command import parse_vllm_command

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 1 << 20,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}


class Theirs:
    """vLLM's parser, as its command line sets it up."""

    def __init__(self) -> None:
        self._parser = FlexibleArgumentParser()
        commands = self._parser.add_subparsers(required=False, dest="subparser")
        serve: argparse.ArgumentParser = ServeSubcommand().subparser_init(commands)
        self.actions = serve._actions

    def options(self, words: list[str]) -> dict[str, Any] | None:
        """What the words mean to vLLM, JSON opened; None where it refuses them."""
        with (
            contextlib.redirect_stderr(io.StringIO()),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            try:
                found = vars(self._parser.parse_args(["serve", *words]))
            except (SystemExit, ValueError, AssertionError):
                return None
        model = found["model_tag"] or found["model"]
        return {name: _opened(value) for name, value in found.items()} | {"model": model}


def _opened(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return {field.name: _opened(getattr(value, field.name)) for field in fields}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, dict):
        return {key: _opened(item) for key, item in value.items()}
    return value


def ours(words: list[str]) -> dict[str, Any] | None:
    """What the words mean to `neffbuild plan`; None where it refuses them."""
    try:
        serve = load_vllm_command(["vllm", "serve", *words]).serve
    except ConfigError:
        return None
    return serve.model_dump(mode="json", exclude_none=True)


@pytest.fixture(scope="module")
def theirs() -> Iterator[Theirs]:
    logging.disable(logging.CRITICAL)
    yield Theirs()
    logging.disable(logging.NOTSET)


@pytest.fixture
def _models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = {**MODEL, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}
    for name, document in {"model": MODEL, "draft": {**draft, "draft_vocab_size": 128}}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(document))
    monkeypatch.chdir(tmp_path)


def test_every_option_is_known_with_its_arity(theirs: Theirs) -> None:
    found: dict[str, set[str]] = {}
    short: dict[str, str] = {}
    negations, not_off, aliases = set(), set(), {"model_tag": "model"}
    for action in theirs.actions:
        names = [
            option[2:].replace("-", "_")
            for option in action.option_strings
            if option.startswith("--")
        ]
        if action.dest in ("help", "config", "model_tag"):
            continue
        short |= {o: action.dest for o in action.option_strings if not o.startswith("--")}
        if isinstance(action, argparse.BooleanOptionalAction):
            negations |= {name for name in names if name.startswith("no_")}
            names = [name for name in names if not name.startswith("no_")]
        aliases |= {name: action.dest for name in names if name != action.dest}
        if action.nargs == 0:
            kind = "switch"
            not_off |= set() if action.default is False else {action.dest}
        elif isinstance(action, argparse._AppendAction):
            kind = "repeated"
        else:
            kind = {None: "one", "?": "optional", "+": "list", "*": "list"}[action.nargs]
        found.setdefault(kind, set()).add(action.dest)
    assert found == {
        "switch": vllm_options.SWITCHES,
        "one": vllm_options.VALUES | vllm_options.JSON,
        "optional": vllm_options.OPTIONAL_VALUE,
        "list": vllm_options.LISTS,
        "repeated": vllm_options.REPEATED,
    }
    assert short == vllm_options.SHORT
    assert aliases == vllm_options.ALIASES
    assert negations == vllm_options.NEGATIONS
    assert not_off == vllm_options.NOT_OFF_BY_DEFAULT


def test_what_each_value_may_be_is_known(theirs: Theirs) -> None:
    def reads(action: argparse.Action, text: str) -> Any:
        assert callable(action.type)
        with contextlib.suppress(ValueError, TypeError, argparse.ArgumentTypeError):
            return action.type(text)

    with_type = [action for action in theirs.actions if callable(action.type)]
    sizes = {action.dest for action in with_type if reads(action, "3k") == 3000}
    assert sizes == vllm_options.HUMAN_READABLE
    by_name = {action.dest: action for action in theirs.actions}
    for name in vllm_options.NEVER_NONE:
        for text in ("None", ""):
            assert theirs.options(["model", f"--{name}={text}"]) is None, (name, text)
    for name in ("quantization", "speculative_config", "kv_transfer_config"):
        assert reads(by_name[name], "None") is None


# Words → the options among them whose values are compared.
SAME: list[tuple[list[str], list[str]]] = [
    (["--max-num-seqs", "8"], ["max_num_seqs"]),
    (["--max_num_seqs=08"], ["max_num_seqs"]),
    (["--max-num-seqs", "+8"], ["max_num_seqs"]),
    (["--max-num-seqs", " 8 "], ["max_num_seqs"]),
    (["--max-num-seqs", "1_6"], ["max_num_seqs"]),
    (["--max-num-seqs", "4", "--max_num_seqs=8"], ["max_num_seqs"]),
    (["--max-num-se", "8"], ["max_num_seqs"]),
    (["--max-model-len", "128k"], ["max_model_len"]),
    (["--max-model-len", "128K"], ["max_model_len"]),
    (["--max-model-len", "1M"], ["max_model_len"]),
    (["--max-model-len=25.6k"], ["max_model_len"]),
    (["--max-model-len", "131_072"], ["max_model_len"]),
    (["--max-num-batched-tokens", "8k"], ["max_num_batched_tokens"]),
    (["--kv-cache-memory-bytes", "2G"], ["kv_cache_memory_bytes"]),
    (["-tp", "2"], ["tensor_parallel_size"]),
    (["-tp=2"], ["tensor_parallel_size"]),
    (["-t", "2"], ["tensor_parallel_size"]),
    (["--tensor_parallel-size", "2"], ["tensor_parallel_size"]),
    (["-pp", "2", "-dp", "4"], ["pipeline_parallel_size", "data_parallel_size"]),
    (["-ep"], ["enable_expert_parallel"]),
    (["--no-enable-expert-parallel"], ["enable_expert_parallel"]),
    (["--no-enable_prefix-caching"], ["enable_prefix_caching"]),
    (["--enforce-eager", "--no-enforce-eager"], ["enforce_eager"]),
    (["--no-enforce-eager", "--enforce-eager"], ["enforce_eager"]),
    (["--block-size", "32"], ["block_size"]),
    (["--dtype", "float32"], ["dtype"]),
    (["--device-memory-utilization", "0.5"], ["gpu_memory_utilization"]),
    (["--gpu-memory-utilization", "5e-1"], ["gpu_memory_utilization"]),
    (["-q", "fp8"], ["quantization"]),
    (["-qfp8"], ["quantization"]),
    (["--kv-cache-dtype", "fp8"], ["kv_cache_dtype"]),
    (["--num-gpu-blocks-override", "77"], ["num_gpu_blocks_override"]),
    (["-O2"], ["optimization_level"]),
    (["-O", "2"], ["optimization_level"]),
    (["-O=1"], ["optimization_level"]),
    (["-O3", "--optimization-level", "1"], ["optimization_level"]),
    (["--served-model-name", "a", "b"], ["served_model_name"]),
    (["--model", "model"], ["model"]),
    (["--compilation-config", '{"mode": 2, "backend": "eager"}'], ["compilation_config"]),
    (["--compilation_config={\"mode\": 2}"], ["compilation_config"]),
    (["-cc", '{"mode": 2}'], ["compilation_config"]),
    (["-cc.mode", "2"], ["compilation_config"]),
    (["-cc.mode=2"], ["compilation_config"]),
    (["-c.mode=2"], ["compilation_config"]),
    (["--compilation-config.mode", "dynamo_trace_once"], ["compilation_config"]),
    (["--compilation-config.mode", "2", "-cc.backend", "eager"], ["compilation_config"]),
    (["-cc", '{"mode": 2}', "-cc.backend", "eager"], ["compilation_config"]),
    (["--compilation_config.pass_config.fuse_norm_quant", "true"], ["compilation_config"]),
    (["-cc.cudagraph_capture_sizes", "[1,2]"], ["compilation_config"]),
    (["-cc.max_cudagraph_capture_size", "1_0"], ["compilation_config"]),
    (["--compilation-config", '{"max_cudagraph_capture_size": 1k}'], ["compilation_config"]),
    (
        ["-sc", '{"method": "eagle3", "model": "draft", "num_speculative_tokens": 3}'],
        ["speculative_config"],
    ),
    (
        ["-sc.method", "eagle3", "-sc.model=draft", "-sc.num_speculative_tokens", "3"],
        ["speculative_config"],
    ),
    (["--speculative-config", "None"], ["speculative_config"]),
    (["--speculative-config", "null"], ["speculative_config"]),
    (["--additional-config", '{"a": {"b": [1, "x"]}}'], ["additional_config"]),
    (["--additional-config.a.b", "1", "--additional_config.a.c", "x y"], ["additional_config"]),
    (["--additional-config.a", "-1"], ["additional_config"]),
    (["--additional-config.a=b=c.d"], ["additional_config"]),
    (["--additional-config.a", "1.5k"], ["additional_config"]),
    (["--kv-transfer-config", '{"kv_connector": "X", "kv_role": "kv_both"}'], ["kv_transfer_config"]),
    (
        ["--kv-transfer-config.kv_role", "kv_both", "--kv_transfer_config.kv_connector", "X"],
        ["kv_transfer_config"],
    ),
    (["--hf-overrides.rope_theta", "1000"], ["hf_overrides"]),
]  # fmt: skip


@pytest.mark.usefixtures("_models")
@pytest.mark.parametrize(("words", "names"), SAME, ids=[" ".join(words) for words, _ in SAME])
def test_it_means_the_same(theirs: Theirs, words: list[str], names: list[str]) -> None:
    model = [] if "--model" in words else ["model"]
    assert_same(theirs, [*model, *words], names)


def assert_same(theirs: Theirs, words: list[str], names: list[str]) -> None:
    expected, read = theirs.options(words), ours(words)
    assert expected is not None
    assert read is not None
    for name in names:
        if name == "optimization_level":  # a word of vLLM's until it starts
            expected[name] = int(expected[name])
        assert agrees(read.get(name), expected[name], name), (name, read.get(name), expected[name])


def agrees(read: Any, expected: Any, name: str) -> bool:
    """Whether they are equal; of JSON options, whether all that was given says so."""
    if isinstance(read, dict) and isinstance(expected, dict):
        # Lists that were not given, and defaults that are written in.
        added = {"neuron_config", "max_model_len", "draft_tensor_parallel_size"} - expected.keys()
        return all(
            agrees(value, expected.get(key), key) for key, value in read.items() if key not in added
        )
    return bool(read == expected)


# Refused by both. Beside these, vLLM refuses options it has not heard of, which are kept here for the
# sake of newer releases and plugins.
REFUSED: list[list[str]] = [
    ["--max-num-seqs", "8k"],
    ["--max-num-seqs", "8.0"],
    ["--max-num-seqs", "many"],
    ["--max-num-seqs", ""],
    ["--max-num-seqs"],
    ["--max-num-seqs", "4", "5"],
    ["--max-num-seqs", "-tp", "2"],
    ["--max-num-s", "4"],
    ["--max-model-len", "1.5K"],
    ["--max-model-len", "1 k"],
    ["--max-model-len", "8Ki"],
    ["--block-size", "None"],
    ["--dtype", "None"],
    ["--dtype", "int3"],
    ["--enforce-eager", "true"],
    ["--enforce-eager=true"],
    ["--no-headless"],
    ["--no-disable-log-stats"],
    ["-p", "1"],
    ["-x", "1"],
    ["-O"],
    ["--help"],
    ["--compilation-config", "{'mode': 2}"],
    ["--compilation-config", '{"mode": 2} x'],
    ["--compilation-config", ""],
    ["--compilation-config", "mode=2"],
    ["--model", "other", "--block-size", "32", "third"],
    ["--config"],
    ["--config", "absent.yaml"],
    ["--config", "model/config.json"],
]


@pytest.mark.usefixtures("_models")
@pytest.mark.parametrize("words", REFUSED, ids=" ".join)
def test_it_is_refused_by_both(theirs: Theirs, words: list[str]) -> None:
    for line in ([*words], ["model", *words]):
        if line[0] == "model" or "--model" in words:
            with contextlib.suppress(IndexError, FileNotFoundError):
                assert theirs.options(line) is None
            assert ours(line) is None


@pytest.mark.usefixtures("_models")
def test_beside_a_file_the_model_stands_in_front(theirs: Theirs) -> None:
    Path("serve.yaml").write_text("block-size: 32\n")
    for words in (["--seed", "1", "model", "--config", "serve.yaml"], ["--config", "serve.yaml"]):
        assert theirs.options(words) is None
        assert ours(words) is None
    for words in (
        ["--seed", "1", "--model", "model", "--config", "serve.yaml"],
        ["model", "--config", "serve.yaml", "--seed", "1"],
    ):
        assert_same(theirs, words, ["block_size", "seed", "model"])


FILES = [
    ("max-num-seqs: 16", [], ["max_num_seqs"]),
    ("max_num_seqs: 16", ["--max-num-seqs", "4"], ["max_num_seqs"]),
    ("max-num-seqs: '0016'", [], ["max_num_seqs"]),
    ("max-num-se: 16", [], ["max_num_seqs"]),
    ("max-model-len: 131_072", [], ["max_model_len"]),
    ("max-model-len: 128K", [], ["max_model_len"]),
    ("enforce-eager: yes", [], ["enforce_eager"]),
    ("no-enforce-eager: true", ["--enforce-eager"], ["enforce_eager"]),
    ("enforce-eager: true", ["--no-enforce-eager"], ["enforce_eager"]),
    ("served-model-name: [a, b]", [], ["served_model_name"]),
    ("served-model-name: a", [], ["served_model_name"]),
    ("compilation-config: {mode: 2}", [], ["compilation_config"]),
    ("compilation_config:\n  mode: 2\n  backend: eager\n", [], ["compilation_config"]),
    ("compilation-config: '{\"mode\": 2}'", [], ["compilation_config"]),
    ("compilation-config.mode: 2", [], ["compilation_config"]),
    ("compilation-config.mode: 2", ["--compilation_config.backend", "eager"], ["compilation_config"]),
    ("compilation-config: {mode: 2}", ["-cc.backend", "eager"], ["compilation_config"]),
    (
        "speculative-config: {method: eagle3, model: draft, num_speculative_tokens: 3}",
        [],
        ["speculative_config"],
    ),
    ("additional-config: {a: {b: [1, 2]}}", [], ["additional_config"]),
    ("tensor-parallel-size: 2", ["-tp", "4"], ["tensor_parallel_size"]),
    ("config: other.yaml\nblock-size: 32", [], ["block_size", "config_format"]),
    ("gpu-memory-utilization: .5", [], ["gpu_memory_utilization"]),
]  # fmt: skip


@pytest.mark.usefixtures("_models")
@pytest.mark.parametrize(("text", "words", "names"), FILES)
def test_a_config_file_means_the_same(
    theirs: Theirs, text: str, words: list[str], names: list[str]
) -> None:
    Path("serve.yaml").write_text(f"{text}\nmodel: model\n")
    for model in ([], ["model"]):
        line = [*model, "--config", "serve.yaml", *words]
        given = [name for name in names if name != "config_format"]
        assert_same(theirs, line, [*given, "model"])
        assert "config_format" not in parse_vllm_command(["vllm", "serve", *line]).options


@pytest.mark.usefixtures("_models")
def test_a_switch_that_a_file_turns_off_in_vain_stays_on(theirs: Theirs) -> None:
    Path("serve.yaml").write_text("model: model\nasync-scheduling: false\n")
    words = ["--config", "serve.yaml"]
    unset = theirs.options(["model"])
    read, expected = ours(words), theirs.options(words)
    assert unset is not None
    assert expected is not None
    assert read is not None
    assert expected["async_scheduling"] == unset["async_scheduling"]
    assert "async_scheduling" not in read


VALUES = {
    "max_num_seqs": st.integers(1, 256),
    "max_model_len": st.integers(1, 1 << 20),
    "block_size": st.sampled_from([16, 32, 64, 128]),
    "max_num_batched_tokens": st.integers(1 << 20, 1 << 21),
    "tensor_parallel_size": st.sampled_from([1, 2, 4, 8]),
    "num_gpu_blocks_override": st.integers(1, 1 << 30),
    "pipeline_parallel_size": st.sampled_from([1, 2]),
}
SHORTS = {"tensor_parallel_size": "-tp", "compilation_config": "-cc"}
SWITCHES = ["enforce_eager", "enable_prefix_caching", "enable_expert_parallel"]
PARTS = {"mode": st.integers(0, 2), "backend": st.sampled_from(["eager", "inductor"])}


@st.composite
def spelled_numbers(draw: st.DrawFn, number: int, human: bool) -> str:
    texts = [str(number), f"+{number}", f"0{number}", f" {number}", f"{number:_}"]
    if human and number % 1024 == 0:
        texts.append(f"{number // 1024}K")
    if human and number % 1000 == 0:
        texts.append(f"{number // 1000}k")
    return draw(st.sampled_from(texts))


@st.composite
def spelled_names(draw: st.DrawFn, name: str) -> str:
    return "".join(draw(st.sampled_from("-_")) if c == "_" else c for c in name)


@st.composite
def command_lines(draw: st.DrawFn) -> tuple[list[str], dict[str, Any], list[str]]:
    """Words, what a `--config` file beside them says, and the options they give."""
    groups: list[list[str]] = []
    in_file: dict[str, Any] = {}
    names = draw(st.lists(st.sampled_from([*VALUES]), unique=True))
    for name in names:
        number = draw(VALUES[name])
        text = draw(spelled_numbers(number, name in vllm_options.HUMAN_READABLE))
        where = draw(st.sampled_from(["line", "file", "both"]))
        if where != "line":
            in_file[draw(spelled_names(name))] = draw(st.sampled_from([number, text]))
        if where != "file":
            option = SHORTS.get(name) if draw(st.booleans()) else None
            option = option or f"--{draw(spelled_names(name))}"
            groups.append(draw(st.sampled_from([[option, text], [f"{option}={text}"]])))
    for name in draw(st.lists(st.sampled_from(SWITCHES), unique=True)):
        for _ in range(draw(st.integers(1, 2))):
            prefix = draw(st.sampled_from(["--", "--no-", "--no_"]))
            groups.append([f"{prefix}{draw(spelled_names(name))}"])
        names.append(name)
    parts = draw(st.fixed_dictionaries({}, optional=PARTS))
    if parts:
        names.append("compilation_config")
        option = draw(st.sampled_from(["-cc", f"--{draw(spelled_names('compilation_config'))}"]))
        if draw(st.booleans()):
            groups.append([option, json.dumps(parts)])
        else:
            groups += [[f"{option}.{part}", str(value)] for part, value in parts.items()]
    groups = draw(st.permutations(groups))
    # Beside a file the model has to stand in front.
    place = 0 if in_file else draw(st.integers(0, len(groups)))
    groups = [*groups[:place], ["model"], *groups[place:]]
    return [word for group in groups for word in group], in_file, names


@pytest.mark.usefixtures("_models")
@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(command_lines())
def test_any_mixture_of_spellings_means_the_same(
    theirs: Theirs, line: tuple[list[str], dict[str, Any], list[str]]
) -> None:
    words, in_file, names = line
    if in_file:
        Path("mixed.yaml").write_text(yaml.safe_dump(in_file))
        words = [*words, "--config", "mixed.yaml"]
    assert_same(theirs, words, names)
