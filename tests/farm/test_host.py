"""What a host has, with the limits of control groups of either version."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import psutil
import pytest

from neffbuild.farm.host import LinuxHost

MIB = 1 << 20
CORES = len(os.sched_getaffinity(0))


def host(folder: Path, membership: str, files: dict[str, str]) -> LinuxHost:
    for name, text in files.items():
        path = folder / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "membership").write_text(membership)
    return LinuxHost(folder / "cgroup", folder / "membership")


def test_without_control_groups_it_is_the_machine(tmp_path: Path) -> None:
    bare = LinuxHost(tmp_path / "none", tmp_path / "nothing")
    assert bare.cpus == CORES
    assert bare.total_memory == psutil.virtual_memory().total
    assert 0 < bare.available_memory() <= bare.total_memory
    assert bare.memory_of == "this host"
    assert (bare.cpus_of == "this host") == (os.cpu_count() == CORES)
    assert bare.free_scratch(tmp_path) == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.1)


def test_this_host_is_read() -> None:
    here = LinuxHost()
    assert 1 <= here.cpus <= CORES
    assert 0 < here.available_memory() <= here.total_memory <= psutil.virtual_memory().total


def test_version_2_the_tightest_group_above_counts(tmp_path: Path) -> None:
    here = host(
        tmp_path,
        "0::/job/step\n",
        {
            "job/memory.max": f"{100 * MIB}\n",
            "job/memory.current": f"{70 * MIB}\n",
            "job/memory.stat": f"anon 5\ninactive_file {20 * MIB}\nactive_file 0\n",
            "job/cpu.max": "100000 100000\n",
            "job/step/memory.max": "max\n",
            "job/step/memory.current": f"{60 * MIB}\n",
            "job/step/cpu.max": "max 100000\n",
        },
    )
    assert here.total_memory == 100 * MIB
    assert here.available_memory() == 50 * MIB
    assert here.cpus == 1
    assert here.memory_of == "this process's control group"
    assert (here.cpus_of == here.memory_of) == (CORES > 1)


def test_version_1_with_its_controllers_apart(tmp_path: Path) -> None:
    here = host(
        tmp_path,
        "4:memory:/batch/7\n3:cpu,cpuacct:/batch\n1:name=systemd:/\n",
        {
            "memory/memory.limit_in_bytes": f"{(1 << 63) - 4096}\n",
            "memory/batch/7/memory.limit_in_bytes": f"{64 * MIB}\n",
            "memory/batch/7/memory.usage_in_bytes": f"{80 * MIB}\n",
            "memory/batch/7/memory.stat": (
                f"inactive_file 1\ntotal_inactive_file {20 * MIB}\ntotal_active_file {10 * MIB}\n"
            ),
            "cpu,cpuacct/batch/cpu.cfs_quota_us": "50000\n",
            "cpu,cpuacct/batch/cpu.cfs_period_us": "100000\n",
        },
    )
    assert here.total_memory == 64 * MIB
    assert here.available_memory() == 14 * MIB
    assert here.cpus == 1  # half a core is one worker


def test_in_a_container_the_mount_is_the_group_itself(tmp_path: Path) -> None:
    here = host(
        tmp_path,
        "0::/kubepods/pod7\n",
        {"memory.max": f"{32 * MIB}\n", "memory.current": f"{40 * MIB}\n", "cpu.max": "max\n"},
    )
    assert here.total_memory == 32 * MIB
    assert here.available_memory() == 0
    assert here.cpus == CORES


def test_no_quota_and_unreadable_files_limit_nothing(tmp_path: Path) -> None:
    here = host(
        tmp_path,
        "3:cpu:/\n2:memory:/\n0::/\n",
        {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n", "memory/x": ""},
    )
    assert here.cpus == CORES
    assert here.total_memory == psutil.virtual_memory().total
