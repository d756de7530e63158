"""Engines as vLLM starts them, without vLLM: a process that calls the plugin, and one below it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli_samples import PLUGIN, Project
from s3_servers import ENVIRONMENT

ENGINE = """
import json, os, subprocess, sys, threading, time
sys.argv = json.loads(os.environ["ARGUMENTS"])
from neffbuild.runtime.vllm_plugin import register
began = time.monotonic()
register()
took = time.monotonic() - began
below = None
if os.environ.get("BELOW"):
    del os.environ["BELOW"]
    below = json.loads(subprocess.run(
        [sys.executable, "-P", "-c", sys.orig_argv[-1]], stdout=subprocess.PIPE, check=True
    ).stdout)
print(json.dumps({
    "hydration": json.loads(os.environ.get("NEFFBUILD_HYDRATION", "null")),
    "seconds": took,
    "threads": threading.active_count(),
    "modules": sorted(sys.modules),
    "below": below,
}))
"""


@dataclass(frozen=True)
class Started:
    """How an engine's start ended; `answer` is None where it was refused."""

    status: int
    answer: dict[str, Any] | None
    err: str

    @property
    def hydration(self) -> dict[str, Any]:
        assert self.answer is not None, self.err
        hydration: dict[str, Any] = self.answer["hydration"]
        return hydration


class Fleet:
    """A builder with a full cache, and a host whose engines are started."""

    def __init__(self, builder: Project, root: Path) -> None:
        self.builder = builder
        self.root = root
        self.cache = root / "node"
        for name in ("tmp", "runtime"):
            (root / name).mkdir(mode=0o700)
        self.environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(PLUGIN),
            "HOME": str(root),
            "TMPDIR": str(root / "tmp"),
            "XDG_RUNTIME_DIR": str(root / "runtime"),
            "NEFFBUILD_CACHE": str(self.cache),
            **ENVIRONMENT,
        }

    @property
    def reference(self) -> str:
        return f"{self.root}/remote#llama:prod"

    def push(self, url: str, *words: str) -> None:
        ran = self.builder.run("push", "config.yaml", "--to", url, "--tag", "prod", *words,
                               env=ENVIRONMENT)  # fmt: skip
        assert ran.status == 0, ran

    def launch(
        self,
        reference: str | None,
        *,
        arguments: tuple[str, ...] = ("/usr/bin/vllm", "serve", "model"),
        **variables: str,
    ) -> subprocess.Popen[str]:
        """Start an engine; variables without their `NEFFBUILD_`, but BELOW and those that are no
        setting of ours."""
        own: Mapping[str, str] = {
            name
            if name in ("BELOW", "PYTHONPATH", "VLLM_CACHE_ROOT")
            else f"NEFFBUILD_{name}": value
            for name, value in variables.items()
        }
        named = {} if reference is None else {"NEFFBUILD_MANIFEST": reference}
        return subprocess.Popen(
            [sys.executable, "-P", "-c", ENGINE],
            env={**self.environment, **named, **own, "ARGUMENTS": json.dumps(arguments)},
            cwd=self.root,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def start(self, reference: str | None, **options: Any) -> Started:
        return ended(self.launch(reference, **options))

    def whole(self) -> bool:
        """Whether the host's cache has every unit of the config."""
        ran = self.builder.call("plan", "config.yaml", "--check", "--cache", str(self.cache))
        return ran.status == 0


def ended(process: subprocess.Popen[str]) -> Started:
    out, err = process.communicate(timeout=120)
    assert "Traceback" not in err, err
    return Started(process.returncode, json.loads(out) if out else None, err)
