"""Farms on a Ray cluster of two nodes of this machine, with a store in an S3 server."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import farmtools
import pytest
from cli_samples import Project
from hostile_toolchain import HostileToolchain
from ray_place import PLUGINS, Farm, Place, wait_until, why_not

from neffbuild.cache.recipe import ToolchainIdentity
from neffbuild.config.build import BuildConfig
from neffbuild.farm import ray_executor
from neffbuild.farm.outcomes import (
    CauseKind,
    Event,
    Outcome,
    UnitFinished,
    UnitResult,
    UnitStarted,
)
from neffbuild.farm.ray_rules import Node, living_nodes, task_options

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

UNITS = 12


class Command:
    """`neffbuild` as a user of the cluster starts it, with a cache of its own."""

    def __init__(self, place: Place, folder: Path) -> None:
        self.farm = Farm(place, folder, place.new_store())
        self.project = Project(folder / "project")
        self.project.environment |= {
            name: os.environ[name]
            for name in os.environ
            if name.startswith("AWS_") or name in ("NO_PROXY", "TMPDIR", "XDG_RUNTIME_DIR")
        }
        self.project.environment["PYTHONPATH"] = PLUGINS
        self.config = self.write("placed")

    def write(self, toolchain: str, **fields: object) -> str:
        """A config of twelve units; its name."""
        farm = {"executor": "ray", "address": self.farm.place.address, "retries": 0, **fields}
        return self.project.write(
            f"{toolchain}.yaml",
            toolchain={"name": toolchain},
            sections={"cache": {"remotes": [{"url": self.farm.url}]}, "farm": farm},
            control=str(self.farm.folder / "control.json"),
            max_num_seqs=32,
        )

    def order(self, seconds: float) -> None:
        farmtools.order(self.farm.folder, seconds=seconds)

    def began(self) -> list[str]:
        return [unit for unit, _, _ in self.farm.places()]


@pytest.fixture
def command(place: Place, tmp_path: Path) -> Command:
    return Command(place, tmp_path)


def test_a_node_lost_in_the_middle_of_a_unit_costs_time_only(command: Command) -> None:
    command.order(seconds=1)
    project, farm = command.project, command.farm
    with project.start("compile", command.config, "--json-lines") as compiling:
        wait_until(lambda: any(node == "second" for _, node, _ in farm.places()))
        farm.place.lose_second()
        out, err = compiling.communicate(timeout=240)
    assert compiling.returncode == 0, err
    *events, report = [json.loads(line) for line in out.splitlines()]
    assert [unit["outcome"] for unit in report["units"]] == ["built"] * UNITS
    assert report["remotes"][0]["published"] == UNITS
    lost = {event["bucket_name"] for event in events if event["event"] == "unit_deferred"}
    assert lost
    assert all(
        "lost machine" in event["reason"] for event in events if event["event"] == "unit_deferred"
    )
    for unit in lost:
        assert [node for name, node, _ in farm.places() if name == unit] == ["second", "head"]
    # Whole, in the store all share, and again in the driver's own cache.
    keys = {unit["key"] for unit in report["units"]}
    assert farm.stored() == keys
    verified = project.run("verify", command.config, "--json")
    assert verified.status == 0, verified
    assert verified.document["entries_checked"] == UNITS
    pushed = project.run("push", command.config, "--to", farm.url, "--tag", "grid:one")
    assert pushed.status == 0, pushed
    verified = project.run("verify", farm.url, "--json")
    assert verified.status == 0, verified
    assert verified.document["entries_checked"] == UNITS


def test_units_that_need_a_device_wait_for_a_node_that_has_one(command: Command) -> None:
    command.order(seconds=0)
    config = command.write("device", node_wait=120.0)
    farm = command.farm
    farm.place.end_second()
    with command.project.start("compile", config, "--json-lines") as compiling:
        assert compiling.stderr is not None
        # Ray itself has something to say there, too.
        assert any(
            b"waits up to 120 s for a node that holds it" in line for line in compiling.stderr
        )
        farm.place.add_second()
        out, err = compiling.communicate(timeout=120)
    assert compiling.returncode == 0, err
    assert json.loads(out.splitlines()[-1])["counts"]["built"] == UNITS
    assert {(node, cores) for _, node, cores in farm.places()} == {("second", "0")}


def test_what_no_node_can_hold_is_reported_at_once(farm: Farm) -> None:
    farmtools.order(farm.folder)
    began = time.monotonic()
    result = farm.run(3, toolchain="device", resources={"neuron_cores": 16})
    assert time.monotonic() - began < 60
    assert result.counts["failed"] == 3
    assert not farm.places()
    cause = result.units[0].cause
    assert cause is not None
    assert cause.kind is CauseKind.REFUSED
    assert cause.text == (
        "no node of the Ray cluster can take the unit: it asks for 16 of neuron_cores on one node; "
        "of 2 living nodes, the largest has 1"
    )


def test_hostile_units_cost_only_themselves(farm: Farm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_EXECUTION_ENV", "known-to-the-driver-only")
    hostile = {
        "b1": ("hang", CauseKind.TIMEOUT),
        "b2": ("segfault", CauseKind.SIGNAL),
        "b3": ("exit_70", CauseKind.COMPILER_ERROR),
        "b4": ("eat_memory", CauseKind.OUT_OF_MEMORY),
        "b5": ("exit_0", CauseKind.COMPILER_ERROR),
        "b6": ("show_environment", CauseKind.COMPILER_ERROR),
    }
    farmtools.order(farm.folder, **{name: what for name, (what, _) in hostile.items()})
    seen: list[Event] = []
    result = farm.run(10, timeout=5.0, memory=200 << 20, on_event=seen.append)
    assert result.counts["built"] == 4
    assert len(farm.stored()) == 4
    by_name = {unit.bucket_name: unit for unit in result.units}
    for name, (what, kind) in hostile.items():
        unit = by_name[f"decode_{name}_ctx128"]
        assert unit.cause is not None
        assert unit.cause.kind is kind, unit
        assert unit.log is not None
        assert f"about to {what}" in unit.log.read_text()
    # Each unit is told of once, in order, and deterministic failures are not tried again.
    for unit in result.units:
        told = [e for e in seen if getattr(e, "unit", None) and e.unit.key == unit.key]
        assert [type(event) for event in told] == [UnitStarted, UnitFinished]
    # The node's own credentials, and none of the driver's.
    shown = by_name["decode_b6_ctx128"].log
    assert shown is not None
    environment = shown.read_text()
    assert f"AWS_ACCESS_KEY_ID={os.environ['AWS_ACCESS_KEY_ID']}" in environment
    assert "HOSTILE_KEYED=yes" in environment
    assert "AWS_EXECUTION_ENV" not in environment
    assert "known-to-the-driver-only" not in environment


def test_ray_workers_that_die_are_replaced_so_many_times(farm: Farm) -> None:
    farmtools.order(farm.folder, b1="kill_what_ray_started")
    result = farm.run(3)
    assert [unit.outcome for unit in result.units] == ["failed", "built", "built"]
    cause = result.units[0].cause
    assert cause is not None
    assert cause.kind is CauseKind.LOST_WORKER
    assert "lost machine" in cause.text
    tries = [unit for unit, _, _ in farm.places() if unit == "decode_b1_ctx128"]
    assert len(tries) == 1 + ray_executor.RESTARTS


def test_what_ray_ends_for_its_memory_is_not_started_again_by_ray(farm: Farm) -> None:
    farmtools.order(farm.folder, seconds=60)
    farm.place.end_second()
    farm.place.add_second(
        RAY_memory_usage_threshold="0.01",  # always exceeded
        RAY_memory_monitor_refresh_ms="250",
    )
    (unit,) = farm.run(1, toolchain="device").units
    farm.place.end_second()
    assert unit.cause is not None
    assert unit.cause.kind is CauseKind.OUT_OF_MEMORY
    assert len(farm.places()) <= 1


def test_a_unit_that_ran_out_of_memory_comes_again_alone(
    farm: Farm, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, float]] = []
    nodes: list[Node] = []

    def options(resources: dict[str, float]) -> dict[str, object]:
        asked.append(resources)
        nodes[:] = living_nodes(ray_executor.import_ray().nodes())
        return task_options(resources)

    monkeypatch.setattr(ray_executor, "task_options", options)
    farmtools.order(farm.folder, b2="kill_itself_once")
    result = farm.run(2, toolchain="device", retries=1)
    assert [unit.outcome for unit in result.units] == ["built", "built"]
    (second,) = (node.resources for node in nodes if "neuron_cores" in node.resources)
    first, _, again = asked
    assert again["memory"] == second["memory"] > first["memory"]
    assert (again["CPU"], again["neuron_cores"]) == (second["CPU"], 1)


def test_a_driver_that_is_killed_loses_nothing_committed(command: Command) -> None:
    command.order(seconds=1)
    project, farm = command.project, command.farm
    with project.start("compile", command.config) as compiling:
        wait_until(lambda: len(list(farm.store.list("entries/"))) >= 3)
        compiling.kill()
    assert farmtools.becomes_empty(farmtools.left_processes, 30)
    left = farm.stored()
    assert 3 <= len(left) < UNITS
    tried = len(farm.places())
    command.order(seconds=0)
    again = project.run("compile", command.config, "--json")
    assert again.status == 0, again
    outcomes = {unit["key"]: unit["outcome"] for unit in again.document["units"]}
    assert {key for key, outcome in outcomes.items() if outcome == "cached"} == left
    assert len(farm.places()) - tried == UNITS - len(left)
    assert farm.stored() == set(outcomes)


def test_interrupted_once_what_runs_is_finished(command: Command) -> None:
    command.order(seconds=2)
    with command.project.start("compile", command.config, "--json-lines") as compiling:
        wait_until(lambda: len(command.began()) >= 2)
        compiling.send_signal(signal.SIGINT)
        out, err = compiling.communicate(timeout=120)
    assert compiling.returncode == 130, err
    outcomes = [unit["outcome"] for unit in json.loads(out.splitlines()[-1])["units"]]
    assert len(command.farm.stored()) == outcomes.count("built")
    assert 2 <= outcomes.count("built") <= 4
    assert outcomes.count("built") + outcomes.count("cancelled") == UNITS


def test_interrupted_twice_what_runs_is_ended(command: Command) -> None:
    command.order(seconds=300)
    with command.project.start("compile", command.config, "--json") as compiling:
        wait_until(lambda: len(command.began()) >= 2)
        compiling.send_signal(signal.SIGINT)
        time.sleep(0.5)
        compiling.send_signal(signal.SIGINT)
        out, err = compiling.communicate(timeout=60)
    assert compiling.returncode == 130, err
    assert {unit["outcome"] for unit in json.loads(out)["units"]} == {"cancelled"}
    assert farmtools.becomes_empty(farmtools.left_processes, 10)


def refused(result: UnitResult) -> str:
    assert result.outcome is Outcome.FAILED
    assert result.cause is not None
    assert result.cause.kind is CauseKind.REFUSED
    return result.cause.text


def test_nodes_with_another_neffbuild_or_toolchain_refuse(
    farm: Farm, monkeypatch: pytest.MonkeyPatch
) -> None:
    farmtools.order(farm.folder)
    with monkeypatch.context() as patch:
        patch.setattr(ray_executor, "__version__", "9.9")
        (unit,) = farm.run(1).units
    assert "has neffbuild 0.1.0, the driver has 9.9" in refused(unit)

    genuine = HostileToolchain.identity

    def newer(self: HostileToolchain, config: BuildConfig) -> ToolchainIdentity:
        return replace(genuine(self, config), versions={"hostile": "2.0"})

    with monkeypatch.context() as patch:
        patch.setattr(HostileToolchain, "identity", newer)
        (unit,) = farm.run(1).units
    assert "versions {'hostile': '2.0'}, here {'hostile': '1.0'}" in refused(unit)
    assert not farm.places()


def test_refusals_before_anything_is_started(command: Command) -> None:
    project = command.project
    alone = project.write(
        "alone.yaml",
        toolchain={"name": "placed"},
        sections={"farm": {"executor": "ray", "address": command.farm.place.address}},
    )
    ran = project.run("compile", alone, "--json")
    assert ran.status == 2
    assert ran.error["field"] == "cache.remotes"
    odd = command.write("device", resources={"neuron_cores": 1.5})
    ran = project.run("compile", odd, "--json")
    assert ran.status == 2
    assert ran.error["field"] == "farm.resources"
    ran = project.run("compile", command.config, "--address", "ray://127.0.0.1:10001", "--json")
    assert ran.status == 2
    assert ran.error["field"] == "farm.address"
    ran = project.run("compile", command.config, "--address", "127.0.0.1:9", "--json")
    assert ran.status == 2
    assert ran.error["field"] == "farm.address"
    assert "127.0.0.1:9" in ran.error["message"]
    auto = command.write("placed", address="auto")
    ran = project.run("compile", auto, "--json", env={"RAY_ADDRESS": "127.0.0.1:9"})
    assert ran.status == 2
    assert "$RAY_ADDRESS '127.0.0.1:9'" in ran.error["message"]
