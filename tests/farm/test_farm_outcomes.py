"""What became of units, seen through whole farms of a toolchain that misbehaves."""

from __future__ import annotations

import json
import os
import re
import resource
import time
from pathlib import Path

import farmtools
import jsonschema
import pytest

from neffbuild.cache.directory import DirectoryStore
from neffbuild.cache.records import read_failures, read_runs
from neffbuild.config.errors import ToolchainRefusal
from neffbuild.farm.outcomes import (
    CauseKind,
    FewerWorkers,
    Outcome,
    UnitDeferred,
    UnitFinished,
    UnitStarted,
)

EXPECTED = {
    "raise": (CauseKind.COMPILER_ERROR, "ValueError: operand 3 has no layout"),
    "exit_70": (CauseKind.COMPILER_ERROR, "the worker ended with exit code 70"),
    "exit_0": (CauseKind.COMPILER_ERROR, "the worker ended without leaving an artifact"),
    "no_file": (CauseKind.COMPILER_ERROR, "the compile ended without leaving an artifact"),
    "sys_exit_70": (CauseKind.COMPILER_ERROR, "the compile ended with exit code 70"),
    "compiler_exits_70": (CauseKind.COMPILER_ERROR, "sh ended with exit code 70"),
    "compiler_is_killed": (CauseKind.OUT_OF_MEMORY, "sh was killed by signal 9 (SIGKILL)"),
    "kill_itself": (CauseKind.OUT_OF_MEMORY, "the worker was killed by signal 9 (SIGKILL)"),
    "segfault": (CauseKind.SIGNAL, "the worker was killed by signal 11 (SIGSEGV)"),
    "miss_a_compiler": (CauseKind.MISSING_DEPENDENCY, "'no-such-compiler'"),
    "fill_the_disk": (CauseKind.DISK_FULL, "No space left on device: 'big'"),
    "delete_its_folder": (CauseKind.COMPILER_ERROR, "'program.bin'"),
}
SCHEMA = Path(__file__).parents[2] / "docs/schemas/neffbuild.run-1.json"


def test_every_failure_costs_its_own_unit_and_names_its_cause(folder: Path) -> None:
    behaviour = {f"b{number}": name for number, name in enumerate(EXPECTED, start=2)}
    farmtools.order(folder, **behaviour)
    result = farmtools.run(folder, 40)
    assert result.counts == {
        "built": 40 - len(EXPECTED),
        "cached": 0,
        "failed": len(EXPECTED),
        "cancelled": 0,
        "skipped": 0,
    }
    assert farmtools.check_store(folder) == 40 - len(EXPECTED)
    failed = {unit.bucket_name: unit for unit in result.units if unit.outcome is Outcome.FAILED}
    recorded = read_failures(
        DirectoryStore(folder / "store"), [unit.key for unit in failed.values()]
    )
    for name, what in behaviour.items():
        unit = failed[f"decode_{name}_ctx128"]
        kind, text = EXPECTED[what]
        assert unit.cause is not None
        assert unit.cause.kind is kind
        assert text in unit.cause.text
        assert unit.log is not None
        assert f"about to {what}" in unit.log.read_text()
        assert recorded[unit.key].cause == kind.value
        assert recorded[unit.key].message == unit.cause.text
        assert f"about to {what}" in recorded[unit.key].log_tail
        assert str(folder) not in unit.cause.text


def test_a_failed_unit_is_tried_again_and_its_failure_forgotten(folder: Path) -> None:
    farmtools.order(folder, b2="raise")
    (failed,) = (u for u in farmtools.run(folder, 3).units if u.outcome is Outcome.FAILED)
    assert failed.log is not None
    assert failed.log.exists()
    farmtools.order(folder)
    again = farmtools.run(folder, 3)
    assert [unit.outcome for unit in again.units] == ["cached", "built", "cached"]
    assert not read_failures(DirectoryStore(folder / "store"), [failed.key])
    assert not failed.log.exists()


def test_a_failure_that_may_pass_is_retried_after_the_others(folder: Path) -> None:
    farmtools.order(folder, b3="kill_itself_once", b4="raise")
    result = farmtools.run(folder, 4, retries=2)
    assert [unit.outcome for unit in result.units] == ["built", "built", "built", "failed"]
    started = [name for name, _ in farmtools.journal(folder)]
    assert started.count("decode_b3_ctx128") == 2
    assert started.count("decode_b4_ctx128") == 1  # a deterministic failure
    assert started[-1] == "decode_b3_ctx128"


def test_a_unit_that_dies_alone_too_is_given_up(folder: Path) -> None:
    farmtools.order(folder, b1="kill_itself")
    assert farmtools.run(folder, 1, retries=2).counts["failed"] == 1
    assert len(farmtools.journal(folder)) == 2


def test_a_timeout_ends_the_tree_and_frees_the_lock(folder: Path) -> None:
    # The compiler ignores SIGTERM and has left processes, one of them in another session.
    farmtools.order(folder, seconds=0.1, b2="hang")
    left: list[str] = []

    def on_event(event: object) -> None:
        # At once, not only when the farm ends.
        if isinstance(event, UnitFinished) and event.result.outcome is Outcome.FAILED:
            left.extend(p.name() for p in farmtools.left_processes() if "300" in p.cmdline())

    result = farmtools.run(folder, 4, timeout=0.8, on_event=on_event)
    hung = result.units[1]
    assert hung.cause is not None
    assert hung.cause.kind is CauseKind.TIMEOUT
    assert "0.8 s" in hung.cause.text
    assert result.counts["built"] == 3
    assert not left
    farmtools.order(folder)
    assert farmtools.run(folder, 4).counts["built"] == 1


def test_a_memory_limit_counts_the_whole_tree(folder: Path) -> None:
    farmtools.order(folder, b1="eat_memory")
    result = farmtools.run(folder, 2, memory=200 << 20)
    assert result.units[0].cause is not None
    assert result.units[0].cause.kind is CauseKind.OUT_OF_MEMORY
    assert "200 MiB" in result.units[0].cause.text
    peak = result.units[0].peak_memory_bytes
    assert peak is not None
    assert 200 << 20 < peak < 1 << 30
    assert result.units[1].outcome is Outcome.BUILT


def test_what_a_compiler_leaves_running_is_ended(folder: Path) -> None:
    farmtools.order(folder, b1="leave_a_daemon")
    assert farmtools.run(folder, 1).counts["built"] == 1
    assert not farmtools.left_processes()


def test_a_compiler_may_have_a_daemon_while_it_runs(folder: Path) -> None:
    farmtools.order(folder, b1="wait_for_a_daemon")
    assert farmtools.run(folder, 1).counts["built"] == 1


def test_a_flood_of_output_is_bounded(folder: Path) -> None:
    farmtools.order(folder, b1="flood")
    (unit,) = farmtools.run(folder, 1).units
    assert unit.log is not None
    assert unit.log.stat().st_size < 1.1 * 2**20
    text = unit.log.read_text()
    assert "\nfirst\n" in text
    assert "\nlast\n" in text
    assert "bytes left out" in text
    assert "after the flood" in unit.log_tail


def test_workers_see_the_keyed_environment_and_the_passed_list(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXXFLAGS", "-O0")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("HOSTILE_KEYED", "no")
    monkeypatch.setenv("LANG", "C.UTF-8")
    farmtools.order(folder, b1="show_environment")
    (unit,) = farmtools.run(folder, 1).units
    assert unit.log is not None
    shown = dict(re.findall(r"^([A-Z_]+)=(.*)$", unit.log.read_text(), re.MULTILINE))
    passed = {"PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "XDG_RUNTIME_DIR"} & os.environ.keys()
    fixed = {"OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PYTHONHASHSEED"}
    assert shown.keys() - {"LC_CTYPE", "OOM_SCORE_ADJ", "GETTEMPDIR"} == passed | fixed | {
        "HOSTILE_KEYED",
        "TMPDIR",
    }
    assert shown["HOSTILE_KEYED"] == "yes"
    # Where memory runs out, the kernel takes a compile and not the farm.
    assert shown["OOM_SCORE_ADJ"] == "500"
    assert shown["GETTEMPDIR"] == shown["TMPDIR"]
    assert shown["TMPDIR"].startswith(os.environ["TMPDIR"] + "/neffbuild-farms")


def test_the_run_is_recorded_and_validates(folder: Path) -> None:
    farmtools.order(folder, b2="raise")
    result = farmtools.run(folder, 3)
    ((_, recorded),) = read_runs(DirectoryStore(folder / "store"))
    shapes = [unit.pop("shape") for unit in recorded["units"]]
    assert [shape["num_seqs"] for shape in shapes] == [1, 2, 3]
    assert len({unit.pop("kin") for unit in recorded["units"]}) == 1
    assert recorded == result.document()
    jsonschema.validate(recorded, json.loads(SCHEMA.read_text()))
    built = recorded["units"][0]
    assert built["compile_seconds"] > 0
    assert built["cpu_seconds"] > 0
    assert built["peak_memory_bytes"] > 1 << 20
    assert built["artifact_bytes"] == 64 * 64 + 2
    assert built["scratch_bytes"] >= 64 * 64
    assert built["attempts"] == 1


def test_a_toolchain_whose_preload_starts_threads_is_refused(folder: Path) -> None:
    farmtools.order(folder)
    with pytest.raises(ToolchainRefusal, match="starts_a_thread started a thread"):
        farmtools.run(folder, 1, toolchain="threaded")


def test_a_toolchain_whose_preload_kills_the_server_is_refused(folder: Path) -> None:
    farmtools.order(folder)
    with pytest.raises(ToolchainRefusal, match="the server they are forked from dies"):
        farmtools.run(folder, 2, toolchain="deadly")


def test_an_error_in_the_caller_ends_the_farm(folder: Path) -> None:
    farmtools.order(folder, seconds=30)

    def on_event(event: object) -> None:
        if isinstance(event, UnitStarted):
            assert farmtools.becomes_empty(lambda: [] if (folder / "journal").exists() else [0])
            raise BrokenPipeError

    began = time.monotonic()
    with pytest.raises(BrokenPipeError):
        farmtools.run(folder, 4, on_event=on_event)
    assert time.monotonic() - began < 10
    assert not farmtools.left_processes()


def test_units_finish_in_the_caller_as_they_finish(folder: Path) -> None:
    farmtools.order(folder, seconds=0.01, b1="raise")
    finished: list[str] = []

    def on_event(event: object) -> None:
        if isinstance(event, UnitFinished):
            stored = farmtools.check_store(folder)
            finished.append(event.unit.shape.bucket_name)
            assert stored >= len(finished) - 1
            # Its scratch is gone as well: a grid's would not fit on the disk.
            (farm,) = (path for path in farmtools.left_folders() if path.is_dir())
            assert not list(farm.glob(f"{event.unit.key[:8]}*"))

    result = farmtools.run(folder, 6, on_event=on_event)
    assert sorted(finished) == sorted(unit.bucket_name for unit in result.units)
    # Longest expected first: the largest batch before the smallest.
    assert finished.index("decode_b6_ctx128") < finished.index("decode_b1_ctx128")


def test_what_no_file_and_no_terminal_takes_costs_its_unit_alone(folder: Path) -> None:
    farmtools.order(folder, b1="speak_no_utf8", b2="dig_deep")
    result = farmtools.run(folder, 3)
    assert [unit.outcome for unit in result.units] == ["failed", "failed", "built"]
    said, deep = (unit.cause for unit in result.units[:2])
    assert said is not None
    assert said.text == "ValueError: caf\\udce9.cc\\x1b[2J: bad"
    assert deep is not None
    assert deep.text == "ValueError: deep enough"
    assert farmtools.run(folder, 3).counts["failed"] == 2  # and the host is good for the next run


def test_a_limit_of_open_files_makes_fewer_workers(folder: Path) -> None:
    farmtools.order(folder, seconds=0.2)
    seen: list[object] = []
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = len(list(Path("/proc/self/fd").iterdir())) + 30
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
    try:
        result = farmtools.run(folder, 12, workers=12, retries=2, on_event=seen.append)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert result.counts["built"] == 12
    (fewer,) = (event for event in seen if isinstance(event, FewerWorkers))
    assert f"the limit of open files is reached (`ulimit -n` is {most})" in fewer.reason
    assert 1 <= fewer.running < 12
    deferred = [event for event in seen if isinstance(event, UnitDeferred)]
    assert deferred
    assert all(event.pause > 0 for event in deferred)


def test_a_stopped_supervisor_does_not_void_a_timeout(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neffbuild.farm.local._SLACK_SECONDS", 1.0)
    # It may be stopped before it could say who it is.
    monkeypatch.setattr("neffbuild.farm.local._START_SECONDS", 20.0)
    farmtools.order(folder, b1="stop_its_supervisor")
    result = farmtools.run(folder, 2, timeout=0.5, retries=0)
    assert [unit.outcome for unit in result.units] == ["failed", "built"]
    cause = result.units[0].cause
    assert cause is not None
    assert cause.kind is CauseKind.LOST_WORKER
    assert not farmtools.left_processes()
