"""The config that vLLM, and engines built on it, print when they start: one line of their log."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

from neffbuild.grid.engine_lines import at_start


@dataclass(frozen=True, slots=True)
class Settings:
    """The config an engine printed at its start; None where it does not say. `options` are those of the
    serve config that can be read there, by name; `mode` is vLLM's compilation mode (0: compiles nothing).
    """

    version: str
    options: tuple[tuple[str, int | str], ...] = ()
    enforce_eager: bool = False
    mode: int | None = None
    backend: str | None = None
    compile_sizes: tuple[int, ...] = ()
    range_ends: tuple[int, ...] = ()
    capture_sizes: tuple[int, ...] = ()

    @property
    def data_parallel_size(self) -> int:
        """How many engines of one start print it, each for itself."""
        return next((int(value) for name, value in self.options if name == _REPLICAS), 1)

    @property
    def ranges(self) -> frozenset[tuple[int, int]]:
        """Counts of tokens, first and last, that vLLM's own mode compiles a program for each of
        (`CompilationConfig.get_compile_ranges`)."""
        ends = sorted({0, *self.range_ends})
        return frozenset((low + 1, high) for low, high in pairwise(ends))


_N = r"([0-9]{1,9})"
_SETTINGS = re.compile(r"Initializing a V1 LLM engine \(v([\w.+-]{1,100})\) with config: (.*)")
_REPLICAS = "data_parallel_size"
_OPTIONS = {
    "max_model_len": re.compile(rf"\bmax_seq_len={_N}"),
    "tensor_parallel_size": re.compile(rf"\btensor_parallel_size={_N}"),
    "pipeline_parallel_size": re.compile(rf"\bpipeline_parallel_size={_N}"),
    _REPLICAS: re.compile(rf"\bdata_parallel_size={_N}"),
    "decode_context_parallel_size": re.compile(rf"\bdecode_context_parallel_size={_N}"),
    "dtype": re.compile(r"\bdtype=torch\.(\w{1,20})"),
    "num_speculative_tokens": re.compile(rf"\bnum_spec_tokens={_N}|\bspeculative_config=(None)"),
}
_MODE = re.compile(r"'mode': (?:<[\w.]+: )?([0-3])")
_BACKEND = re.compile(r"'backend': '([^']{0,200})'")
_SIZES = r"'{}': \[([0-9, ]*)\]"


def read_settings(text: str) -> Settings | None:
    """The config in a message; None where it is another message."""
    found = at_start(_SETTINGS, text)
    if found is None:
        return None
    config = found[2]
    options: list[tuple[str, int | str]] = []
    for name, pattern in _OPTIONS.items():
        if option := pattern.search(config):
            value = next(group for group in option.groups() if group is not None)
            options.append((name, _value("0" if value == "None" else value)))
    compilation = config.partition("compilation_config=")[2]
    mode, backend = _MODE.search(compilation), _BACKEND.search(compilation)
    return Settings(
        version=found[1],
        options=tuple(options),
        enforce_eager="enforce_eager=True" in config,
        mode=int(mode[1]) if mode else None,
        backend=backend[1] if backend else None,
        compile_sizes=_sizes("compile_sizes", compilation),
        range_ends=_sizes("compile_ranges_endpoints", compilation),
        capture_sizes=_sizes("cudagraph_capture_sizes", compilation),
    )


def _value(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _sizes(name: str, text: str) -> tuple[int, ...]:
    found = re.search(_SIZES.format(name), text)
    return tuple(int(size) for size in re.findall(r"[0-9]{1,9}", found[1])) if found else ()
