"""The command line as a user starts it, and small projects to start it in."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jsonschema
import pytest
import yaml

from neffbuild.cli.main import main

REPOSITORY = Path(__file__).parents[2]
SCHEMAS = REPOSITORY / "docs" / "schemas"
# A toolchain in a package of its own that builds in milliseconds, without torch.
PLUGIN = REPOSITORY / "tests" / "farm" / "plugin"
for folder in (PLUGIN, REPOSITORY / "tests" / "neuronx"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))

MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16384,
    "vocab_size": 1024,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
DRAFT: dict[str, Any] = {**MODEL, "num_hidden_layers": 1, "draft_vocab_size": 512}
SERVE: dict[str, Any] = {
    "model": "model",
    "max_model_len": 4096,
    "max_num_seqs": 4,
    "block_size": 32,
    "max_num_batched_tokens": 2048,
    "additional_config": {"neuron_config": {"decode_context_length_buckets": [1024]}},
}
UNITS = [f"decode_b{rows}_ctx{context}" for rows in (1, 2, 4) for context in (1024, 4096)]
EAGLE3 = {"method": "eagle3", "model": "draft", "num_speculative_tokens": 5}
INDUCTOR: dict[str, Any] = {
    "name": "inductor",
    # Pinned, so that a host without them has the same keys.
    "versions": {"torch": "2.13.0", "g++": "12.2.0"},
}
HOSTILE = {"name": "hostile"}


@dataclass(frozen=True)
class Ran:
    """How a command ended."""

    status: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """The one JSON document on stdout, valid against the schema that it names."""
        document: dict[str, Any] = json.loads(self.out)
        jsonschema.validate(document, schema(document["schema"]))
        return document

    @property
    def error(self) -> dict[str, Any]:
        document = self.document
        assert document["schema"] == "neffbuild.error/1"
        error: dict[str, Any] = document["error"]
        return error


@cache
def schema(name: str) -> dict[str, Any]:
    """The published schema of `neffbuild.plan/1` and so on."""
    document: dict[str, Any] = json.loads(
        (SCHEMAS / f"{name.replace('/', '-')}.json").read_text(encoding="utf-8")
    )
    jsonschema.Draft202012Validator.check_schema(document)
    return document


class Project:
    """A folder with models and configs, a cache of its own, and an environment with nothing in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.cache = root / "cache"
        for name, document in (("model", MODEL), ("draft", DRAFT)):
            (root / name).mkdir(parents=True)
            (root / name / "config.json").write_text(json.dumps(document), encoding="utf-8")
        for name in ("tmp", "home"):
            (root / name).mkdir()
        self.environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(PLUGIN),
            "HOME": str(root / "home"),
            "TMPDIR": str(root / "tmp"),
            "NEFFBUILD_CACHE": str(self.cache),
        }

    def write(
        self,
        name: str = "config.yaml",
        *,
        toolchain: Mapping[str, Any] = HOSTILE,
        sections: Mapping[str, Any] | None = None,
        **serve: Any,
    ) -> str:
        """Write a config; its name."""
        options = {key: value for key, value in {**SERVE, **serve}.items() if value is not ...}
        document = {"serve": options, "toolchain": dict(toolchain), **(sections or {})}
        (self.root / name).write_text(yaml.safe_dump(document), encoding="utf-8")
        return name

    def start(
        self,
        *words: str,
        cwd: Path | None = None,
        prefix: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*prefix, sys.executable, "-P", "-m", "neffbuild.cli.main", *words],
            cwd=cwd or self.root,
            env={**self.environment, **(env or {})},
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
        )

    def run(self, *words: str, **options: Any) -> Ran:
        """Run `neffbuild …` in a process of its own. Nothing a user does may show a traceback of it
        (one in a failed unit's output is shown indented)."""
        with self.start(*words, **options) as process:
            out, err = (part or b"" for part in process.communicate(timeout=120))
        assert not any(line.startswith(b"Traceback") for line in err.splitlines()), err.decode()
        return Ran(process.returncode, out.decode(), err.decode())

    def call(self, *words: str, env: Mapping[str, str] | None = None) -> Ran:
        """The same in this process, for what depends on words, environment and files alone: much faster."""
        streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2)]
        logger = logging.getLogger("neffbuild")
        before = logger.handlers[:], logger.level, logger.propagate
        try:
            with (
                contextlib.chdir(self.root),
                patch.dict(os.environ, {**self.environment, **(env or {})}, clear=True),
                patch.object(sys, "argv", ["neffbuild", *words]),
                contextlib.redirect_stdout(streams[0]),
                contextlib.redirect_stderr(streams[1]),
                pytest.raises(SystemExit) as ended,
            ):
                main()
        finally:
            logger.handlers[:], logger.level, logger.propagate = before
        for stream in streams:
            stream.seek(0)
        status = ended.value.code
        assert isinstance(status, int)
        return Ran(status, streams[0].read(), streams[1].read())

    def keys(self, *words: str, **options: Any) -> list[str]:
        """The keys that `neffbuild plan … --json` answers in a process of its own, in order."""
        return self.keys_in(self.run("plan", "--json", *words, **options))

    def keys_in(self, ran: Ran) -> list[str]:
        """The keys of a plan that was answered as JSON."""
        assert ran.status == 0, ran
        keys = [unit["key"] for unit in ran.document["units"]]
        assert keys
        assert all(keys)
        return keys


def order(folder: Path, seconds: float = 0, **behaviour: str) -> str:
    """Tell the toolchain of the tests how to misbehave, `b2_ctx1024="exit_70"`; the value for
    `serve.control`."""
    named = {f"decode_{name}": what for name, what in behaviour.items()}
    control = folder / "control.json"
    control.write_text(json.dumps({"seconds": seconds, "behaviour": named}), encoding="utf-8")
    return str(control)


def as_another_user(*writable: Path, uid: int = 65534) -> list[str] | None:
    """What to put before a command to run it as a user who owns nothing but `writable`; None where
    this user may not. It keeps the right to read: the interpreter may be in a home folder."""
    if os.getuid() != 0:
        return None
    for path in writable:
        os.chown(path, uid, uid)
    keep = "-all,+dac_read_search"
    return [
        "setpriv",
        f"--reuid={uid}",
        f"--regid={uid}",
        "--clear-groups",
        f"--inh-caps={keep}",
        f"--ambient-caps={keep}",
        f"--bounding-set={keep}",
    ]
