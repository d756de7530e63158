"""Capturing and compiling a unit through TorchNeuron: `torch.compile(step, backend="neuron")`, in its
compile-only mode, into a NEFF cache of the unit's own.

The step is the reference decoder's, on the device `neuron`, which TorchNeuron registers. What it files is
the unit's program, and is stored under TorchNeuron's own name too, so that TorchNeuron finds it. A process of
its own does it: TorchNeuron reads its variables when it is imported.

Its public sources and pages name the variables and the cache; what compile-only asks of a host is not among
it. Its one user that was seen sets it where there is no device, so none is asked for here.

Never run against a real TorchNeuron.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from neffbuild.cache.canonical import (
    canonical_json,
    digest_document,
    parse_json,
    require_object,
)
from neffbuild.cache.layouts.layout import entry_file
from neffbuild.cache.layouts.torch_neuronx import NAME, TorchNeuronx
from neffbuild.cache.layouts.tree import Tree
from neffbuild.config.build import BuildConfig
from neffbuild.config.model import ModelConfig
from neffbuild.config.serve import ServeConfig
from neffbuild.grid.shapes import DecodeShape, shape_from_document
from neffbuild.toolchain.base import Artifact, Unit
from neffbuild.toolchain.failures import CompilerFailure, FailureClass
from neffbuild.toolchain.neuronx.command import compiler_variables
from neffbuild.toolchain.neuronx.compile import neff_facts
from neffbuild.toolchain.neuronx.engine_start import run_module
from neffbuild.toolchain.neuronx.errors import failure_of
from neffbuild.toolchain.neuronx.neff import NeffError, read_neff_file
from neffbuild.toolchain.neuronx.program import Ended

CACHE = "TORCH_NEURONX_NEFF_CACHE_DIR"

_PROGRAM = "neffbuild.toolchain.neuronx.torch_neuronx_process"
_NEFF = "module.neff"
_LONGEST_LINE = 300
_OF_THE_COMPILER = re.compile(r"\[F1(?:34|37|39)\]|NCC_[A-Z]{3,6}\d{3}")
_COMPILER_STATUS = re.compile(r"neuronx-cc compilation\b.*?\bwith exit code (\d+)")
_NOTHING_TO_READ = "Failed to read compiled NEFF file"
_SEE_LOG = "what it said before is in the unit's log"
_MEMORY = f"a part of it may have been killed, for want of memory or disk; {_SEE_LOG}"


def build(unit: Unit, scratch: Path) -> Artifact:
    """Compile a unit below `scratch`.

    Raises `CompilerFailure` for anything but one whole NEFF in TorchNeuron's cache.
    """
    cache, told = scratch / "neffs", compiler_variables(unit.recipe["toolchain"])
    cache.mkdir()
    request = scratch / "unit.json"
    request.write_bytes(canonical_json(_request(unit)))
    started = time.monotonic()
    ended = run_module(_PROGRAM, request, {**told, **_confinement(scratch, cache)}, scratch)
    seconds = time.monotonic() - started
    if ended.status != 0:
        raise _failure(ended)
    place = _one_place(cache)
    return Artifact(
        files={_NEFF: cache / place, entry_file(NAME, place): cache / place},
        statistics={
            "compiler_seconds": seconds,
            "engine_keys": [Path(place).stem],
            "engine_environment": told,
            "neff": _facts(cache / place),
        },
        # TorchNeuron's key is a hash of the lowered graph, target, level and flags; the graph stays inside.
        graph_digest=digest_document({NAME: Path(place).stem}),
    )


def _request(unit: Unit) -> dict[str, Any]:
    """What a step of the reference decoder is made from; `requested` reads it again."""
    config = unit.config
    models = {"model": config.model, "draft_model": config.draft_model}
    return {
        "serve": config.serve.model_dump(mode="json"),
        **{name: dict(one.architecture) if one else None for name, one in models.items()},
        "shape": unit.shape.document(),
    }


def requested(data: bytes) -> tuple[BuildConfig, DecodeShape]:
    """The config (of it, what a step is made from) and the shape that a request names."""
    document = require_object(parse_json(data, "a unit to compile"))
    draft = document["draft_model"]
    config = BuildConfig(
        source="a unit to compile",
        serve=ServeConfig.model_validate(document["serve"]),
        model=ModelConfig("model", document["model"]),
        draft_model=ModelConfig("draft", draft) if draft else None,
    )
    shape = shape_from_document(document["shape"])
    assert isinstance(shape, DecodeShape)  # all that the reference decoder has
    return config, shape


def _confinement(scratch: Path, cache: Path) -> dict[str, str]:
    """What makes it compile and do nothing else, with all that it writes in the scratch folder. A failure
    shall not run the step without a compiler, nor an older capture be taken from torch's own cache."""
    return {
        "TORCH_NEURONX_COMPILE_ONLY": "1",
        "TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION": "1",
        CACHE: str(cache),
        "TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR": str(scratch / "local"),
        "TORCH_NEURONX_DEBUG_DIR": str(scratch / "debug"),
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),
    }


def _one_place(cache: Path) -> str:
    """The one NEFF that a compile has left, by its place in the cache."""
    layout, tree = TorchNeuronx(), Tree(cache)
    places = sorted(layout.places(tree))
    if not places:
        raise CompilerFailure(
            "TorchNeuron ended well and has filed no NEFF: it compiled nothing, or ran the step without "
            "its compiler",
            hint=_SEE_LOG,
        )
    if len(places) > 1:
        raise CompilerFailure(
            f"TorchNeuron has filed {len(places)} NEFFs for one step, of which one at most is its "
            f"program: {', '.join(places[:3])}{', …' if len(places) > 3 else ''}",
            hint="the step was not compiled as one graph, or operators were compiled one by one; "
            + _SEE_LOG,
        )
    if layout.place_of(places[0]) is None:
        raise CompilerFailure(
            f"TorchNeuron has filed {places[0]}, which is not named ab/cd/<32 hex digits>.neff",
            hint="its cache has another layout than is known here: report its version",
        )
    return places[0]


def _facts(neff: Path) -> Mapping[str, Any]:
    try:
        return neff_facts(read_neff_file(neff))
    except NeffError as error:
        raise CompilerFailure(
            f"TorchNeuron ended well, but {neff.name} is no whole NEFF: {error.message}",
            hint=_MEMORY,
        ) from error


def _failure(ended: Ended) -> CompilerFailure:
    status, said = ended.status, ended.output
    if found := _COMPILER_STATUS.search(said):
        return failure_of(int(found[1]) or 1, said)
    if _OF_THE_COMPILER.search(said):
        return failure_of(1, said)
    if status in (-signal.SIGKILL, 128 + signal.SIGKILL):
        return CompilerFailure(
            "TorchNeuron was killed, most likely for want of memory",
            hint="use fewer workers (`--workers`), or a machine with more memory",
            failure=FailureClass.OUT_OF_MEMORY,
        )
    how = f"by signal {-status}" if status < 0 else f"with exit code {status}"
    last = " ".join((said.rstrip().rsplit("\n", 1)[-1] or "it printed nothing").split())
    return CompilerFailure(
        f"TorchNeuron ended {how}: {last[:_LONGEST_LINE]}",
        # It takes a compiler that a signal ended for one that ended well.
        hint=_MEMORY if _NOTHING_TO_READ in said else _SEE_LOG,
        failure=FailureClass.SIGNAL if status < 0 else FailureClass.COMPILER_ERROR,
    )
