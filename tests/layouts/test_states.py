"""What an engine would make of each place, with the reason in words, and that only hits are taken over."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import foreign_trees as foreign
import pytest
from cli_samples import Project
from foreign_trees import key_of, neff
from layout_samples import adopted, only

from neffbuild.cache.layouts.known import layout_named
from neffbuild.cache.layouts.layout import State
from neffbuild.cache.layouts.torch_neuronx import TorchNeuronx
from neffbuild.cache.layouts.tree import Tree

WHOLE = neff(0)
HOLD = """
import fcntl, sys, time
file = open(sys.argv[1], "a")
fcntl.flock(file, fcntl.LOCK_EX)
print(flush=True)
time.sleep(60)
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return tmp_path / "fleet"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def held() -> Iterator[Callable[[Path], int]]:
    """Have another process lock a file, as filelock does; its process id."""
    holders: list[subprocess.Popen[bytes]] = []

    def hold(path: Path) -> int:
        holder = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE)
        assert holder.stdout is not None
        holder.stdout.readline()
        holders.append(holder)
        return holder.pid

    yield hold
    for holder in holders:
        holder.kill()
        holder.communicate()


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"graph": None}, "there is no graph.hlo"),
        ({"graph": b""}, "graph.hlo is empty"),
        ({"neff": None}, f"there is no graph_{key_of(0)}.neff"),
        ({"neff": WHOLE[:-1]}, "states neff_size"),
        ({"sentinel": None}, "there is no .compilation_complete"),
        ({"sentinel": b"completed:1\n"}, "states neff_size None"),
        ({"sentinel": b"completed:1\nneff_size:17\n"}, "states neff_size 17"),
        ({"metadata": None}, "there is no .artifact_metadata_v*.json"),
        ({"metadata": b"{"}, "is no JSON"),
        ({"metadata": b"[" * 100_000}, "is no JSON"),
        ({"metadata": json.dumps({"cache_key": key_of(9)}).encode()}, "not that of its folder"),
        ({"metadata": b"[]"}, "not that of its folder"),
    ],
)
def test_incomplete_entries_of_vllm_neuron(
    tree: Path, store: Path, changed: dict[str, bytes | None], reason: str
) -> None:
    foreign.vllm_entry(tree, 0, **changed)
    found = only(tree, store)
    assert found.state is State.INCOMPLETE
    assert reason in (found.reason or "")
    assert not list(store.glob("v1/entries/*/*"))


def test_a_neff_that_is_cut_is_no_hit_even_where_the_engine_would_take_it(
    tree: Path, store: Path
) -> None:
    cut = WHOLE[:-100]
    sentinel = b"completed:1\nneff_size:%d\n" % len(cut)
    foreign.vllm_entry(tree, 0, neff=cut, sentinel=sentinel)
    assert foreign.vllm_hit(tree, key_of(0))
    found = only(tree, store)
    assert found.state is State.INCOMPLETE
    assert "header announces" in (found.reason or "")
    text = b"#!/bin/sh\n" * 200
    foreign.vllm_entry(tree, 0, neff=text, sentinel=b"completed:1\nneff_size:%d\n" % len(text))
    assert "is no NEFF" in (only(tree, store).reason or "")


def test_an_entry_without_a_folder_is_named_while_somebody_is_at_work_on_it(
    tree: Path, store: Path, held: Callable[[Path], int]
) -> None:
    tree.mkdir()
    lock = foreign.vllm_metadata(tree, 0, pid=1, name="x", command="y").with_suffix(
        ".compilation_metadata.lock"
    )
    pid = held(lock)
    found = only(tree, store)
    assert (found.place, found.state) == (key_of(0), State.LOCKED)
    assert ".lock" in (found.reason or "")
    assert pid != os.getpid()


@pytest.mark.parametrize("layout", ["vllm-neuron", "torch-neuronx", "libneuronxla"])
def test_what_a_live_process_has_locked_is_left(
    tree: Path,
    store: Path,
    held: Callable[[Path], int],
    layout: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    locks = tree.parent / "local_cache"
    monkeypatch.setenv("TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR", str(locks))
    if layout == "vllm-neuron":
        foreign.vllm_entry(tree, 0)
        path = tree / f".{key_of(0)}.compilation_metadata.lock"
    elif layout == "torch-neuronx":
        foreign.torch_entry(tree, 0)
        path = locks / "locks" / f"{key_of(0)}.lock"
        path.parent.mkdir(parents=True)
    else:
        path = foreign.xla_module(tree, 0) / "model.hlo_module.pb.lock"
    pid = held(path)
    found = only(tree, store, layout)
    assert found.state is State.LOCKED
    assert str(pid) in (found.reason or "")
    assert not list(store.glob("v1/entries/*/*"))


def test_who_is_at_work_is_known_from_the_metadata_alone(tree: Path, store: Path) -> None:
    """The holder of a lock on a shared file system may be seen by that only."""
    foreign.vllm_entry(tree, 0, sentinel=None)
    with subprocess.Popen(["sleep", "60"]) as process:
        # As the engine writes it: same number, same name, same command line.
        while Path(f"/proc/{process.pid}/comm").read_text().strip() != "sleep":
            time.sleep(0.01)
        for command in ("sleep 60", "['sleep', '60']"):
            foreign.vllm_metadata(tree, 0, pid=process.pid, name="sleep", command=command)
            assert only(tree, store).state is State.LOCKED
        others = []  # somebody else has its number now
        for name, command in (("sleep", "sleep 61"), ("python3", "sleep 60")):
            foreign.vllm_metadata(tree, 0, pid=process.pid, name=name, command=command)
            others.append(only(tree, store))
        process.kill()
    for other in others:
        assert other.state is State.INCOMPLETE
        assert any("stale lock" in note for note in other.notes)
    foreign.vllm_metadata(tree, 0, pid=process.pid, name="sleep", command="sleep 60")
    found = only(tree, store)
    assert found.state is State.INCOMPLETE
    assert any("stale lock" in note and str(process.pid) in note for note in found.notes)


@pytest.mark.parametrize("pid", ["²", "9" * 5000, "9" * 40, "-1", "0", "1e3"])
def test_a_number_that_no_process_has_is_of_a_stale_lock(tree: Path, store: Path, pid: str) -> None:
    foreign.vllm_entry(tree, 0)
    path = foreign.vllm_metadata(tree, 0, pid=0, name="python3", command="python3")
    path.write_text(f"pid:{pid}\nprocess_name:python3\ncmdline:python3\n")
    found = only(tree, store)
    assert found.state is State.COMPLETE
    assert any("stale lock" in note for note in found.notes)


def test_stale_locks_are_named_and_not_waited_for(tree: Path, store: Path) -> None:
    foreign.vllm_entry(tree, 0)
    with subprocess.Popen(["true"]) as process:
        pass
    foreign.vllm_metadata(tree, 0, pid=process.pid, name="true", command="true")
    module = foreign.xla_module(tree / "xla", 0, lock=b"")
    half = foreign.xla_module(tree / "xla", 1, lock=b"", done=None)
    began = time.monotonic()
    found = only(tree, store)
    [whole, incomplete] = adopted(tree / "xla", store, "libneuronxla").found
    assert time.monotonic() - began < 5
    assert found.state is State.COMPLETE
    assert whole.state is State.COMPLETE
    assert incomplete.state is State.INCOMPLETE
    for one in (found, whole, incomplete):
        assert any("stale lock" in note for note in one.notes)
    # Nothing in the tree was touched, and nobody's lock was taken.
    assert (module / "model.hlo_module.pb.lock").exists()
    assert (half / "model.hlo_module.pb.lock").exists()
    with (module / "model.hlo_module.pb.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize(
    ("changed", "state", "reason"),
    [
        ({"done": None}, State.INCOMPLETE, "there is no model.done"),
        ({"neff": None}, State.INCOMPLETE, "there is no model.neff"),
        ({"neff": b"", "done": b""}, State.INCOMPLETE, "model.neff is empty"),
        ({"neff": WHOLE[:-5]}, State.INCOMPLETE, "header announces"),
        ({"neff": None, "done": None}, State.INCOMPLETE, "there is no model.neff"),
        ({"neff": None, "done": None, "log": b"E"}, State.FAILED, "its compile failed"),
        ({"neff": None, "log": b"E"}, State.FAILED, "would not try again"),
    ],
)
def test_states_of_libneuronxla(
    tree: Path, store: Path, changed: dict[str, bytes | None], state: State, reason: str
) -> None:
    folder = foreign.xla_module(tree, 0, **changed)
    found = only(tree, store, "libneuronxla")
    assert found.state is state
    assert reason in (found.reason or "")
    assert not list(store.glob("v1/entries/*/*"))
    if state is State.FAILED:
        assert foreign.xla_state(folder) == "failed"


def test_an_older_name_of_the_graph_counts_and_a_log_beside_a_neff_stays(
    tree: Path, store: Path
) -> None:
    folder = foreign.xla_module(tree, 0, graph=None, log=b"a warning")
    (folder / "model.hlo.pb").write_bytes(b"graph")
    found = only(tree, store, "libneuronxla")
    assert found.state is State.COMPLETE
    assert found.graph is not None
    assert found.graph.endswith("model.hlo.pb")
    assert not any(name.endswith("model.log") for name in found.files)


@pytest.mark.parametrize(
    ("name", "state", "reason"),
    [
        ("ab/cd/ab12.neff", State.REFUSED, "is not named"),
        (f"00/11/{key_of(0)}.neff", State.REFUSED, "is not named"),
        (f"{key_of(0)[:2]}/{key_of(0)[2:4]}/{key_of(0)}.neff", State.INCOMPLETE, "is empty"),
    ],
)
def test_states_of_torch_neuronx(
    tree: Path, store: Path, name: str, state: State, reason: str
) -> None:
    foreign.write(tree, {name: b""})
    found = only(tree, store, "torch-neuronx")
    assert found.state is state
    assert reason in (found.reason or "")


def test_torch_neuronx_entries_of_two_compilers_are_two_entries(tree: Path, store: Path) -> None:
    """Its keys do not cover the compiler's version; ours do, by what the NEFF says."""
    keys = []
    for build in ("2.27.5334.0", "2.28.7631.0", ""):
        path = foreign.torch_entry(tree, 0, build=build)
        result = adopted(tree, store, "torch-neuronx")
        keys += list(result.entries)
        path.unlink()
    assert len(set(keys)) == 3
    assert any("states no compiler version" in note for note in result.found[0].notes)


def test_captured_graphs_of_ranks_are_no_entries(tree: Path, store: Path) -> None:
    foreign.vllm_entry(tree, 0)
    foreign.write(tree, {"rank0/graph.hlo": b"g", "dp1.rank3/fxgraph.txt": b"f"})
    result = adopted(tree, store)
    assert [one.place for one in result.found] == [key_of(0)]
    assert sum("captured and not compiled" in stray for stray in result.strays) == 2
    # What lies below a rank and is finished is an entry of that rank.
    foreign.vllm_entry(tree / "dp1.rank3", 4)
    assert {one.place for one in adopted(tree, store).found} == {
        key_of(0),
        f"dp1.rank3/{key_of(4)}",
    }


def test_a_kernels_result_has_no_sentinel_so_it_has_to_be_whole_json(
    tree: Path, store: Path
) -> None:
    foreign.write(tree, {"nki/aa.json": b'{"binary": "/x"', "nki/bb.json": b'{"binary": "/x"}'})
    states = {one.place: one.state for one in adopted(tree, store).found}
    assert states == {"nki/aa.json": State.INCOMPLETE, "nki/bb.json": State.COMPLETE}


def test_a_locks_folder_may_be_named(tmp_path: Path, held: Callable[[Path], int]) -> None:
    foreign.torch_entry(tmp_path / "fleet", 0)
    (tmp_path / "locks").mkdir()
    pid = held(tmp_path / "locks" / f"{key_of(0)}.lock")
    layout = TorchNeuronx(tmp_path / "locks")
    tree = Tree(tmp_path / "fleet")
    [place] = layout.places(tree)
    assert str(pid) in (layout.examine(tree, place).reason or "")
    assert layout_named("torch-neuronx").examine(tree, place).state is State.COMPLETE


def test_a_neff_whose_payload_is_damaged_is_left_though_its_engine_would_load_it(
    project: Project, tree: Path
) -> None:
    damaged = WHOLE[:-40] + bytes(40)
    foreign.vllm_entry(tree, 0, neff=damaged)
    foreign.vllm_entry(tree, 1)
    assert foreign.vllm_hit(tree, key_of(0))
    ran = project.call("import", str(tree), "--layout", "vllm-neuron", "--json")
    assert ran.status == 0, ran
    places = {one["place"]: one for one in ran.document["layout"]["places"]}
    assert places[key_of(0)]["state"] == "incomplete"
    assert f"graph_{key_of(0)}.neff: " in places[key_of(0)]["reason"]
    assert places[key_of(1)]["state"] == "complete"
    assert len(list(project.cache.glob("v1/entries/*/*"))) == 1
