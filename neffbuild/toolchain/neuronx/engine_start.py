"""Running one start of vLLM Neuron in a clean process, and what its end means."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from neffbuild.config.model import ModelConfig
from neffbuild.toolchain.failures import CompilerFailure, FailureClass
from neffbuild.toolchain.neuronx.errors import failure_of
from neffbuild.toolchain.neuronx.program import Ended, run_program

_PROGRAM = "neffbuild.toolchain.neuronx.engine_process"
"""Of the end of what the engine prints: what is wrong comes last, below tracebacks of every rank."""
_LONGEST_LINE = 300

_OF_THE_COMPILER = re.compile(
    r"neuronx-cc compilation failed with (-?\d+)|\[F1(?:34|37|39)\]|NCC_[A-Z]{3,6}\d{3}"
)
_SEE_LOG = "what it said before is in the unit's log"
_SAID = (
    # What it means comes before what it leads to: any exception ends in FATAL.
    (
        re.compile(r"Logical Neuron Core\(s\) not available"),
        FailureClass.COMPILER_ERROR,
        "end what else runs on this host's device, or give the farm cores of its own "
        "(NEURON_RT_VISIBLE_CORES), tensor_parallel_size of them",
    ),
    (re.compile(r"Shared compilation timeout after"), FailureClass.TIMEOUT, _SEE_LOG),
    (re.compile(r"Lock holder process died"), FailureClass.COMPILER_ERROR, _SEE_LOG),
    (re.compile(r"Model graph extraction failed for"), FailureClass.COMPILER_ERROR, _SEE_LOG),
    (re.compile(r"Parallel trace fork failed \(rank="), FailureClass.COMPILER_ERROR, _SEE_LOG),
    (re.compile(r"\bFATAL:"), FailureClass.COMPILER_ERROR, _SEE_LOG),
)


def model_folder(model: ModelConfig, folder: Path) -> str:
    """Make a folder with the architecture that was planned for and, where they are on this host, the
    model's other files: some models read constants of their graphs from the checkpoint."""
    folder.mkdir()
    if model.folder is not None and model.folder.is_dir():
        for path in sorted(model.folder.iterdir()):
            if path.name != "config.json":
                (folder / path.name).symlink_to(path.absolute())
    document = json.dumps(dict(model.architecture), indent=1)
    (folder / "config.json").write_text(document, encoding="utf-8")
    return str(folder)


def run_engine(options: Mapping[str, Any], environment: Mapping[str, str], folder: Path) -> Ended:
    """Start vLLM with `options` in `folder` and wait for its end. It sees this process's environment, which
    is a worker's, and `environment`. What it prints goes to this process's output too."""
    request = folder / "options.json"
    request.write_text(json.dumps(options, indent=1), encoding="utf-8")
    return run_module(_PROGRAM, request, environment, folder)


def run_module(module: str, request: Path, environment: Mapping[str, str], folder: Path) -> Ended:
    """Run a module as a program of its own in `folder`, told of the file `request`, and wait for its end;
    environment and output as in `run_engine`."""
    return run_program(
        [sys.executable, "-P", "-u", "-m", module, str(request)],
        folder,
        {
            **os.environ,
            # It imports what this process would.
            "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
            **environment,
        },
    )


def engine_failure(ended: Ended) -> CompilerFailure | None:
    """Why a start left something undone, from what it printed and its exit status; None where it ended
    well."""
    if ended.status == 0:
        return None
    if found := _last(_OF_THE_COMPILER, ended.output):
        return failure_of(int(found[1] or 1), ended.output)
    for words, failure, hint in _SAID:
        if found := _last(words, ended.output):
            line = _line(ended.output, found.start())
            return CompilerFailure(
                f"vLLM Neuron ended {_how(ended.status)}: {line}", hint=hint, failure=failure
            )
    if ended.status in (-signal.SIGKILL, 128 + signal.SIGKILL):
        return CompilerFailure(
            f"vLLM Neuron ended {_how(ended.status)}, most likely for want of memory",
            hint="use fewer workers (`--workers`), or a machine with more memory",
            failure=FailureClass.OUT_OF_MEMORY,
        )
    lines = ended.output.rstrip().rsplit("\n", 1)
    failure = FailureClass.SIGNAL if ended.status < 0 else FailureClass.COMPILER_ERROR
    return CompilerFailure(
        f"vLLM Neuron ended {_how(ended.status)}: {_short(lines[-1]) or 'it printed nothing'}",
        hint=_SEE_LOG,
        failure=failure,
    )


def _last(words: re.Pattern[str], output: str) -> re.Match[str] | None:
    return next(reversed(list(words.finditer(output))), None)


def _line(output: str, place: int) -> str:
    start = output.rfind("\n", 0, place) + 1
    end = output.find("\n", place)
    return _short(output[start : end if end >= 0 else None])


def _short(line: str) -> str:
    line = " ".join(line.split())
    return line if len(line) <= _LONGEST_LINE else f"{line[: _LONGEST_LINE - 1]}…"


def _how(status: int) -> str:
    return f"by signal {-status}" if status < 0 else f"with exit code {status}"
