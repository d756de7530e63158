"""Hosts that let a farm start fewer processes, or open fewer files, than it has work for."""

from __future__ import annotations

import os
import pty
from collections.abc import Sequence

import psutil
import pytest
from cli_samples import Project, as_another_user, order

_UID = 4_000_000_000 + os.getpid()
"""Of nobody else: processes are counted by user."""


def limited(project: Project, *limits: str) -> Sequence[str]:
    """What to put before a command to run it within these limits of `prlimit`."""
    folders = [project.root, *(project.root / name for name in ("tmp", "home"))]
    user = as_another_user(*folders, uid=_UID)
    if user is None:
        pytest.skip("root has to become somebody with limits")
    return [*user, "prlimit", *limits]


def left_behind(project: Project) -> list[object]:
    folders = list((project.root / "tmp").glob("neffbuild-farms-*/*/*"))
    return [*folders, *(p for p in psutil.process_iter() if p.uids().real == _UID)]


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        ("--nproc=1", "the limit of processes is reached (`ulimit -u` is 1)"),
        ("--nofile=14", "the limit of open files is reached (`ulimit -n` is 14)"),
    ],
)
def test_where_nothing_can_be_started_one_sentence_says_why(
    project: Project, limit: str, said: str
) -> None:
    ran = project.run("compile", project.write(), "--json", prefix=limited(project, limit))
    assert ran.status == 1
    assert said in ran.error["message"]
    assert "fewer workers" in ran.error["hint"]
    assert not left_behind(project)


def test_what_this_user_may_not_start_now_is_tried_again_and_its_limit_named(
    project: Project,
) -> None:
    """The command, its server, a supervisor, a worker and the thread that publishes; no second unit."""
    config = project.write(control=order(project.root, seconds=0.3))
    os.chown(project.root / "control.json", _UID, _UID)
    ran = project.run(
        "compile", config, "--workers", "2", "--json", prefix=limited(project, "--nproc=7")
    )
    assert ran.status == 0, ran
    assert ran.document["counts"]["built"] == 6
    said = "no process could be started: the limit of processes is reached (`ulimit -u` is 7)"
    assert f"deferred: {said}; tried again in" in ran.err
    assert f"2 workers asked for; 1 run: {said}" in ran.err
    assert not left_behind(project)


def test_where_no_unit_has_a_process_all_fail_of_it(project: Project) -> None:
    words = ["compile", project.write(), "--only", "*_b1_*", "--json"]
    ran = project.run(*words, prefix=limited(project, "--nproc=2"))
    assert ran.status == 1
    assert {unit["cause_kind"] for unit in ran.document["units"]} == {"lost_worker"}
    assert all("raise `ulimit -u`" in unit["cause"] for unit in ran.document["units"])
    assert not left_behind(project)


def test_without_a_thread_to_draw_it_a_terminal_gets_plain_lines(project: Project) -> None:
    terminal, side = pty.openpty()
    words = ["compile", project.write(), "--json"]
    prefix = limited(project, "--nproc=1")
    ran = project.run(*words, prefix=prefix, stderr=side, env={"TERM": "xterm"})
    os.close(side)
    assert ran.status == 1
    assert "the limit of processes is reached (`ulimit -u` is 1)" in ran.error["message"]
    assert os.read(terminal, 1 << 16).startswith(b"6 units, ")
    os.close(terminal)


def test_a_limit_that_stops_the_command_itself_is_named(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("neffbuild.cli.options.only_config", refused)
    ran = project.call("compile", project.write(), "--json")
    assert ran.status == 1
    assert "the limit of processes is reached" in ran.error["message"]
