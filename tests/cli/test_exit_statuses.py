"""Every exit status of the command line, each produced by a real run."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import cli_samples
import pytest
from cli_samples import INDUCTOR, UNITS, Project

from neffbuild.cli import output
from neffbuild.config import errors


def flip_a_byte(store: Path) -> None:
    blob = max((store / "v1/blobs").rglob("*"), key=lambda path: path.is_file())
    blob.chmod(0o644)
    with blob.open("r+b") as file:
        first = file.read(1)
        file.seek(0)
        file.write(bytes([first[0] ^ 1]))


def pull_from_damaged(project: Project, remote: Path) -> list[str]:
    flip_a_byte(remote)
    return ["pull", str(remote), "--tag", "default:t", "--cache", str(project.root / "other")]


STATUSES: dict[str, tuple[int, Callable[[Project, Path], list[str]]]] = {
    "plan of nothing compiled": (0, lambda p, r: ["plan", "config.yaml", "--cache", "empty"]),
    "compile with everything there": (0, lambda p, r: ["compile", "config.yaml"]),
    "plan --check": (1, lambda p, r: ["plan", "config.yaml", "--check", "--cache", "empty"]),
    "report": (1, lambda p, r: ["report", "config.yaml", "--cache", "empty"]),
    "verify": (1, lambda p, r: ["verify", "config.yaml", "--cache", "empty"]),
    "push": (1, lambda p, r: ["push", "config.yaml", "--cache", "empty", "--to", str(r)]),
    "no config": (2, lambda p, r: ["plan"]),
    "wrong config": (2, lambda p, r: ["plan", p.write("wrong.yaml", max_num_seqs=0)]),
    "wrong option": (2, lambda p, r: ["plan", "config.yaml", "--fast"]),
    "no such command": (2, lambda p, r: ["plant", "config.yaml"]),
    "refused by the toolchain": (
        2,
        lambda p, r: [
            "compile",
            p.write("tp.yaml", toolchain=INDUCTOR, tensor_parallel_size=2),
        ],
    ),
    "no such tag": (3, lambda p, r: ["pull", str(r), "--tag", "default:none"]),
    "no such store": (3, lambda p, r: ["verify", "file:///no/such/store"]),
    "push to no directory": (3, lambda p, r: ["push", "config.yaml", "--to", "config.yaml/x"]),
    "damage met by pull": (4, pull_from_damaged),
}


@pytest.fixture(scope="module")
def pushed(compiled: Project, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that the compiled config was pushed to as `default:t`."""
    remote = tmp_path_factory.mktemp("pushed") / "remote"
    assert compiled.run("push", "config.yaml", "--to", str(remote), "--tag", "t").status == 0
    return remote


@pytest.fixture
def with_copies(compiled: Project, pushed: Path, project: Project) -> tuple[Project, Path]:
    """A project and a remote store of its own, both with everything in them."""
    project.write()
    shutil.copytree(compiled.cache, project.cache)
    remote = project.root / "remote"
    shutil.copytree(pushed, remote)
    return project, remote


@pytest.mark.parametrize("case", STATUSES)
def test_exit_statuses(with_copies: tuple[Project, Path], case: str) -> None:
    status, words_of = STATUSES[case]
    ran = with_copies[0].run(*words_of(*with_copies))
    assert ran.status == status, ran
    if ran.err:
        assert ran.err.startswith("neffbuild: error: ")
        assert ran.out == ""
    else:
        assert ran.out


def test_damage_found_by_verify_is_4_and_repaired_by_compile(
    with_copies: tuple[Project, Path],
) -> None:
    project, remote = with_copies
    flip_a_byte(project.cache)
    ran = project.run("verify", "config.yaml", "--json")
    assert ran.status == 4
    [problem, *more] = ran.document["problems"]
    assert {one["kind"] for one in (problem, *more)} == {"bad_digest"}
    assert problem["unit"] in UNITS
    assert not ran.document["ok"]
    # Out of service from now on: missing, no longer damaged.
    assert project.run("verify", "config.yaml").status == 1
    assert project.run("compile", "config.yaml").status == 0
    assert project.run("verify", "config.yaml").status == 0

    flip_a_byte(remote)
    ran = project.run("verify", str(remote), "--json")
    assert ran.status == 4
    assert {one["kind"] for one in ran.document["problems"]} == {"bad_digest"}
    assert project.run("verify", str(remote), "--tag", "default:t").status == 4


def test_the_documented_statuses_are_those_of_the_errors() -> None:
    table = (cli_samples.REPOSITORY / "docs/json.md").read_text(encoding="utf-8")
    raised = {
        kind.exit_status
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.NeffbuildError)
    }
    for status in {0, output.INTERNAL, output.INTERRUPTED} | raised:
        assert f"\n| {status} | " in table
    assert raised == {1, 2, 3, 4}


def test_an_interrupt_ends_with_130_and_the_next_run_goes_on(project: Project) -> None:
    control = cli_samples.order(project.root, seconds=0.5)
    config = project.write(control=control)
    with project.start("compile", config, "--workers", "1") as process:
        assert process.stderr is not None
        while b"[1/6]" not in process.stderr.readline():
            pass
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in err
    assert b"cancelled" in out
    plan = project.run("plan", config, "--json").document
    assert 1 <= plan["counts"]["cached"] < 6
    cli_samples.order(project.root)
    rest = project.run("compile", config, "--json").document
    assert rest["counts"]["built"] == 6 - plan["counts"]["cached"]


def test_a_reader_that_leaves_costs_nothing(with_copies: tuple[Project, Path]) -> None:
    project = with_copies[0]
    for words, status in (
        (["plan", "config.yaml", "--json"], 0),
        (["plan", "config.yaml", "--check", "--cache", "empty"], 1),
        (["--help"], 0),
    ):
        read, write = os.pipe()
        os.close(read)
        ran = project.run(*words, stdout=write)
        os.close(write)
        assert (ran.status, ran.err) == (status, "")


def test_a_farm_outlives_the_reader_of_its_progress(project: Project) -> None:
    read, write = os.pipe()
    os.close(read)
    ran = project.run("compile", project.write(), stderr=write)
    os.close(write)
    assert ran.status == 0
    assert "6 units" in ran.out


@pytest.mark.parametrize(
    ("words", "status", "reason"),
    [
        (["plan", "config.yaml"], 1, ""),
        (["plan", "config.yaml", "--json"], 1, ""),
        (["plan", "nowhere.yaml", "--json"], 2, "there is no file nowhere.yaml"),
        (["--help"], 1, ""),
    ],
)
def test_a_full_disk_behind_a_redirection_is_said(
    project: Project, words: list[str], status: int, reason: str
) -> None:
    project.write()
    with Path("/dev/full").open("wb") as full:
        ran = project.run(*words, stdout=full)
    assert ran.status == status
    assert "cannot write the result to standard output: No space left on device" in ran.err
    assert reason in ran.err


def test_events_that_cannot_be_written_cost_no_unit(project: Project) -> None:
    config = project.write()
    with Path("/dev/full").open("wb") as full:
        ran = project.run("compile", config, "--json-lines", stdout=full)
    assert ran.status == 1
    said = "cannot write the result to standard output: No space left on device"
    assert ran.err.count(f"{said}; the run goes on without it") == 1
    assert f"error: {said}" in ran.err
    assert project.call("plan", config, "--check").status == 0


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["plan", ""], "the config's name is ''"),
        (["plan", "config.yaml", "--cache", ""], "an empty path"),
        (["plan", "config.yaml", "--cache", "~nobody-of-that-name/c"], "cannot be expanded"),
        (["plan", "--", "vllm", "serve", "model", "--label", b"\xff"], "not UTF-8"),
        (["plan", "--", "vllm", "serve", "model", b"--\xff", "1"], "not UTF-8"),
        (["pull", "remote", "--digest", "zz"], "64 lower-case hex digits"),
        (["replay", "config.yaml", "--steps", "100000000"], "--steps"),
    ],
)
def test_a_slip_on_the_command_line_is_a_wrong_command_line(
    project: Project, words: list[str], reason: str
) -> None:
    project.write()
    ran = project.run(*map(os.fsdecode, words), "--json" if "--" not in words else "--verbose")
    assert ran.status == 2
    assert reason in (ran.out + ran.err)


def test_a_bug_is_told_from_a_failed_unit(project: Project) -> None:
    broken = project.root / "broken"
    (broken / "broken-1.0.dist-info").mkdir(parents=True)
    (broken / "broken-1.0.dist-info/METADATA").write_text("Name: broken\nVersion: 1.0\n")
    (broken / "broken-1.0.dist-info/entry_points.txt").write_text(
        "[neffbuild.toolchains]\nbroken = broken:Toolchain\n"
    )
    (broken / "broken.py").write_text("class Toolchain:\n    name = 'broken'\n")
    env = {"PYTHONPATH": str(broken)}
    config = project.write(toolchain={"name": "broken"})
    ran = project.run("plan", config, "--json", env=env)
    assert ran.status == 70
    assert "internal error, AttributeError" in ran.error["message"]
    # Asked for, the traceback is there.
    with project.start("--log-level", "debug", "plan", config, env=env) as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 70
    assert b"Traceback" in err


def test_nothing_is_left_running(project: Project) -> None:
    config = project.write(control=cli_samples.order(project.root, seconds=30))
    with project.start("compile", config, start_new_session=True) as process:
        assert process.stderr is not None
        process.stderr.readline()
        time.sleep(0.3)
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 130
    left = subprocess.run(["pgrep", "-f", str(project.root)], capture_output=True, text=True)
    assert left.stdout == ""


def test_nobody_listening_on_stderr_costs_nothing(project: Project) -> None:
    config = project.write()
    words = [sys.executable, "-P", "-m", "neffbuild.cli.main", "compile", config, "--json"]
    line = f"{shlex.join(words)} 2>&-"
    ran = subprocess.run(
        ["sh", "-c", line],
        cwd=project.root,
        env=project.environment,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout
    assert json.loads(ran.stdout)["counts"]["built"] == 6


def test_a_working_directory_that_is_gone_is_named(project: Project) -> None:
    gone = project.root / "gone"
    gone.mkdir()
    config = str(project.root / project.write())
    line = f"rmdir {gone} && {shlex.join([sys.executable, '-P', '-m', 'neffbuild.cli.main'])} plan {config}"
    ran = subprocess.run(
        ["sh", "-c", line], cwd=gone, env=project.environment, capture_output=True, text=True
    )
    assert ran.returncode == 2
    assert "the working directory does not exist any more" in ran.stderr
