"""Why a unit failed: causes from exceptions, exit statuses and limits."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from neffbuild.config.errors import ConfigError, NeffbuildError, StoreError
from neffbuild.config.printable import printable
from neffbuild.farm.outcomes import Cause, CauseKind
from neffbuild.toolchain.failures import CompilerFailure

_LONGEST_TEXT = 400


def cause_of_exception(error: BaseException) -> Cause:
    """Why a worker's code failed, from what it raised. What it was raised from is searched for what
    lies beneath: a compiler's exit status, a full disk, memory that ran out."""
    for link in _chain(error):
        if isinstance(link, MemoryError):
            return _out_of_memory(_described(link))
        if isinstance(link, OSError) and link.errno in (errno.ENOSPC, errno.EDQUOT):
            if isinstance(error, StoreError):
                return Cause(CauseKind.DISK_FULL, error.message, "make room where the cache is")
            return Cause(
                CauseKind.DISK_FULL,
                _described(link),
                "make room, or set TMPDIR to a larger disk",
            )
        if (no_start := cause_of_refused_start(link)) is not None:
            return no_start
        if isinstance(link, subprocess.CalledProcessError):
            return _cause_of_status(link.returncode, _program(link.cmd))
        if isinstance(link, SystemExit) and link.code:
            return _cause_of_status(link.code if isinstance(link.code, int) else 1, "the compile")
        if isinstance(link, ImportError) or _is_missing_program(link):
            return Cause(CauseKind.MISSING_DEPENDENCY, _described(link), "run `neffbuild doctor`")
    if isinstance(error, CompilerFailure):
        return Cause(CauseKind(error.failure.value), printable(error.message), error.hint)
    if isinstance(error, NeffbuildError):
        refused = isinstance(error, ConfigError)
        stored = isinstance(error, StoreError)
        kind = CauseKind.COMPILER_ERROR
        kind = CauseKind.REFUSED if refused else CauseKind.STORE if stored else kind
        return Cause(kind, printable(error.message), error.hint)
    return Cause(CauseKind.COMPILER_ERROR, _described(error))


def cause_of_exit(wait_status: int) -> Cause:
    """Why a worker that ended without a report failed, from its `waitpid` status."""
    return _cause_of_status(os.waitstatus_to_exitcode(wait_status), "the worker")


def cause_of_no_start(error: OSError) -> Cause:
    """Why the processes that a unit needs could not be started: a limit of this host, as a rule."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return _at_limit("open files", "n", resource.RLIMIT_NOFILE)
    if error.errno == errno.EAGAIN:
        return _at_limit("processes", "u", resource.RLIMIT_NPROC)
    if error.errno == errno.ENOMEM:
        return _out_of_memory("no process could be started: there is no memory for it")
    return cause_of_exception(error)


def cause_of_refused_start(error: BaseException) -> Cause | None:
    """Why no process or thread could be started, if that is what this error is about."""
    # Of what else would block, Python names the file.
    is_fork = isinstance(error, BlockingIOError) and error.filename is None
    if is_fork or (isinstance(error, RuntimeError) and str(error) == "can't start new thread"):
        return _at_limit("processes", "u", resource.RLIMIT_NPROC)
    return None


def timed_out(seconds: float) -> Cause:
    """The unit's own wall-clock limit was reached."""
    return Cause(
        CauseKind.TIMEOUT,
        f"not done after {seconds:g} s; ended with everything it had started",
        "raise `farm.timeout` if the compile is only slow",
    )


def over_memory(limit: int) -> Cause:
    """The unit's own memory limit, in bytes, was reached."""
    return Cause(
        CauseKind.OUT_OF_MEMORY,
        f"used more than the {limit / 2**20:.4g} MiB of `farm.memory`",
        "raise `farm.memory` (`--memory`)",
    )


def over_host_memory(resident: int, reserved: int, available: int, where: str) -> Cause:
    """Ended because `where`, this host or a part of it, was running out of memory; all in bytes."""
    return _out_of_memory(
        f"ended at {resident / 2**30:.1f} GiB, {reserved / 2**30:.1f} GiB of which were reserved for it: "
        f"{where} had only {available / 2**30:.2f} GiB of memory left"
    )


def _cause_of_status(code: int, what: str) -> Cause:
    # A shell reports a child that died of signal n as 128 + n.
    number = -code if code < 0 else code - 128 if code > 128 else 0
    if number == signal.SIGKILL:
        return _out_of_memory(f"{what} was killed by signal 9 (SIGKILL), probably out of memory")
    if number:
        return Cause(CauseKind.SIGNAL, f"{what} was killed by signal {number}{_name(number)}")
    if code == 0:
        return Cause(CauseKind.COMPILER_ERROR, f"{what} ended without leaving an artifact")
    return Cause(CauseKind.COMPILER_ERROR, f"{what} ended with exit code {code}")


def _at_limit(what: str, letter: str, limit: int) -> Cause:
    most = resource.getrlimit(limit)[0]
    said = "unlimited" if most == resource.RLIM_INFINITY else str(most)
    return Cause(
        CauseKind.LOST_WORKER,
        f"no process could be started: the limit of {what} is reached (`ulimit -{letter}` is {said})",
        f"raise `ulimit -{letter}` (in a container, its own limit too), or use fewer workers (`--workers`)",
    )


def _out_of_memory(text: str) -> Cause:
    return Cause(
        CauseKind.OUT_OF_MEMORY,
        text,
        "use fewer workers (`--workers`), or a machine with more memory",
    )


def _name(number: int) -> str:
    try:
        return f" ({signal.Signals(number).name})"
    except ValueError:
        return ""


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        # Only what was named as the cause: the context of an exception may be a cache miss it was
        # raised while handling.
        link = link.__cause__


def _is_missing_program(error: BaseException) -> bool:
    # A program looked up on PATH; a path that does not exist says nothing about what is installed.
    name = error.filename if isinstance(error, FileNotFoundError) else None
    return isinstance(name, str) and os.sep not in name


def _described(error: BaseException) -> str:
    try:
        text = printable(str(error))
    except Exception:
        text = ""  # its own `__str__` fails
    text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 1]}…"


def _program(command: Any) -> str:
    words = command.split() if isinstance(command, str) else list(command)
    return Path(str(words[0])).name if words else "the compiler"
