"""The two routes from a graph to a NEFF, and whose graphs go along them.

`native` is StableHLO, the default of SDK 2.33; `xla` the HLO of PyTorch/XLA, of the releases before and
deprecated since. Graphs come from vLLM Neuron or from our own reference decoder, which only the native
route captures: with torch-mlir, or through torch-neuronx.

Source: vLLM Neuron's "How to choose a compilation route" for SDK 2.33.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from neffbuild.config.build import ToolchainConfig
from neffbuild.config.errors import ConfigError
from neffbuild.toolchain.inductor.vllm_environment import keyed_environment as vllm_variables

NATIVE = "native"
XLA = "xla"
VLLM_NEURON = "vllm-neuron"
REFERENCE = "reference"
TORCH_NEURONX = "torch-neuronx"
OF_REFERENCE_DECODER = (REFERENCE, TORCH_NEURONX)
"""Engines whose graphs are our own decoder's."""
COMPILER = "neuronx-cc"
BACKEND = "VLLM_NEURON_BACKEND"

_BACKENDS = {"neuron_native": NATIVE, "neuron": NATIVE, "vllm_neuron": XLA}
"""What vLLM Neuron's variable means. That of the route xla is what releases before 2.33 called it."""


@dataclass(frozen=True, slots=True)
class Route:
    """A way through the compiler, and whose graphs take it.

    `tools` are those whose versions decide the NEFF; of them `here` run where it is compiled.
    """

    name: str
    engine: str
    tools: tuple[str, ...]
    here: tuple[str, ...] = (COMPILER,)
    graph: str = "module.mlir"
    neff: str = "module.neff"


_ROUTES = (
    # vLLM Neuron lowers with the copy in libtorch-neuronx-lite, whatever torch-neuronx is installed.
    Route(NATIVE, VLLM_NEURON, (COMPILER, "nki", "libtorch-neuronx-lite", "vllm-neuron")),
    # The reference decoder calls no NKI kernel.
    Route(
        NATIVE,
        REFERENCE,
        (COMPILER, "torch", "torch-mlir"),
        here=(COMPILER, "torch", "torch-mlir"),
    ),
    Route(
        NATIVE,
        TORCH_NEURONX,
        (COMPILER, "torch", "torch-neuronx"),
        here=(COMPILER, "torch", "torch-neuronx"),
    ),
    Route(
        XLA,
        VLLM_NEURON,
        (COMPILER, "nki", "torch-neuronx", "vllm-neuron"),
        graph="graph.hlo",
        neff="graph.neff",
    ),
)

# What says how an engine starts, waits, caches and logs.
_INERT = frozenset(
    {
        BACKEND,  # the route is an ingredient of its own
        "VLLM_NEURON_ASSERT_CACHE_HIT",
        "VLLM_NEURON_BARRIER_TIMEOUT",
        "VLLM_NEURON_COMPILATION_TIMEOUT",
        "VLLM_NEURON_CPU_COMPILE",
        "VLLM_NEURON_DISABLE_COMPILE_CACHE",
        "VLLM_NEURON_DISABLE_GRAPH_CAPTURE_BACKEND",
        "VLLM_NEURON_DISABLE_PARALLEL_TRACE",
        "VLLM_NEURON_DISABLE_WARMUP_COMPILE",
        "VLLM_NEURON_NEFF_LOAD_SIGNAL_DIR",
        "VLLM_NEURON_NEFF_LOAD_WAIT_TIMEOUT",
        "VLLM_NEURON_NEFF_LOAD_WAVE_SIZE",
        "VLLM_NEURON_PARALLEL_COMPILE_WORKERS",
        "VLLM_NEURON_REMOTE_CACHE",
        "VLLM_NEURON_SKIP_DECODE_WARMUP",
        "VLLM_NEURON_SKIP_ENCODER_WARMUP",
        "VLLM_NEURON_SKIP_PREFILL_DECODE_WARMUP",
        "VLLM_NEURON_SKIP_PREFILL_WARMUP",
    }
)


def route_of(toolchain: ToolchainConfig, environment: Mapping[str, str]) -> Route:
    """The route and engine of a `toolchain` section: by default native, and vLLM Neuron's graphs.

    Raises `ConfigError` for a route or engine there is not, the two where they do not go together, and
    where the environment has vLLM Neuron take the other route.
    """
    name, engine = toolchain.route or NATIVE, toolchain.engine or VLLM_NEURON
    for field, value, allowed in (
        ("route", name, (NATIVE, XLA)),
        ("engine", engine, (VLLM_NEURON, *OF_REFERENCE_DECODER)),
    ):
        if value not in allowed:
            raise ConfigError(
                f"the neuronx toolchain has no {field} {value!r}; allowed: {', '.join(allowed)}",
                field=f"toolchain.{field}",
                value=value,
            )
    backend = environment.get(BACKEND)
    if engine == VLLM_NEURON and backend and _BACKENDS.get(backend, name) != name:
        raise ConfigError(
            f"{BACKEND} is {backend}, which is the route {_BACKENDS[backend]}; toolchain.route is {name}",
            field="toolchain.route",
            value=name,
            hint=f"let them agree, or unset {BACKEND}",
        )
    for route in _ROUTES:
        if (route.name, route.engine) == (name, engine):
            return route
    raise ConfigError(
        f"the reference decoder is captured on the route {NATIVE} only",
        field="toolchain.route",
        value=name,
        hint=f"set toolchain.route to {NATIVE}, or toolchain.engine to {VLLM_NEURON}",
    )


def keyed_environment(route: Route, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that enter recipes beside flags and target: those that may change what vLLM Neuron
    traces. All of its own and of vLLM's, but what is known to change nothing."""
    if route.engine != VLLM_NEURON:
        return {}
    backend = environment.get(BACKEND)
    # One that is not known here may be another route.
    inert = _INERT - {BACKEND} if backend and backend not in _BACKENDS else _INERT
    keyed = vllm_variables(environment)
    return {name: value for name, value in keyed.items() if name not in inert}
