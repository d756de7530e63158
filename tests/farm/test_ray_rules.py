"""What units ask of a Ray cluster, and what is said where it has too little. Needs no Ray."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import farmtools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neffbuild.cache.directory import DirectoryStore
from neffbuild.cache.tiered import Tier, TieredStore
from neffbuild.config.build import FarmConfig
from neffbuild.config.errors import ConfigError, MissingExtra
from neffbuild.farm.ray_connection import connected
from neffbuild.farm.ray_rules import Node, alone_on, asked, living_nodes, shortfall, task_options
from neffbuild.farm.run import compile_units
from neffbuild.toolchain.registry import load_toolchain

GIB = 1 << 30
CPU_NODE = Node("a", "spot-1", {"CPU": 16.0, "memory": 100.0 * GIB})
DEVICE_NODE = Node("b", "trn-1", {"CPU": 8.0, "memory": 32.0 * GIB, "neuron_cores": 2.0})


def test_what_a_unit_asks_for() -> None:
    plain = asked(cpus=2, needs_device=False, memory=3 * GIB, own={})
    assert plain == {"CPU": 2, "memory": 3 * GIB}
    assert asked(cpus=1, needs_device=True, memory=None, own={}) == {"CPU": 1, "neuron_cores": 1}
    own = asked(cpus=1, needs_device=True, memory=GIB, own={"neuron_cores": 2, "fast": 0.5})
    assert own == {"CPU": 1, "memory": GIB, "neuron_cores": 2, "fast": 0.5}
    assert task_options(own) == {
        "num_cpus": 1,
        "memory": GIB,
        "resources": {"neuron_cores": 2, "fast": 0.5},
    }


def test_what_is_short_is_named() -> None:
    nodes = [CPU_NODE, DEVICE_NODE]
    assert shortfall({"CPU": 16, "memory": 100 * GIB}, nodes) is None
    assert shortfall({"CPU": 1, "neuron_cores": 2}, nodes) is None
    assert shortfall({"CPU": 1, "neuron_cores": 4}, nodes) == (
        "it asks for 4 of neuron_cores on one node; of 2 living nodes, the largest has 2"
    )
    assert shortfall({"CPU": 1, "neuron_cores": 1}, [CPU_NODE]) == (
        "it asks for 1 of neuron_cores on one node; of 1 living node, none has any"
    )
    assert shortfall({"memory": 170 * GIB}, nodes) == (
        "it asks for 170.0 GiB of memory on one node; of 2 living nodes, the largest has 100.0 GiB"
    )
    assert shortfall({"CPU": 12, "neuron_cores": 1}, nodes) == (
        "it asks for 12 of CPU and 1 of neuron_cores on one node; of 2 living nodes, none has all of it"
    )
    assert shortfall({"CPU": 1}, []) == "the cluster has no living node"


def test_alone_is_all_of_the_largest_node_that_has_the_rest() -> None:
    nodes = [CPU_NODE, DEVICE_NODE, Node("c", "small", {"CPU": 64.0, "memory": 8.0 * GIB})]
    assert alone_on({"CPU": 2, "memory": 3 * GIB}, nodes) == {"CPU": 16, "memory": 100 * GIB}
    device = {"CPU": 1, "memory": 3 * GIB, "neuron_cores": 1}
    assert alone_on(device, nodes) == {"CPU": 8, "memory": 32 * GIB, "neuron_cores": 1}
    # More than any has: all there is.
    assert alone_on({"CPU": 2, "memory": 300 * GIB}, nodes) == {"CPU": 16, "memory": 100 * GIB}
    # What none can run in any case is for `shortfall` to say.
    for resources in ({"CPU": 1, "neuron_cores": 16}, {"CPU": 128, "memory": GIB}):
        assert alone_on(resources, nodes) == resources
        assert shortfall(alone_on(resources, nodes), nodes)


@pytest.mark.parametrize(
    ("address", "told", "said"),
    [
        ("auto", "127.0.0.1:9", "cannot join the Ray cluster at $RAY_ADDRESS '127.0.0.1:9': "),
        (
            "127.0.0.1:9",
            "10.0.0.1:1",
            "cannot join the Ray cluster at farm.address '127.0.0.1:9': ",
        ),
        ("auto", "ray://head:10001", "$RAY_ADDRESS 'ray://head:10001' is not HOST:PORT or auto"),
        ("local", None, "farm.address 'local' is not HOST:PORT or auto"),
    ],
)
def test_where_there_is_no_cluster_its_address_is_said(
    monkeypatch: pytest.MonkeyPatch, address: str, told: str | None, said: str
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if told is not None:
        monkeypatch.setenv("RAY_ADDRESS", told)
    ray = SimpleNamespace(_private=SimpleNamespace(worker=SimpleNamespace()))
    with pytest.raises(ConfigError) as raised, connected(ray, address):
        pass
    assert said in raised.value.message


AMOUNTS = st.dictionaries(st.sampled_from(["CPU", "memory", "neuron_cores"]), st.integers(0, 3))


@given(AMOUNTS, st.lists(AMOUNTS, min_size=1))
def test_a_unit_is_short_where_no_single_node_holds_it(
    resources: dict[str, float], held: list[dict[str, float]]
) -> None:
    nodes = [Node(str(number), "host", has) for number, has in enumerate(held)]
    fits = any(all(has.get(name, 0) >= n for name, n in resources.items()) for has in held)
    assert (shortfall(resources, nodes) is None) == fits


def test_the_dead_are_not_counted() -> None:
    listed = [
        {
            "NodeID": node.id,
            "NodeManagerHostname": node.host,
            "Alive": alive,
            "Resources": node.resources,
        }
        for node, alive in ((CPU_NODE, True), (DEVICE_NODE, False))
    ]
    assert living_nodes(listed) == [CPU_NODE]


def test_without_ray_the_extra_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra) as raised:
        compile_units(
            farmtools.make_units(folder, 1),
            load_toolchain("hostile"),
            DirectoryStore(folder / "store"),
            FarmConfig(executor="ray"),
            logs=folder / "logs",
            on_event=lambda event: None,
        )
    assert raised.value.hint is not None
    assert "neffbuild[ray]" in raised.value.hint


def test_the_shared_store_is_one_that_is_read_and_written(tmp_path: Path) -> None:
    def tiered(*modes: tuple[bool, bool]) -> TieredStore:
        return TieredStore(
            DirectoryStore(tmp_path / "local"),
            [
                Tier(DirectoryStore(tmp_path / str(number)), readable, writable)
                for number, (readable, writable) in enumerate(modes)
            ],
        )

    assert tiered((True, False), (True, True)).shared().url == str(tmp_path / "1")
    with pytest.raises(ConfigError, match="none is configured with mode rw"):
        tiered((True, False)).shared()
    with pytest.raises(ConfigError, match="require_signature"):
        tiered((False, True)).shared()
