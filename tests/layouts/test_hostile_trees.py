"""Trees that somebody made to be imported: nothing outside them is read, nothing odd is taken over, and the
rest of them is."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path

import foreign_trees as foreign
import pytest
from cli_samples import Project
from foreign_trees import NKI_ROOT, content, key_of
from hypothesis import given
from hypothesis import strategies as st
from layout_samples import adopted, exported

from neffbuild.cache.layouts import tree as trees
from neffbuild.cache.layouts.kernels import below_nki_root, kernel_paths
from neffbuild.cache.layouts.layout import State
from neffbuild.cache.layouts.placed import Outcome
from neffbuild.cache.layouts.tree import Tree, Unsafe
from neffbuild.cache.layouts.vllm_neuron import VllmNeuron

SECRET = b"nobody outside may read this"


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_bytes(SECRET)
    foreign.vllm_entry(tmp_path / "fleet", 0)
    foreign.vllm_entry(tmp_path / "fleet", 1)
    return tmp_path / "fleet"


def swap(path: Path, what: Callable[[Path], object]) -> None:
    path.unlink(missing_ok=True)
    what(path)


def link_to_secret(path: Path) -> None:
    path.symlink_to(path.parents[2] / "secret")


def pipe(path: Path) -> None:
    os.mkfifo(path)


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            server.bind(f"/proc/self/fd/{folder}/{path.name}")  # a socket's path is short
        finally:
            os.close(folder)


@pytest.mark.parametrize("what", [link_to_secret, pipe, listening])
@pytest.mark.parametrize(
    "name",
    ["graph.hlo", ".compilation_complete", ".artifact_metadata_v0.json", "command.txt", "extra"],
)
def test_no_link_pipe_or_socket_is_read(
    fleet: Path, tmp_path: Path, what: Callable[[Path], object], name: str
) -> None:
    swap(fleet / key_of(0) / name, what)
    result = adopted(fleet, tmp_path / "store")
    states = {one.place: one.state for one in result.found}
    assert states == {key_of(0): State.REFUSED, key_of(1): State.COMPLETE}
    assert SECRET not in b"".join(content(tmp_path / "store").values())


@pytest.mark.parametrize("what", [pipe, listening, Path.touch])
def test_nothing_but_a_folder_is_an_entry(
    fleet: Path, tmp_path: Path, what: Callable[[Path], object]
) -> None:
    what(fleet / key_of(2))
    (fleet / "rank0").mkdir()
    what(fleet / "rank0" / key_of(3))
    module = foreign.xla_module(tmp_path / "xla", 0)
    what(module.with_name("MODULE_2+abc"))
    taken = adopted(fleet, tmp_path / "store")
    states = {one.place: one.state for one in taken.found if one.state is not State.COMPLETE}
    assert states == {key_of(2): State.REFUSED, f"rank0/{key_of(3)}": State.REFUSED}
    found = adopted(tmp_path / "xla", tmp_path / "store", "libneuronxla").found
    assert sorted(one.state for one in found) == [State.COMPLETE, State.REFUSED]
    serving = tmp_path / "serving"
    serving.mkdir()
    what(serving / key_of(0))
    outcomes = {
        one.place: one.outcome
        for one in exported(tmp_path / "store", taken.entries, serving).placed
    }
    assert outcomes == {key_of(0): Outcome.REFUSED, key_of(1): Outcome.WRITTEN}


def test_no_folder_is_followed_out_of_the_tree(fleet: Path, tmp_path: Path) -> None:
    elsewhere = foreign.vllm_entry(tmp_path / "elsewhere", 2)
    (fleet / key_of(2)).symlink_to(elsewhere)
    (fleet / key_of(0) / "hlo_passes2").symlink_to(elsewhere)
    foreign.xla_module(tmp_path / "elsewhere", 0)
    [compiler] = [p for p in (tmp_path / "elsewhere").iterdir() if p.name.startswith("neuronxcc")]
    (tmp_path / "xla").mkdir()
    (tmp_path / "xla" / compiler.name).symlink_to(compiler)
    states = {one.place: one.state for one in adopted(fleet, tmp_path / "store").found}
    assert states == {
        key_of(0): State.REFUSED,
        key_of(1): State.COMPLETE,
        key_of(2): State.REFUSED,
    }
    assert adopted(tmp_path / "xla", tmp_path / "store", "libneuronxla").found == ()


@pytest.mark.parametrize(
    "name", ["a\nb", "a\x1b[2J", "x" * 200, b"caf\xe9".decode(errors="surrogateescape"), "a\\b"]
)
def test_names_that_no_engine_gives(fleet: Path, tmp_path: Path, name: str) -> None:
    (fleet / key_of(0) / name).write_bytes(b"x")
    states = {one.place: one.state for one in adopted(fleet, tmp_path / "store").found}
    assert states[key_of(0)] is State.REFUSED
    assert states[key_of(1)] is State.COMPLETE


def test_sizes_depths_and_numbers_are_bounded(
    fleet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def state() -> State:
        [found] = [
            one for one in adopted(fleet, tmp_path / "store").found if one.place == key_of(0)
        ]
        return found.state

    huge = fleet / key_of(0) / "huge"
    with huge.open("wb") as file:
        file.truncate(trees.MOST_FILE_BYTES + 1)  # sparse: it takes no space
    assert state() is State.REFUSED
    huge.unlink()
    deep = fleet / key_of(0) / "/".join("d" * (trees.MOST_DEPTH + 2))
    deep.mkdir(parents=True)
    assert state() is State.REFUSED
    deep.rmdir()
    deep.parent.rmdir()
    for bound in ("MOST_UNIT_FILES", "MOST_UNIT_BYTES"):
        with monkeypatch.context() as small:
            small.setattr(trees, bound, 3)
            assert state() is State.REFUSED
    with monkeypatch.context() as small:
        small.setattr(trees, "MOST_NAMES", 3)
        with pytest.raises(Unsafe):
            Tree(fleet / key_of(0)).names()
    # Metadata that would fill memory is not read to its end.
    (fleet / key_of(0) / ".artifact_metadata_v0.json").write_bytes(b" " * (1 << 24) + b" ")
    assert state() is State.REFUSED


def test_a_file_that_changes_while_it_is_read_is_not_taken(
    fleet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = fleet / key_of(0) / "graph.hlo"
    record = Tree.record

    def change(tree: Tree, file: trees.TreeFile) -> object:
        found = record(tree, file)
        if file.name.endswith(f"{key_of(0)}/graph.hlo"):
            graph.write_bytes(graph.read_bytes()[::-1])
        return found

    monkeypatch.setattr(Tree, "record", change)
    result = adopted(fleet, tmp_path / "store")
    states = {one.place: one for one in result.found}
    assert states[key_of(0)].state is State.INCOMPLETE
    assert "changed while it was read" in (states[key_of(0)].reason or "")
    assert len(result.entries) == 1


def test_an_entry_that_goes_while_it_is_read_costs_itself_alone(
    fleet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine whose cache it is may be at work, and the store was not at fault."""
    record = Tree.record

    def remove(tree: Tree, file: trees.TreeFile) -> object:
        found = record(tree, file)
        if file.name.endswith(f"{key_of(0)}/graph.hlo"):
            (fleet / file.name).unlink()
        return found

    monkeypatch.setattr(Tree, "record", remove)
    found = {one.place: one for one in adopted(fleet, tmp_path / "store").found}
    assert found[key_of(0)].state is State.INCOMPLETE
    assert "graph.hlo cannot be read any more: No such file" in (found[key_of(0)].reason or "")
    assert found[key_of(1)].state is State.COMPLETE


def test_a_file_that_was_exchanged_after_it_was_judged_is_not_taken(
    fleet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same size, and whole by itself."""
    record = Tree.record

    def exchange(tree: Tree, file: trees.TreeFile) -> object:
        if file.name.endswith(f"{key_of(0)}/fxgraph.txt"):
            path = fleet / file.name
            path.write_bytes(path.read_bytes()[::-1])
        return record(tree, file)

    monkeypatch.setattr(Tree, "record", exchange)
    states = {one.place: one.state for one in adopted(fleet, tmp_path / "store").found}
    assert states == {key_of(0): State.INCOMPLETE, key_of(1): State.COMPLETE}


def test_a_folder_swapped_for_a_link_between_looking_and_opening(
    fleet: Path, tmp_path: Path
) -> None:
    tree = Tree(fleet)
    files = tree.below(key_of(0))
    (fleet / key_of(0)).rename(tmp_path / "aside")
    (fleet / key_of(0)).symlink_to(tmp_path / "aside")
    with pytest.raises((Unsafe, OSError)):
        tree.record(files[f"{key_of(0)}/graph.hlo"])


def test_a_graph_that_names_files_of_the_machine_gets_none_of_them(tmp_path: Path) -> None:
    nki = tmp_path / "nki"
    foreign.write(nki, {"good.klir": b"good"})
    (nki / "link.klir").symlink_to(tmp_path / "secret")
    (tmp_path / "secret").write_bytes(SECRET)
    named = (
        str(tmp_path / "secret"),
        f"{NKI_ROOT}/../../../{tmp_path}/secret",
        f"{NKI_ROOT}/link.klir",
        f"{NKI_ROOT}/gone.klir",
        f"{NKI_ROOT}/good.klir",
        "relative.klir",
    )
    foreign.vllm_entry(tmp_path / "fleet", 0, kernels=named)
    result = adopted(tmp_path / "fleet", tmp_path / "store", nki=nki)
    [found] = result.found
    assert found.state is State.COMPLETE
    assert len([note for note in found.notes if "not shipped" in note]) == 4
    [entry] = result.entries.values()
    kernels = [name for name in entry.files if "nki-intermediate-cache" in name]
    assert kernels == ["engine/nki-intermediate-cache/good.klir"]
    assert SECRET not in b"".join(content(tmp_path / "store").values())


def test_a_graph_that_would_fill_memory_is_not_searched(fleet: Path, tmp_path: Path) -> None:
    graph = fleet / key_of(0) / "graph.hlo"
    os.truncate(graph, (1 << 28) + 1)  # sparse
    found = VllmNeuron(tmp_path / "nki").contents(Tree(fleet), key_of(0))
    assert found.state is State.COMPLETE
    assert any("too large to be searched" in note for note in found.notes)


def test_what_cannot_be_read_is_named(
    fleet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders, opened = [(fleet / key_of(0)).stat().st_ino], os.open

    def refuse(path: object, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if path == "command.txt" and dir_fd is not None and os.fstat(dir_fd).st_ino in folders:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return opened(path, flags, mode, dir_fd=dir_fd)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refuse)
    found = {one.place: one for one in adopted(fleet, tmp_path / "store").found}
    assert found[key_of(0)].reason == "cannot be read: Permission denied (command.txt)"
    assert found[key_of(1)].state is State.COMPLETE


def close(monkeypatch: pytest.MonkeyPatch, *closed: Path) -> None:
    """No folder of these can be opened any more, by whomever."""
    inodes, opened = {one.stat().st_ino for one in closed}, os.open

    def refuse(path: object, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        descriptor = opened(path, flags, mode, dir_fd=dir_fd)  # type: ignore[arg-type]
        if os.fstat(descriptor).st_ino in inodes:
            os.close(descriptor)
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return descriptor

    monkeypatch.setattr(os, "open", refuse)


def places(root: Path, layout: str) -> None:
    if layout == "vllm-neuron":
        for above in ("rank0", "rank1"):
            foreign.vllm_entry(root / above, int(above[-1]))
        foreign.write(root, {"nki/a.json": b"{}"})
    elif layout == "torch-neuronx":
        for number in range(2):
            foreign.torch_entry(root, number)
    else:
        for version in ("2.27.1.0", "2.28.1.0"):
            foreign.xla_module(root, 0, version=version)


@pytest.mark.parametrize(
    ("layout", "closed"),
    [
        ("vllm-neuron", "rank0"),
        ("vllm-neuron", "nki"),
        ("torch-neuronx", key_of(0)[:2]),
        ("torch-neuronx", f"{key_of(0)[:2]}/{key_of(0)[2:4]}"),
        ("libneuronxla", "neuronxcc-2.27.1.0"),
    ],
)
def test_a_folder_of_places_that_cannot_be_listed_costs_itself_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, closed: str
) -> None:
    places(tmp_path / "tree", layout)
    (tmp_path / "tree" / "unknown").touch()
    everything = adopted(tmp_path / "tree", tmp_path / "before", layout)
    below = [one.place for one in everything.found if one.place.startswith(f"{closed}/")]
    close(monkeypatch, tmp_path / "tree" / closed)
    result = adopted(tmp_path / "tree", tmp_path / "store", layout)
    found = {one.place: one for one in result.found}
    assert found.pop(closed).document() == {
        "place": closed,
        "state": "refused",
        "reason": "cannot be listed: Permission denied",
        "generation": None,
        "notes": [],
    }
    assert len(found) == len(everything.found) - len(below) == len(result.entries) > 0
    assert below
    assert all(one.state is State.COMPLETE for one in found.values())
    assert any("'unknown'" in stray for stray in result.strays)


def test_a_rank_folder_that_cannot_be_listed_ends_with_status_4_and_the_rest_is_taken(
    project: Project, fleet: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign.vllm_entry(fleet / "rank0", 2)
    close(monkeypatch, fleet / "rank0")
    ran = project.call("import", str(fleet), "--layout", "vllm-neuron", "--json")
    assert ran.status == 4
    assert ran.document["entries"] == {"whole": 2, "imported": 2}
    [problem] = ran.document["problems"]
    assert (problem["key"], problem["detail"]) == ("rank0", "cannot be listed: Permission denied")


def test_a_root_that_cannot_be_listed_is_an_error(
    project: Project, fleet: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close(monkeypatch, fleet)
    ran = project.call("import", str(fleet), "--layout", "vllm-neuron")
    assert ran.status == 3
    assert "Permission denied" in ran.err


def test_a_kernel_that_no_entry_can_hold_is_a_remark(tmp_path: Path) -> None:
    deep = "/".join(["k" * 60] * 4)
    foreign.write(tmp_path / "nki", {deep: b"kernel"})
    foreign.vllm_entry(tmp_path / "fleet", 0, kernels=(f"{NKI_ROOT}/{deep}",))
    [found] = adopted(tmp_path / "fleet", tmp_path / "store", nki=tmp_path / "nki").found
    assert found.state is State.COMPLETE
    assert any("longer than entries hold: not shipped" in note for note in found.notes)


def test_a_hostile_tree_ends_with_status_4_and_the_rest_is_taken(
    project: Project, fleet: Path
) -> None:
    swap(fleet / key_of(0) / "graph.hlo", link_to_secret)
    ran = project.call("import", str(fleet), "--layout", "vllm-neuron", "--json")
    assert ran.status == 4
    document = ran.document
    assert not document["ok"]
    assert document["entries"] == {"whole": 1, "imported": 1}
    [problem] = document["problems"]
    assert (problem["kind"], problem["key"]) == ("bad_entry", key_of(0))


def test_a_tree_without_signatures_is_refused_where_they_are_required(
    project: Project, fleet: Path
) -> None:
    ran = project.call("import", str(fleet), "--layout", "vllm-neuron", "--require-signature")
    assert ran.status == 4
    assert "is signed" in ran.err
    assert not list(project.cache.glob("v1/entries/*/*"))


@given(
    paths=st.lists(
        st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1).map(
            lambda t: f"/{t}"
        ),
        max_size=4,
    ),
    before=st.binary(max_size=40),
)
def test_kernels_are_found_wherever_they_stand_in_a_graph(paths: list[str], before: bytes) -> None:
    found = kernel_paths(before + b"\x00" + foreign.hlo(0, *paths))
    assert set(paths) <= found


@given(st.binary(max_size=400) | st.text("eyJhbGc0=/+AZaz09", max_size=400).map(str.encode))
def test_no_graph_breaks_the_search(data: bytes) -> None:
    assert all(path.startswith("/") for path in kernel_paths(data))


@pytest.mark.parametrize(
    ("path", "below"),
    [
        (f"{NKI_ROOT}/a/b.klir", "a/b.klir"),
        (f"{NKI_ROOT}/", None),
        (NKI_ROOT, None),
        (f"{NKI_ROOT}/../x", None),
        (f"{NKI_ROOT}x/y", None),
        ("/etc/shadow", None),
        (f"{NKI_ROOT}/a\0b", None),
    ],
)
def test_only_paths_below_the_one_folder_are_believed(path: str, below: str | None) -> None:
    assert below_nki_root(path) == below
