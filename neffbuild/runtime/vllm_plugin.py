"""vLLM's general plugin: with `NEFFBUILD_MANIFEST=s3://bucket/prefix#llama:prod` set, an engine starts
from what was compiled for it.

vLLM calls `register` in every one of its processes, the first time before it has read its options. The
first process hydrates; see `neffbuild.runtime.hydration` for the others. Without the variable nothing
happens and nothing is imported: keep imports of the package out of this module's head.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from neffbuild.runtime.hydration import Hydration, HydrationSettings

_NEED_NO_ENGINE = frozenset({"chat", "complete", "collect-env", "download-kernels", "preload"})
_CLIENTS = (("bench", "serve"), ("launch", "render"))
_ENDED_BY_US = 30.0
"""Seconds in which a process that was ended is gone."""


def register() -> None:
    """Hydrate, once per engine and host. Ends the process with a message, and the status that
    `neffbuild` would have, where a setting is wrong, and in strict mode where anything is missing."""
    named = os.environ.get("NEFFBUILD_MANIFEST", "")
    # A digest, or a manifest's file, is for the backend alone.
    of_store = "://" in named or "#" in named or "@" in named
    if not named or not (of_store or not named.strip() or Path(named).is_dir()):
        return
    if not _starts_an_engine(sys.argv):
        return
    from neffbuild.config.errors import NeffbuildError
    from neffbuild.runtime import hydration

    done = hydration.inherited(os.environ)
    if done is None:
        # First of all: whatever fails from here on, nobody must take an earlier start's word for this one.
        _withdraw_ready_file(os.environ.get("NEFFBUILD_READY_FILE"))
    try:
        settings = hydration.HydrationSettings.from_environment(os.environ)
    except NeffbuildError as error:
        _refuse(error.message, error.hint, error.exit_status)
    if settings is None:
        _refuse(
            f"NEFFBUILD_MANIFEST is {named!r}, which names no release of a store",
            "write s3://bucket/prefix#name:tag, /path#name:tag, or either with @digest; "
            "or a manifest's digest, for the backend alone",
            2,
        )
    if done is None:
        done = _hydrate(settings)
        hydration.pass_on(done, os.environ)
    from neffbuild.runtime.hydration_metrics import expose

    expose(done)


def _withdraw_ready_file(named: str | None) -> None:
    from neffbuild.cache import ready
    from neffbuild.config.errors import NeffbuildError

    if named and Path(named).is_file():
        try:
            ready.withdraw(Path(named))
        except NeffbuildError as error:
            _refuse(error.message, error.hint, 2)


def _starts_an_engine(arguments: Sequence[str]) -> bool:
    """Whether this is more than vLLM's command line being asked for help, or a client of it."""
    if any(word in ("-h", "--help") or word.startswith("--help=") for word in arguments[1:]):
        return False
    if not arguments or PurePath(arguments[0]).name != "vllm":
        return True
    command = arguments[1] if len(arguments) > 1 else "--help"
    if tuple(arguments[1:3]) in _CLIENTS:
        return False
    return not command.startswith("-") and command not in _NEED_NO_ENGINE


def _hydrate(settings: HydrationSettings) -> Hydration:
    from neffbuild.runtime.hydration import Hydration

    answer = _answer(settings.wait)
    if (error := answer.get("error")) is not None:
        # A wrong setting stays wrong however often the engine is started: say so at once.
        if settings.strict or error["kind"] in ("config", "missing_extra"):
            _refuse(error["message"], error["hint"], error["exit_status"])
        return _not_hydrated(settings, error["message"], error["hint"])
    hydration = Hydration(**answer["hydration"])
    missing = answer["missing"]
    if missing and settings.strict:
        _refuse(
            f"{len(missing)} units of {settings.reference} are missing: {', '.join(missing)}",
            "compile and push them, or unset NEFFBUILD_STRICT to have the engine compile them",
            1,
        )
    how = "by another process, " if hydration.shared else ""
    copied = f"{hydration.blobs_copied} blobs and {hydration.bytes_copied} bytes copied"
    _say(
        f"hydrated {hydration.hits} units from {settings.reference} in {hydration.seconds:.1f} s "
        f"({how}{copied}, {len(missing)} units missing)"
    )
    return hydration


def _answer(wait: float) -> dict[str, Any]:
    """What the hydrating process says; where it says nothing, an error in its place."""
    import json
    import subprocess

    command = [sys.executable, "-P", "-m", "neffbuild.runtime.hydrate"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
        try:
            out, _ = process.communicate(timeout=wait)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate(timeout=_ENDED_BY_US)
            why = f"it did not end within {wait:g} s"
            return _failed(why, "NEFFBUILD_HYDRATE_WAIT=SECONDS waits longer")
        except BaseException:
            process.kill()
            raise
    lines = out.splitlines()
    try:
        answer = json.loads(lines[-1] if lines else b"")
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        return _failed(f"the hydrating process ended with status {process.returncode}", None)
    return answer


def _failed(message: str, hint: str | None) -> dict[str, Any]:
    return {"error": {"kind": "store", "message": message, "hint": hint, "exit_status": 3}}


def _not_hydrated(settings: HydrationSettings, cause: str, hint: str | None) -> Hydration:
    import socket

    from neffbuild.runtime.hydration import Hydration

    _say(
        f"warning: nothing was hydrated from {settings.reference}: {cause}"
        + (f" ({hint})" if hint else "")
    )
    _say(
        "warning: the engine starts all the same and compiles what the local cache lacks; with "
        "NEFFBUILD_STRICT=1 it would not start. NEFFBUILD_HYDRATE_WAIT bounds the wait, to "
        f"{settings.wait:g} s now"
    )
    return Hydration(os.environ["NEFFBUILD_MANIFEST"], socket.gethostname(), cause=cause)


def _refuse(message: str, hint: str | None, status: int) -> NoReturn:
    _say(f"error: refusing to start: {message}")
    if hint:
        _say(f"  hint: {hint}")
    # Not an exception of ours: vLLM would bury the message below a traceback of its own.
    raise SystemExit(status)


def _say(line: str) -> None:
    sys.stderr.write(f"neffbuild: {line}\n")
    sys.stderr.flush()
