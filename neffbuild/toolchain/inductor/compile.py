"""Compiling a captured graph with AOTInductor, nothing left outside the folders given.

What is worked around here, and was seen to be needed for it, is torch's: `-march` alone does not hold
the instruction set, paths end up in the binary, header caches go to the temporary folder of the user.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch._inductor
from torch._guards import tracing
from torch._inductor import codecache, cpu_vec_isa
from torch.export import Dim, ExportedProgram, export

from neffbuild.config.errors import ToolchainRefusal
from neffbuild.toolchain.base import Artifact
from neffbuild.toolchain.inductor.binding import BINDING_FILE, BindingFile, Requirements
from neffbuild.toolchain.inductor.capture import InductorGraph
from neffbuild.toolchain.inductor.cpu_level import CpuLevel
from neffbuild.toolchain.inductor.identity import COMPILER
from neffbuild.toolchain.inductor.options import PROGRAM, inductor_options
from neffbuild.toolchain.inductor.symbols import symbolic_dimensions

_VECTOR_CLASSES = {"avx2": cpu_vec_isa.VecAVX2, "avx512": cpu_vec_isa.VecAVX512}

_ENVIRONMENT_PREFIXES = ("TORCHINDUCTOR_", "AOT_INDUCTOR_", "AOTINDUCTOR_")
_HARMLESS_ENVIRONMENT = frozenset(
    {
        "TORCHINDUCTOR_CACHE_DIR",
        "TORCHINDUCTOR_COMPILE_THREADS",
        "TORCHINDUCTOR_VEC_ISA_OK",
        "TORCHINDUCTOR_CPP_MARCH",
        # Of an option that every artifact is built with.
        "TORCHINDUCTOR_CPP_DYNAMIC_THREADS",
    }
)


def compile_graph(
    graph: InductorGraph,
    level: CpuLevel,
    flags: Sequence[str],
    scratch: Path,
    shared: Path | None = None,
) -> Artifact:
    """Compile into `scratch`; headers are precompiled into `shared` where given, and reused there.

    `flags` are the config's `toolchain.flags`. The files are the shared object, its metadata, the list
    of custom ops it calls where there are any, and the input binding. Equal graphs, options and tool
    versions give equal bytes, whatever the folders.

    Changes process-wide state (environment, working options of inductor) while it runs. Raises
    `ToolchainRefusal` where the environment would change the artifact, and for folders whose names
    inductor cannot pass to the compiler.
    """
    _refuse_environment()
    _refuse_folders(scratch, shared or scratch)
    output = scratch / PROGRAM
    options = inductor_options(level, flags) | {
        "aot_inductor.output_path": str(output),
        "aot_inductor.metadata": {},
        # Worth their price from the fourth unit on. Torch checksums them with openssl.
        "aot_inductor.precompile_headers": shared is not None
        and shutil.which("openssl") is not None,
        "compile_threads": 1,
        "cpp.cxx": (None, COMPILER),
        "cpp.vec_isa_ok": True,
    }
    started = time.monotonic()
    # In a backend Dynamo is still tracing: what export assumes must not become a guard of its frame.
    with tracing(None), _contained(scratch, shared or scratch), _vector_class(level):
        program = _exported(graph)
        exported = time.monotonic()
        torch._inductor.aot_compile(
            program.module(check_guards=False), graph.example_inputs, options=options
        )
    _check_vector_class(output, level)
    requires = Requirements(torch.__version__, level.features, graph.twins)
    (output / BINDING_FILE).write_bytes(BindingFile(graph.binding, requires).to_json())
    return Artifact(
        files={path.name: path for path in _artifact_files(output)},
        statistics={
            "export_seconds": exported - started,
            "program_seconds": time.monotonic() - exported,
            **_names(graph),
        },
    )


def _names(graph: InductorGraph) -> dict[str, Any]:
    """What tells a miss that only layer names are to blame for."""
    if not graph.names:
        return {}
    return {"layer_names": list(graph.names), "nameless_digest": graph.nameless_digest}


def _exported(graph: InductorGraph) -> ExportedProgram:
    """Export with the graph's own symbolic sizes kept symbolic."""
    examples = [
        node.meta["example_value"] for node in graph.module.graph.find_nodes(op="placeholder")
    ]
    symbolic = [symbolic_dimensions(example) for example in examples]
    program = export(
        graph.module,
        graph.example_inputs,
        dynamic_shapes=tuple(dict.fromkeys(dims, Dim.AUTO) or None for dims in symbolic),
        strict=False,
    )
    # Constants of the graph have become placeholders too.
    given = frozenset(program.graph_signature.user_inputs)
    inputs = [
        node.meta["val"]
        for node in program.graph.find_nodes(op="placeholder")
        if node.name in given
    ]
    for value, dims, spec in zip(inputs, symbolic, graph.binding.inputs, strict=True):
        if lost := dims.keys() - symbolic_dimensions(value):
            raise ToolchainRefusal(
                f"the program would hold for one size of dimension {min(lost)} of {spec.name} only, "
                "where the graph was captured for many",
                hint="capture it with that size static",
            )
    return program


def _refuse_environment() -> None:
    """Variables inductor reads its defaults from: they are in no recipe."""
    for name in sorted(os.environ):
        if name.startswith(_ENVIRONMENT_PREFIXES) and name not in _HARMLESS_ENVIRONMENT:
            raise ToolchainRefusal(
                f"the environment sets {name}, which may change the program but is not in its key",
                field=name,
                value=os.environ[name],
                hint=f"unset {name}; toolchain.flags takes the options that may be set",
            )


def _refuse_folders(*folders: Path) -> None:
    """Inductor builds command lines without quoting."""
    for folder in folders:
        if re.search(r"[\s'\"\\]", str(folder)):
            raise ToolchainRefusal(
                f"inductor cannot compile in {str(folder)!r}: it takes no folder with spaces, quotes or "
                "backslashes in its name",
                value=str(folder),
                hint="set TMPDIR to another folder",
            )


@contextmanager
def _contained(scratch: Path, shared: Path) -> Iterator[None]:
    """Everything inductor and the compiler write goes below `scratch`, headers below `shared`."""
    temporary, headers = scratch / "tmp", shared / "precompiled_headers"
    tools = _compiler_wrapper(scratch, shared)
    temporary.mkdir(exist_ok=True)
    # Inductor remembers per process which headers it precompiled, wherever that was.
    codecache._precompile_header.cache_clear()
    with ExitStack() as stack:
        stack.enter_context(_environment("TMPDIR", str(temporary)))
        stack.enter_context(_environment("TORCHINDUCTOR_CACHE_DIR", str(scratch / "cache")))
        stack.enter_context(
            _environment("PATH", os.pathsep.join([str(tools), os.environ.get("PATH", "")]))
        )
        stack.enter_context(_attribute(tempfile, "tempdir", str(temporary)))
        stack.enter_context(_attribute(codecache, "_HEADER_DIR", str(headers)))
        stack.enter_context(_attribute(codecache, "_HEADER_LOCK_DIR", str(headers / "locks")))
        try:
            yield
        finally:
            codecache._precompile_header.cache_clear()


def _compiler_wrapper(scratch: Path, shared: Path) -> Path:
    """A folder with a `g++` that keeps paths out of what it writes; the name tells inductor its kind.

    A precompiled header gets its name when it is whole: units share it, and one of them may be killed.
    """
    compiler = shutil.which(COMPILER)
    if compiler is None:
        raise ToolchainRefusal(
            f"no {COMPILER} on PATH", hint=f"install {COMPILER}, or compile on a host that has it"
        )
    folders = {shared: "farm", scratch: "unit", Path(torch.__file__).parent: "torch"}
    # Of two folders that hold a path gcc takes the map given last.
    maps = [f"-ffile-prefix-map={path}={name}" for path, name in folders.items()]
    command = f'{shlex.quote(compiler)} "$@" {shlex.join([*maps, "-s"])}'
    wrapper = scratch / "bin" / COMPILER
    wrapper.parent.mkdir(exist_ok=True)
    wrapper.write_text(
        "#!/bin/sh\n"
        "for output; do :; done\n"
        'case "$output" in\n'
        f'*.gch) {command} -o "$output.$$" && mv "$output.$$" "$output" ;;\n'
        f"*) exec {command} ;;\n"
        "esac\n"
    )
    wrapper.chmod(0o755)
    return wrapper.parent


@contextmanager
def _vector_class(level: CpuLevel) -> Iterator[None]:
    """Hold inductor to one plain vector class.

    Left alone it takes the best class of this host that has the width asked for, which may be one with
    VNNI or bf16 instructions the level lacks; and none at all on a host narrower than the level.
    """
    vector_class = _VECTOR_CLASSES[level.vector_class]()
    with _attribute(cpu_vec_isa, "valid_vec_isa_list", lambda: [vector_class]):
        yield


def _check_vector_class(output: Path, level: CpuLevel) -> None:
    metadata = json.loads((output / f"{PROGRAM}.wrapper_metadata.json").read_text())
    if metadata["AOTI_CPU_ISA"] != level.vector_class.upper():
        raise ToolchainRefusal(
            f"inductor generated code for {metadata['AOTI_CPU_ISA']}, {level.target} takes "
            f"{level.vector_class.upper()}",
            field="toolchain.target",
            value=level.target,
        )


def _artifact_files(output: Path) -> Iterator[Path]:
    names = (f"{PROGRAM}.wrapper.so", f"{PROGRAM}.wrapper_metadata.json", BINDING_FILE)
    yield from (output / name for name in names)
    # Read by the program's loader, which looks for it beside the shared object.
    custom_ops = output / f"{PROGRAM}.wrapper.json"
    if custom_ops.exists():
        yield custom_ops


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextmanager
def _attribute(owner: Any, name: str, value: object) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
