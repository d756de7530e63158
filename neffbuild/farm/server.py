"""The process that workers are forked from: the toolchain's modules imported once, nothing else held.

It has no lock, no store, no connection but the one to its farm, and one thread, so a fork of it is a
clean start. It is not `multiprocessing`'s fork server because that one imports the caller's main
module into every worker (a script without a main guard would compile again in each) and leaves a
worker's orphans to init.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

from neffbuild.config.errors import MissingExtra, NeffbuildError, ToolchainRefusal
from neffbuild.farm import processes
from neffbuild.farm.causes import cause_of_exception, cause_of_no_start
from neffbuild.farm.scratch import remove_abandoned
from neffbuild.farm.supervisor import NotStarted, supervise
from neffbuild.toolchain.base import Toolchain
from neffbuild.toolchain.registry import load_toolchain

UNIT = b"+"
LEAVE = b"."
"""The farm's last word."""
_LOOK_SECONDS = 0.5
_LAST_SECONDS = 15.0


def main(descriptor: int, toolchain_name: str, farms: str, *modules: str) -> None:
    """Serve the farm at the other end of the socket `descriptor` until that end closes.

    Each message is `UNIT` with one descriptor: a connection on which a new supervisor is to be found;
    the last, `LEAVE`, has none.
    `farms` is where the folders of this user's farms are, `modules` what workers import beside the
    toolchain's `preload`.
    """
    control = socket.socket(fileno=descriptor)
    # A terminal's Ctrl-C is for the farm's own process to decide about.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    processes.adopt_orphans()
    try:
        toolchain = _prepare(toolchain_name, modules)
    except NeffbuildError as error:
        sys.exit(error.message)
    except Exception as error:
        # The farm shows it to a person, who is not helped by a traceback.
        sys.exit(cause_of_exception(error).text)
    # What is there now will never be garbage: workers need not touch, and so copy, its pages.
    gc.collect()
    gc.freeze()
    if not _serve(control, toolchain):
        _remove(Path(os.environ["TMPDIR"]), Path(farms))


def _remove(folder: Path, farms: Path) -> None:
    """Remove the folder of the farm, which is dead. Its connection may close before its lock does."""
    give_up = time.monotonic() + _LAST_SECONDS
    while folder.exists() and time.monotonic() < give_up:
        remove_abandoned(farms)
        time.sleep(0.05)


def _prepare(name: str, modules: Sequence[str]) -> Toolchain:
    toolchain = load_toolchain(name)
    for module in (*modules, *toolchain.preload):
        try:
            import_module(module)
        except ImportError as error:
            raise MissingExtra(
                f"{module}, which workers for {name} need, fails to import: {error}"
            ) from error
    if psutil.Process().num_threads() > 1:
        raise ToolchainRefusal(
            f"importing {', '.join(toolchain.preload)} started a thread, beside which no worker can "
            f"safely be forked: take its module out of the `preload` of {name}"
        )
    return toolchain


def _serve(control: socket.socket, toolchain: Toolchain) -> bool:
    """Returns whether the farm has taken its leave, rather than died."""
    supervisors: set[int] = set()
    while True:
        ready, _, _ = select.select([control], [], [], _LOOK_SECONDS)
        if ready:
            data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if descriptors:
                supervisors |= _fork_supervisor(control, Connection(descriptors[0]), toolchain)
            elif data != UNIT:  # a connection for which there is no descriptor just closes
                break
        _tidy(supervisors)
    give_up = time.monotonic() + _LAST_SECONDS
    while supervisors and time.monotonic() < give_up:
        _tidy(supervisors)
        time.sleep(0.01)
    processes.end_descendants(0)
    return data == LEAVE


def _fork_supervisor(control: socket.socket, farm: Connection, toolchain: Toolchain) -> set[int]:
    """The supervisor's process; none where the host lets none be started, which the farm is told."""
    try:
        pid = os.fork()
    except OSError as error:
        with farm, contextlib.suppress(OSError):
            farm.send(NotStarted(cause_of_no_start(error)))
        return set()
    if pid == 0:
        try:
            control.close()
            supervise(farm, toolchain)
        except BaseException:
            traceback.print_exc()
        finally:
            # Nothing of this process may run in its fork: not the loop above, not exit handlers.
            os._exit(0)
    # The farm must see the connection close when the supervisor dies.
    farm.close()
    return {pid}


def _tidy(supervisors: set[int]) -> None:
    """Reap supervisors that ended; end what a supervisor that was killed has left to this process."""
    supervisors.difference_update(processes.end_descendants(0, spared=supervisors))
