"""The farm's rules that need no farm."""

from __future__ import annotations

import errno
import subprocess
import sys
import time
from pathlib import Path

import farmtools
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neffbuild.config.errors import StoreError, ToolchainRefusal
from neffbuild.farm import processes
from neffbuild.farm.causes import cause_of_exception, cause_of_exit
from neffbuild.farm.environment import worker_environment
from neffbuild.farm.logfile import HALF_BYTES, UnitLog, log_tail
from neffbuild.farm.outcomes import CauseKind
from neffbuild.farm.schedule import longest_first
from neffbuild.farm.scratch import farm_folder, farms_directory, remove_abandoned

AMBIENT = {
    "PATH": "/bin",
    "HOME": "/root",
    "TMPDIR": "/elsewhere",
    "CXX": "clang++",
    "HOSTNAME": "pod-7",
    "AWS_REGION": "eu-west-1",
    "https_proxy": "http://proxy",
    "NEURON_CC_FLAGS": "--ambient",
}


def test_the_environment_is_the_keyed_variables_and_the_passed_list() -> None:
    local = worker_environment(AMBIENT, {"NEURON_CC_FLAGS": "--keyed"}, "/cache")
    assert {name: local[name] for name in AMBIENT.keys() & local.keys()} == {
        "PATH": "/bin",
        "HOME": "/root",
        "NEURON_CC_FLAGS": "--keyed",
    }
    assert worker_environment(AMBIENT, {}, "/cache").keys() == local.keys() - {"NEURON_CC_FLAGS"}


def test_credentials_go_to_workers_that_publish_only() -> None:
    added = {"AWS_REGION", "https_proxy"}
    for url in ("/cache", "file:///cache", "cache"):
        assert not added & worker_environment(AMBIENT, {}, url).keys()
    assert added <= worker_environment(AMBIENT, {}, "s3://bucket/prefix").keys()


def test_a_keyed_variable_wins_over_what_the_farm_sets() -> None:
    assert worker_environment({}, {"OMP_NUM_THREADS": "4"}, "/cache")["OMP_NUM_THREADS"] == "4"


def test_units_start_longest_expected_first() -> None:
    units = farmtools.make_units(Path("/nowhere"), 4)
    expected = dict(zip([unit.key for unit in units], [2.0, 9.0, 2.0, 5.0], strict=True))
    assert longest_first(units, expected) == [units[1], units[3], units[0], units[2]]


@given(st.lists(st.binary(max_size=300).map(lambda data: data * 2000), max_size=12))
def test_a_log_holds_everything_or_its_beginning_and_its_end(
    tmp_path_factory: pytest.TempPathFactory, chunks: list[bytes]
) -> None:
    path = tmp_path_factory.mktemp("log") / "unit.log"
    log = UnitLog(path)
    for chunk in chunks:
        log.write(chunk)
    log.close()
    written, kept = b"".join(chunks), path.read_bytes()
    if len(written) <= 2 * HALF_BYTES:
        assert kept == written
    else:
        assert kept.startswith(written[:HALF_BYTES])
        assert kept.endswith(written[-HALF_BYTES:])
        left_out = len(written) - 2 * HALF_BYTES
        assert f"{left_out} bytes left out".encode() in kept
        assert len(kept) < 2 * HALF_BYTES + 100


def test_a_log_that_cannot_be_written_costs_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    log = UnitLog(tmp_path / "file" / "unit.log")
    log.write(b"x")
    log.close()
    assert log_tail(tmp_path / "file" / "unit.log") == ""


def raised_from(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MemoryError(), CauseKind.OUT_OF_MEMORY),
        (RuntimeError("no"), CauseKind.COMPILER_ERROR),
        (ImportError("torch"), CauseKind.MISSING_DEPENDENCY),
        (FileNotFoundError(errno.ENOENT, "no", "g++"), CauseKind.MISSING_DEPENDENCY),
        (FileNotFoundError(errno.ENOENT, "no", "/scratch/x.o"), CauseKind.COMPILER_ERROR),
        (OSError(errno.EDQUOT, "quota"), CauseKind.DISK_FULL),
        (raised_from(StoreError("cannot write"), OSError(errno.ENOSPC, "")), CauseKind.DISK_FULL),
        (StoreError("cannot write"), CauseKind.STORE),
        (ToolchainRefusal("no"), CauseKind.REFUSED),
        (subprocess.CalledProcessError(137, ["sh", "-c"]), CauseKind.OUT_OF_MEMORY),
        (subprocess.CalledProcessError(-6, "cc1plus -x"), CauseKind.SIGNAL),
        (
            raised_from(RuntimeError("lowering"), subprocess.CalledProcessError(-9, ["g++"])),
            CauseKind.OUT_OF_MEMORY,
        ),
    ],
)
def test_causes_of_exceptions(error: BaseException, kind: CauseKind) -> None:
    assert cause_of_exception(error).kind is kind


def test_an_exception_handled_on_the_way_is_not_the_cause() -> None:
    error = ValueError("operand 3")
    error.__context__ = OSError(errno.ENOSPC, "a cache that is full")
    assert cause_of_exception(error).text == "ValueError: operand 3"


@pytest.mark.parametrize(
    ("status", "kind", "text"),
    [
        (70 << 8, CauseKind.COMPILER_ERROR, "exit code 70"),
        (137 << 8, CauseKind.OUT_OF_MEMORY, "signal 9"),
        (9, CauseKind.OUT_OF_MEMORY, "signal 9"),
        (11, CauseKind.SIGNAL, "signal 11 (SIGSEGV)"),
        (0, CauseKind.COMPILER_ERROR, "without leaving an artifact"),
    ],
)
def test_causes_of_exits(status: int, kind: CauseKind, text: str) -> None:
    cause = cause_of_exit(status)
    assert cause.kind is kind
    assert text in cause.text


def test_descendants_and_their_memory() -> None:
    script = "import subprocess, sys; subprocess.run(['sh', '-c', 'sleep 60 & sleep 60; true'])"
    with subprocess.Popen([sys.executable, "-c", script]) as child:
        try:
            tree = psutil.Process(child.pid)
            deadline = time.monotonic() + 10
            while len(tree.children(recursive=True)) < 3 and time.monotonic() < deadline:
                time.sleep(0.01)
            below = [process.pid for process in tree.children(recursive=True)]
            assert len(below) == 3
            assert sorted(processes.descendants(child.pid)) == sorted(below)
            rss = sum(psutil.Process(pid).memory_info().rss for pid in [child.pid, *below])
            assert processes.resident_bytes([child.pid, *below]) == pytest.approx(rss, rel=0.2)
        finally:
            for pid in [*processes.descendants(child.pid), child.pid]:
                psutil.Process(pid).kill()


def test_a_farm_folder_lives_as_long_as_its_farm(folder: Path) -> None:
    with farm_folder() as mine:
        (mine / "read-only").mkdir()
        (mine / "read-only" / "file").touch()
        (mine / "read-only").chmod(0o500)
        remove_abandoned(farms_directory())
        assert (mine / "read-only" / "file").exists()
        abandoned = farms_directory() / "farm-abandoned"
        abandoned.mkdir()
        abandoned.with_suffix(".lock").touch()
        with farm_folder() as other:
            assert not abandoned.exists()
            assert set(farms_directory().iterdir()) == {
                mine,
                mine.with_suffix(".lock"),
                other,
                other.with_suffix(".lock"),
            }
    assert not list(farms_directory().iterdir())


def test_a_scratch_folder_others_can_write_in_is_refused(folder: Path) -> None:
    farms_directory().parent.chmod(0o777)
    with pytest.raises(StoreError, match="only you") as refused:
        farms_directory()
    assert refused.value.hint is not None
    assert "TMPDIR" in refused.value.hint
