"""Capturing the graph vLLM would hand to its backend, by starting vLLM up to that point.

For a process of its own: vLLM changes its process's environment, threads and logging. Weights are
arguments of the graph, so none are loaded; there is no tokenizer and no network.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

from torch import fx
from torch._dynamo.backends.registry import register_backend

from neffbuild.config.build import BuildConfig
from neffbuild.config.errors import ToolchainRefusal
from neffbuild.toolchain.base import Captured
from neffbuild.toolchain.inductor.capture import capture_graph
from neffbuild.toolchain.inductor.engines import VLLM
from neffbuild.toolchain.inductor.vllm_engine import BACKEND, warm_up_options

_log = logging.getLogger(__name__)
_ENVIRONMENT = {
    # In this process, or the graph would be met in another.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # What was traced before must not stand in for tracing.
    "VLLM_DISABLE_COMPILE_CACHE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


class _Stop(BaseException):
    """Raised when the graph is there; no handler on the way may take it for an error."""


def capture_engine(config: BuildConfig) -> Captured:
    """Start vLLM as the config says and capture the graph of its model.

    The process is not fit for anything but compiling the graph afterwards. Raises `ToolchainRefusal` when
    vLLM refuses the config, or starts without having asked for a program.
    """
    received: list[Captured] = []

    def backend(module: fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> NoReturn:
        received.append(capture_graph(module, example_inputs))
        raise _Stop

    register_backend(backend, name=BACKEND)
    with TemporaryDirectory(prefix="neffbuild-vllm-") as folder, _environment(folder):
        model = Path(folder, "model")
        model.mkdir()
        (model / "config.json").write_text(json.dumps(dict(config.model.architecture)))
        with suppress(_Stop):
            _start(str(model), warm_up_options(config))
        # Some of what is left of the engine computes when it is finalised, which must not be traced.
        gc.collect()
        model_infos = _model_infos(Path(folder))
    if not received:
        raise ToolchainRefusal(
            "vLLM started without asking its backend for a program",
            field="serve.model",
            value=config.model.name,
            hint="does vLLM compile this model? Models without its compile decorator run eagerly",
        )
    return dataclasses.replace(received[0], engine_files=model_infos)


def _model_infos(cache_root: Path) -> dict[str, bytes]:
    """What vLLM found out about model classes, which takes a process of its own that imports torch. It
    keeps that by the digest of the class's source, without paths."""
    return {
        f"{VLLM}/modelinfos/{path.name}": path.read_bytes()
        for path in sorted((cache_root / "modelinfos").glob("*.json"))
    }


@contextmanager
def _environment(folder: str) -> Iterator[None]:
    """vLLM writes variables of its own, which must not be taken for the compile's."""
    before = dict(os.environ)
    os.environ.update(_ENVIRONMENT, VLLM_CACHE_ROOT=folder)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _start(model: str, options: dict[str, Any]) -> None:
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs

    known = {field.name for field in dataclasses.fields(EngineArgs)}
    if unknown := sorted(options.keys() - known):
        _log.warning("not options of vLLM's engine, left out: %s", ", ".join(unknown))
    try:
        LLM(model=model, **{name: options[name] for name in options.keys() & known})
    except (ValueError, TypeError) as error:
        raise ToolchainRefusal(
            f"vLLM refuses the config: {error}", hint="does `vllm serve` start with these options?"
        ) from error
