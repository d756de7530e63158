"""Joining a Ray cluster as a driver."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
from collections.abc import Iterator
from typing import Any

from neffbuild.config.errors import ConfigError, MissingExtra

_PROBE_SECONDS = 10.0
_ADDRESS = re.compile(r"[^\s/]+:[0-9]{1,5}")
_NODE_VARIABLES = {"RAY_kill_child_processes_on_worker_exit": "false"}
"""A server that outlives its Ray worker ends what runs under it and removes its folder; killed by Ray
at that moment, it could not."""


def import_ray() -> Any:
    """The module. Raises `MissingExtra` where it is not installed."""
    try:
        import ray
        import ray.exceptions
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise MissingExtra(
            f"the executor ray needs Ray, which cannot be imported: {error}",
            field="farm.executor",
            value="ray",
            hint="pip install 'neffbuild[ray]', here and on every node",
        ) from error
    return ray


@contextlib.contextmanager
def connected(ray: Any, address: str) -> Iterator[None]:
    """Be a driver of the cluster at `address`, `HOST:PORT` or `auto` (`$RAY_ADDRESS`, else this node's).

    Raises `ConfigError` where there is none, or none of this Ray.
    """
    told = os.environ.get("RAY_ADDRESS") if address == "auto" else None
    place = told or address
    where = f"$RAY_ADDRESS {told!r}" if told else f"farm.address {address!r}"
    if place != "auto" and not _ADDRESS.fullmatch(place):
        raise ConfigError(
            f"{where} is not HOST:PORT or auto",
            field="farm.address",
            value=place,
            hint="through Ray Client the driver would not be on a node: run `neffbuild compile` on one, "
            "or hand it to `ray job submit`",
        )
    # Its commentary on lost nodes and scarce resources would go to stdout, among results; what it comes
    # to is said in outcomes and events.
    ray._private.worker._worker_logs_enabled = False
    # Ray reads them when it is connected: nothing is reported to its makers, and a unit that was ended
    # for the memory it took is for the farm to try again, with more memory asked for.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_task_oom_retries", "0")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        _probe(place)
        ray.init(
            place,
            log_to_driver=False,
            logging_level="ERROR",
            runtime_env={"env_vars": _NODE_VARIABLES},
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"cannot join the Ray cluster at {where}: {' '.join(str(error).split())}",
            field="farm.address",
            value=place,
            hint="run this on a node of the cluster (`ray status` shows it there), or start one: "
            "ray start --head",
        ) from error
    # Ray would end this process on SIGTERM; what runs is to be ended first.
    with contextlib.suppress(ValueError):  # outside the main thread, where Ray sets none either
        for number, handler in handlers.items():
            signal.signal(number, handler)
    try:
        yield
    finally:
        ray.shutdown()


def _probe(address: str) -> None:
    """Raise `OSError` where nobody listens at HOST:PORT: Ray would wait for minutes."""
    host, _, port = address.rpartition(":")
    if port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), _PROBE_SECONDS).close()
