"""`neffbuild compile` and what `plan` and `report` say before and after it."""

from __future__ import annotations

import json
import os
import pty
import shlex
from pathlib import Path

import cli_samples
import jsonschema
import pytest
from cli_samples import HOSTILE, INDUCTOR, UNITS, Project

from neffbuild.farm.host import LinuxHost


def outcomes(document: dict[str, list[dict[str, str]]]) -> dict[str, str]:
    return {unit["bucket_name"]: unit["outcome"] for unit in document["units"]}


def test_a_compile_fills_the_cache_and_the_next_does_nothing(project: Project) -> None:
    config = project.write()
    plan = project.call("plan", config)
    assert "6 units (6 target): 0 cached, 6 missing" in plan.out
    assert f"next: neffbuild compile {config}" in plan.out
    first = project.run("compile", config)
    assert first.status == 0
    assert first.err.startswith("6 units, ")
    for number, name in enumerate(UNITS):
        assert f"[{number + 1}/6] built" in first.err
        assert f"{name}" in first.out
    second = project.run("compile", config)
    assert second.status == 0
    assert second.out == f"nothing to do: all 6 units are cached in {project.cache}\n"
    assert second.err == ""
    assert "6 cached, 0 missing" in project.call("plan", config, "--check").out


def test_only_compiles_what_it_names(project: Project) -> None:
    config = project.write()
    ran = project.run("compile", config, "--only", "*_ctx1024", "--json")
    assert ran.status == 0
    assert outcomes(ran.document) == dict.fromkeys(UNITS[::2], "built")
    again = project.run("compile", config, "--only", "*_ctx1024")
    assert "all 3 units are cached" in again.out
    assert project.call("plan", config, "--json").document["counts"]["missing"] == 3


def test_limit_leaves_the_rest_and_says_so(project: Project) -> None:
    config = project.write()
    ran = project.run("compile", config, "--limit", "2")
    assert ran.status == 0
    assert f"4 more units are missing; next: neffbuild compile {config}" in ran.out
    ran = project.run("compile", config, "--limit", "3", "--json")
    assert list(outcomes(ran.document).values()).count("built") == 3
    assert list(outcomes(ran.document).values()).count("cached") == 2
    ran = project.run("compile", config, "--limit", "3", "--json")
    assert ran.document["counts"] == {"built": 1, "cached": 5, "failed": 0}


def test_workers_run_at_once_as_far_as_there_are_cores_for_them(project: Project) -> None:
    config = project.write(control=cli_samples.order(project.root, seconds=0.3))
    ran = project.run("compile", config, "--workers", "64")
    assert ran.status == 0
    cores = LinuxHost().cpus
    assert f"6 units, {min(6, cores)} at once" in ran.err
    assert (f"64 workers asked for; {cores} run at once" in ran.err) == (cores < 6)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--workers", "0"], "--workers is '0'"),
        (["--workers", "many"], "--workers is 'many'"),
        (["--timeout", "-1"], "--timeout is '-1'"),
        (["--timeout", "nan"], "--timeout is 'nan'"),
        (["--timeout", "soon"], "'soon' is not a duration"),
        (["--memory", "lots"], "'lots' is not a size"),
        (["--retries", "-1"], "--retries"),
        (["--address", "10.0.0.1:6379"], "the executor is local: only ray looks at it"),
        (["--skip-failed", "--retry-failed"], "exclude each other"),
        (["--json-lines", "--json"], "exclude each other"),
    ],
)
def test_farm_options_that_cannot_be(project: Project, words: list[str], reason: str) -> None:
    ran = project.call("compile", project.write(), *words)
    assert ran.status == 2
    assert reason in (ran.out + ran.err)


def test_fields_of_another_executor_are_remarked_on(project: Project) -> None:
    farm = {"address": "10.0.0.1:6379", "resources": {"neuron_cores": 1}, "workers": 2}
    ran = project.call("compile", project.write(sections={"farm": farm}), "--only", "*_b1_*")
    assert ran.status == 0
    said = "not looked at by the executor local, only by ray: farm.address, farm.resources"
    assert said in ran.err.splitlines()


def test_what_to_type_again_is_for_the_same_units_and_the_same_store(project: Project) -> None:
    config = project.write(control=cli_samples.order(project.root, b2_ctx1024="exit_70"))
    words = ["--remote", "my store", "--only", "*_b2_*"]
    ran = project.run("compile", *words, config)
    assert ran.status == 1
    assert f"try again: neffbuild compile --remote 'my store' --only '*_b2_*' {config}" in ran.out


def test_options_win_over_the_farm_section(project: Project) -> None:
    control = cli_samples.order(project.root, b2_ctx1024="hang")
    config = project.write(control=control, sections={"farm": {"timeout": 600.0, "workers": 6}})
    ran = project.run("compile", config, "--timeout", "1s", "--workers", "1", "--json")
    [unit] = [one for one in ran.document["units"] if one["outcome"] == "failed"]
    assert (unit["bucket_name"], unit["cause_kind"]) == ("decode_b2_ctx1024", "timeout")
    assert "6 units, 1 at once" in ran.err


def test_every_event_is_a_line_of_json(project: Project) -> None:
    control = cli_samples.order(project.root, b2_ctx1024="compiler_exits_70")
    ran = project.run("compile", project.write(control=control), "--json-lines")
    assert ran.status == 1
    assert ran.err == ""
    *events, result = map(json.loads, ran.out.splitlines())
    for event in events:
        jsonschema.validate(event, cli_samples.schema("neffbuild.event/1"))
    jsonschema.validate(result, cli_samples.schema("neffbuild.run/1"))
    kinds = [event["event"] for event in events]
    assert kinds[0] == "farm_started"
    assert events[0]["units"] == 6
    for kind in ("unit_started", "unit_finished"):
        names = [event["bucket_name"] for event in events if event["event"] == kind]
        assert sorted(names) == sorted(UNITS)
    finished = {e["bucket_name"]: e["result"] for e in events if e["event"] == "unit_finished"}
    assert finished["decode_b2_ctx1024"]["cause_kind"] == "compiler_error"
    assert result["counts"] == {"built": 5, "cached": 0, "failed": 1}


class TestOneFailure:
    """One unit of six fails."""

    @pytest.fixture
    def failed(self, project: Project) -> Project:
        control = cli_samples.order(project.root, b2_ctx1024="compiler_exits_70")
        project.write(control=control)
        return project

    def test_costs_itself_alone(self, failed: Project) -> None:
        ran = failed.run("compile", "config.yaml", "--json")
        assert ran.status == 1
        assert ran.document["counts"] == {"built": 5, "cached": 0, "failed": 1}
        [unit] = [one for one in ran.document["units"] if one["outcome"] == "failed"]
        assert unit["bucket_name"] == "decode_b2_ctx1024"
        assert "sh ended with exit code 70" in unit["cause"]
        plan = failed.call("plan", "config.yaml", "--json").document
        assert plan["counts"]["cached"] == 5
        assert plan["counts"]["missing"] == 1

    def test_is_explained_where_it_is_met_again(self, failed: Project) -> None:
        ran = failed.run("compile", "config.yaml")
        assert ran.status == 1
        # The compiler's own words are in the log of the run itself.
        assert "failed decode_b2_ctx1024" in ran.err
        assert "    | error: NCC_EVRF007" in ran.err
        assert "1 unit is not compiled; try again: neffbuild compile config.yaml" in ran.out
        log = next(word for word in ran.out.split() if word.endswith(".log"))
        assert "NCC_EVRF007" in Path(log).read_text(encoding="utf-8")

        [planned] = [
            unit
            for unit in failed.call("plan", "config.yaml", "--json").document["units"]
            if unit["status"] == "missing"
        ]
        reason = "last compile failed (compiler_error): sh ended with exit code 70"
        assert planned["reason"] == reason
        assert reason in failed.call("plan", "config.yaml").out
        report = failed.call("report", "config.yaml")
        assert report.status == 1
        assert "sh ended with exit code 70" in report.out
        assert "next: neffbuild compile config.yaml" in report.out

    def test_may_be_left_out_or_tried_alone(self, failed: Project) -> None:
        assert failed.run("compile", "config.yaml", "--limit", "4").status == 1
        skipping = failed.run("compile", "config.yaml", "--skip-failed", "--json")
        assert skipping.status == 1
        assert skipping.document["counts"] == {"built": 2, "cached": 3, "failed": 0}
        assert outcomes(skipping.document)["decode_b2_ctx1024"] == "skipped"
        again = failed.run("compile", "config.yaml", "--skip-failed")
        assert again.err == ""
        assert "1 unit is not compiled" in again.out

        cli_samples.order(failed.root)
        retried = failed.run("compile", "config.yaml", "--retry-failed", "--json")
        assert outcomes(retried.document) == {"decode_b2_ctx1024": "built"}
        nothing = failed.run("compile", "config.yaml", "--retry-failed")
        said = "nothing to do: no failure of these units is recorded\n"
        assert (nothing.status, nothing.out) == (0, said)

    def test_leaves_the_rest_usable(self, failed: Project, tmp_path: Path) -> None:
        assert failed.run("compile", "config.yaml").status == 1
        remote = str(tmp_path / "remote")
        ran = failed.run("push", "config.yaml", "--to", remote, "--tag", "t", "--json")
        assert ran.status == 1
        assert "decode_b2_ctx1024" in ran.error["message"]
        assert "--allow-partial" in ran.error["hint"]
        push = ["push", "config.yaml", "--to", remote, "--tag", "t", "--allow-partial"]
        assert "pushed 5 of 6 units" in failed.run(*push).out
        pull = ["pull", remote, "--tag", "default:t", "--cache", "other", "--json"]
        assert failed.run(*pull).status == 1
        pulled = failed.run(*pull, "--allow-partial")
        assert pulled.document["units"] == 5

    def test_is_tried_again(self, failed: Project) -> None:
        assert failed.run("compile", "config.yaml").status == 1
        cli_samples.order(failed.root)
        ran = failed.run("compile", "config.yaml", "--json")
        assert ran.status == 0
        assert ran.document["counts"] == {"built": 1, "cached": 5, "failed": 0}
        assert failed.call("plan", "config.yaml", "--check").status == 0


def test_a_report_has_what_compiling_cost(compiled: Project) -> None:
    document = compiled.call("report", "config.yaml", "--json").document
    assert document["wall_seconds"] > 0
    assert [unit["bucket_name"] for unit in document["units"]] == UNITS
    for unit in document["units"]:
        assert unit["outcome"] == "cached"
        assert unit["compile_seconds"] > 0
        assert unit["peak_memory_bytes"] > 1 << 20
        assert unit["artifact_bytes"] == 64 * 64 + 2
    text = compiled.call("report", "config.yaml").out
    assert "6 units: " in text
    assert "24.0 KiB of artifacts" in text


def test_inductor_plans_for_many_ranks_and_refuses_to_compile(project: Project) -> None:
    config = project.write(toolchain=INDUCTOR, tensor_parallel_size=2)
    plan = project.call("plan", config, "--json")
    assert plan.status == 0
    assert plan.document["counts"]["missing"] == 6
    assert "tensor_parallel_size is 2" in plan.document["refusal"]
    assert (
        "to plan with only: the reference decoder is built for one rank only"
        in project.call("plan", config).out
    )
    ran = project.run("compile", config, "--json")
    assert ran.status == 2
    assert ran.error["kind"] == "toolchain"
    assert "tensor_parallel_size is 2" in ran.error["message"]
    assert "neffbuild plan" in ran.error["hint"]


def test_a_host_of_other_versions_is_refused_before_it_compiles(project: Project) -> None:
    config = project.write(toolchain={"name": "inductor", "versions": {"torch": "1.0"}})
    ran = project.run("compile", config)
    assert ran.status == 2
    assert "torch 1.0 is planned" in ran.err
    assert "built" not in ran.err


def test_next_steps_can_be_pasted(project: Project) -> None:
    (project.root / "my configs").mkdir()
    config = project.write("my configs/a b.yaml", model="../model")
    plan = project.call("plan", config, "--cache", "my cache")
    assert "next: neffbuild compile 'my configs/a b.yaml' --cache 'my cache'" in plan.out
    plan = project.call("plan", config, "--remote", "other store", "--shard", "1/2")
    following = next(line for line in plan.out.splitlines() if line.startswith("next: "))
    assert following == (
        "next: neffbuild compile --shard 1/2 --remote 'other store' 'my configs/a b.yaml'"
    )
    _, *words = shlex.split(following.removeprefix("next: "))
    assert project.call(*words).status == 0
    # The units are where they were asked for, beside the local cache.
    alone = [config, "--remote", "other store", "--cache", "new", "--shard", "1/2", "--check"]
    assert project.call("plan", *alone).status == 0
    line = ["--", "vllm", "serve", "./model", "--max-model-len=512"]
    plan = project.call("plan", "--remote", "other store", *line)
    assert (
        "next: neffbuild compile --remote 'other store' -- vllm serve ./model --max-model-len=512"
        in plan.out
    )


def on_a_terminal(project: Project, *words: str, **environment: str) -> tuple[int, str]:
    """Status and stderr of a run whose stderr is a terminal."""
    ours, theirs = pty.openpty()
    with project.start(*words, stderr=theirs, env={"TERM": "xterm", **environment}) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                part = os.read(ours, 1 << 16)
            except OSError:  # the other side is closed
                break
            if not part:
                break
            shown += part
    os.close(ours)
    return process.returncode, shown.decode()


def test_a_terminal_gets_a_display_and_ci_plain_lines(project: Project) -> None:
    config = project.write(control=cli_samples.order(project.root, b1_ctx1024="exit_70"))
    status, shown = on_a_terminal(project, "compile", config)
    assert status == 1
    assert "\x1b[" in shown
    assert "failed decode_b1_ctx1024" in shown
    project.write(toolchain=HOSTILE)
    status, shown = on_a_terminal(project, "compile", config, CI="1")
    assert status == 0
    assert "\x1b" not in shown
    assert "[6/6] built" in shown
