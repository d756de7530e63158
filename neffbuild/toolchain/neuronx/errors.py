"""What neuronx-cc's failures mean: exit statuses, banners and error codes, each with what to do.

Documented is a status of zero or not, and a page for each code. That a compiler ended by a signal says -9,
137 or 70 with the banner [F137], and likewise for the others, was seen with plugins and farms.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass

from neffbuild.toolchain.failures import CompilerFailure, FailureClass
from neffbuild.toolchain.neuronx.routes import COMPILER

_LONGEST_LINE = 300
_SEE_LOG = "the unit's log has the compiler's output"


@dataclass(frozen=True, slots=True)
class Known:
    """What a code stands for, and what to do about it."""

    meaning: str
    advice: str
    failure: FailureClass = FailureClass.COMPILER_ERROR


_SMALLER = (
    "compile smaller buckets (drop the largest of num_seqs_buckets or decode_context_length_buckets), or "
    "raise tensor_parallel_size"
)
_DEVICE_MEMORY = Known(
    "the program with its scratch space does not fit the device's memory",
    f"{_SMALLER}; fewer KV blocks (num_gpu_blocks_override) help too",
)
_TOO_LONG = Known(
    "the program has more instructions than the compiler allows",
    f"{_SMALLER}; `--optlevel=1` in toolchain.flags makes programs shorter, and "
    "`--internal-max-instruction-limit=N` moves the limit",
)
CODES: Mapping[str, Known] = {
    "EVRF009": Known(
        "the graph's tensors do not fit the device's memory; the KV pool is most of them, as a rule",
        "lower num_gpu_blocks_override (or gpu_memory_utilization, which sizes the pool), or raise "
        "tensor_parallel_size",
    ),
    "EOOM001": _DEVICE_MEMORY,
    "EOOM002": _DEVICE_MEMORY,
    "EVRF007": _TOO_LONG,
    "EBVF030": _TOO_LONG,
    "EVRF051": Known(
        "the target has no float8 e4m3fn",
        "add --internal-hlo2tensorizer-options='--modular-flow-mac-threshold=10 "
        "--experimental-unsafe-fp8e4m3fn-as-fp8e4m3' to toolchain.flags, or serve another dtype",
    ),
    "EVRF059": Known(
        "a file of an NKI kernel is missing that the graph names by its path",
        "bring the kernel binaries (/var/tmp/nki-intermediate-cache) along with the graphs, under the "
        "same path, or compile where the graphs were captured",
        FailureClass.MISSING_DEPENDENCY,
    ),
    "EMOD025": Known(
        "the graph has a dynamic shape", "capture it with fixed sizes: every bucket is a graph of its own"
    ),
    "ESPP004": Known("the graph computes in f64", "keep float64 out of the model's code"),
    "ITEN406": Known(
        "the graph reads with more strides than the compiler can tile",
        "look for graph breaks and odd sizes in the model's code",
    ),
    "EARG002": Known(
        "the compiler does not know a flag", "check toolchain.flags and NEURON_CC_FLAGS"
    ),
}  # fmt: skip
"""By what follows `NCC_`."""

_CODE = re.compile(rf"\bNCC_([A-Z]{{3,6}}\d{{3}})\b|\b({'|'.join(CODES)})\b")
_BANNERS = {"[F137]": signal.SIGKILL, "[F134]": signal.SIGABRT, "[F139]": signal.SIGSEGV}


def failure_of(status: int, output: str) -> CompilerFailure:
    """Why a compiler that ended with `status` (as `subprocess` has it: negative for a signal) failed;
    `output` is the end of what it printed and logged."""
    number = _signal(status, output)
    if number == signal.SIGKILL:
        return CompilerFailure(
            f"{COMPILER} was killed ({_ended(status)}), most likely for want of memory",
            hint="use fewer workers (`--workers`), a machine with more memory, or `--optlevel=1` in "
            "toolchain.flags",
            failure=FailureClass.OUT_OF_MEMORY,
        )
    if number:
        return CompilerFailure(
            f"{COMPILER} {_what(number)} ({_ended(status)})",
            hint=f"{_SEE_LOG}; another --optlevel may get past it",
            failure=FailureClass.SIGNAL,
        )
    codes = list(_CODE.finditer(output))
    # A code that is known here says more than a warning's before it.
    if found := next(
        (one for one in codes if (one[1] or one[2]) in CODES), next(iter(codes), None)
    ):
        return _of_code(found[1] or found[2], _line(output, found.start()))
    if status == 127:
        return CompilerFailure(
            f"{COMPILER} could not start a program it needs ({_ended(status)})",
            hint="run `neffbuild doctor`",
            failure=FailureClass.MISSING_DEPENDENCY,
        )
    return CompilerFailure(f"{COMPILER} failed ({_ended(status)})", hint=_SEE_LOG)


def no_neff(reason: str) -> CompilerFailure:
    """The compiler says that all is well and has left no whole NEFF."""
    return CompilerFailure(
        f"{COMPILER} ended with exit code 0, but {reason}",
        hint="a part of it may have been killed, for want of memory or disk; " + _SEE_LOG,
    )


def _of_code(code: str, line: str) -> CompilerFailure:
    known = CODES.get(code)
    if known is None:
        return CompilerFailure(
            f"NCC_{code}: {line}",
            hint=f"{_SEE_LOG}; Neuron's documentation has a page for NCC_{code}",
        )
    return CompilerFailure(
        f"NCC_{code}: {known.meaning} ({line})", hint=known.advice, failure=known.failure
    )


def _signal(status: int, output: str) -> int:
    """The signal that ended the compiler or a part of it, 0 for none. A shell reports 128 + n."""
    if status < 0:
        return -status
    if 128 < status <= 128 + signal.SIGRTMAX:
        return status - 128
    return next((number for banner, number in _BANNERS.items() if banner in output), 0)


def _what(number: int) -> str:
    match number:
        case signal.SIGABRT:
            return "aborted"
        case signal.SIGSEGV:
            return "crashed"
        case _:
            return "was ended"


def _ended(status: int) -> str:
    if status >= 0:
        return f"exit code {status}"
    try:
        return f"signal {-status}, {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"


def _line(output: str, place: int) -> str:
    """The line of the output that `place` is in, without what leads up to the words."""
    start = output.rfind("\n", 0, place) + 1
    end = output.find("\n", place)
    line = " ".join(output[start : end if end >= 0 else None].split())
    line = re.sub(r"^.*?\[?(?:NCC_)?[A-Z]{4,6}\d{3}\]?:?\s*", "", line) or line
    return line if len(line) <= _LONGEST_LINE else f"{line[: _LONGEST_LINE - 1]}…"
