"""What this host has for compiles: cores and memory with the limits of control groups, and scratch space.

Containers and batch systems bound memory and CPU time by control groups, of which tools that look at the
machine see nothing. Sources: the Linux kernel's `Documentation/admin-guide/cgroup-v2.rst` and
`cgroup-v1/memory.rst`, `scheduler/sched-bwc.rst`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

_UNLIMITED = 1 << 60
"""Version 1 says "no limit" as a number near 2^63."""
THIS_HOST = "this host"
_CONTROL_GROUP = "this process's control group"


class Host(Protocol):
    """The host as admission sees it."""

    @property
    def cpus(self) -> int:
        """Cores this process may use, at least 1."""
        ...

    @property
    def total_memory(self) -> int:
        """Bytes of memory the processes of this host may use in all."""
        ...

    @property
    def cpus_of(self) -> str:
        """What has as many cores as `cpus` says, for messages: this host, or what bounds us on it."""
        ...

    @property
    def memory_of(self) -> str:
        """What has as much memory as `total_memory` says, for messages."""
        ...

    def available_memory(self) -> int:
        """Bytes that can be taken now without swapping or reaching a limit."""
        ...

    def free_scratch(self, folder: Path) -> int:
        """Bytes free for us on the file system of `folder`."""
        ...


@dataclass(frozen=True, slots=True)
class LinuxHost:
    """This host. `cgroups` is where control groups are mounted, `membership` the kernel's list of those
    this process is in."""

    cgroups: Path = Path("/sys/fs/cgroup")
    membership: Path = Path("/proc/self/cgroup")

    @property
    def cpus(self) -> int:
        allowed = len(os.sched_getaffinity(0))
        return max(1, min([allowed, *(int(quota) for quota in self._cpu_quotas())]))

    @property
    def total_memory(self) -> int:
        return min([psutil.virtual_memory().total, *(g.limit for g in self._memory_groups())])

    @property
    def cpus_of(self) -> str:
        cpus, bound = self.cpus, len(os.sched_getaffinity(0))
        if cpus < bound:
            return _CONTROL_GROUP
        return THIS_HOST if bound >= (os.cpu_count() or 1) else "this process's CPU affinity"

    @property
    def memory_of(self) -> str:
        confined = self.total_memory < psutil.virtual_memory().total
        return _CONTROL_GROUP if confined else THIS_HOST

    def available_memory(self) -> int:
        groups = (max(0, group.limit - group.used) for group in self._memory_groups())
        return min([psutil.virtual_memory().available, *groups])

    def free_scratch(self, folder: Path) -> int:
        return shutil.disk_usage(folder).free

    def _cpu_quotas(self) -> Iterator[float]:
        """Cores worth of time that each control group above this process is limited to."""
        for folder in self._folders("cpu"):
            quota, period = _words(folder / "cpu.max", 2)
            if quota is None:
                quota = _number(folder / "cpu.cfs_quota_us")
                period = _number(folder / "cpu.cfs_period_us")
            if quota and period and quota > 0:
                yield quota / period

    def _memory_groups(self) -> Iterator[_MemoryGroup]:
        """The control groups above this process that limit memory."""
        for folder in self._folders("memory"):
            limit = _number(folder / "memory.max")
            used = _number(folder / "memory.current")
            prefix = ""
            if limit is None:
                limit = _number(folder / "memory.limit_in_bytes")
                used = _number(folder / "memory.usage_in_bytes")
                prefix = "total_"
            if limit is not None and limit < _UNLIMITED:
                # Pages of files are given back before a limit is enforced.
                cached = sum(
                    _field(folder / "memory.stat", f"{prefix}{state}_file")
                    for state in ("inactive", "active")
                )
                yield _MemoryGroup(limit, max(0, (used or 0) - cached))

    def _folders(self, controller: str) -> Iterator[Path]:
        """The folders of this process's control group for a controller and of those above it. In a
        container the path may be the host's: what is mounted then is the group itself."""
        try:
            lines = self.membership.read_text().splitlines()
        except OSError:
            return
        for line in lines:
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            for mount in _mounts(self.cgroups, controllers):
                group = mount / path.lstrip("/")
                while group.is_relative_to(mount):
                    if group.is_dir():
                        yield group
                    group = group.parent


@dataclass(frozen=True, slots=True)
class _MemoryGroup:
    """Bytes a control group may use, and what it uses beside pages of files."""

    limit: int
    used: int


def _mounts(cgroups: Path, controllers: str) -> tuple[Path, ...]:
    """Where the groups of these controllers may be mounted; none named is version 2."""
    if not controllers:
        return (cgroups, cgroups / "unified")
    return tuple(cgroups / name for name in dict.fromkeys([controllers, *controllers.split(",")]))


def _number(path: Path) -> int | None:
    return _words(path, 1)[0]


def _words(path: Path, count: int) -> list[int | None]:
    """The first words of a file as numbers; None for what is missing or no number (`max`)."""
    try:
        words = path.read_text().split()
    except OSError:
        words = []
    found = [int(word) if word.lstrip("-").isdigit() else None for word in words[:count]]
    return found + [None] * (count - len(found))


def _field(path: Path, name: str) -> int:
    """A number by its name in a file of `name number` lines; 0 where there is none."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)
