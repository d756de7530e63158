"""Writing into an engine's cache: whole or not at all, never over what is at work, whoever is killed."""

from __future__ import annotations

import fcntl
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import foreign_trees as foreign
import pytest
from foreign_trees import content, key_of, neff
from layout_samples import adopted, exported

from neffbuild.cache import filesystem
from neffbuild.cache.adopted import layout_recipe
from neffbuild.cache.catalog import commit_entry, record_files
from neffbuild.cache.directory import DirectoryStore
from neffbuild.cache.entry import Entry
from neffbuild.cache.layouts.adopting import Adopted
from neffbuild.cache.layouts.handing_out import hand_out
from neffbuild.cache.layouts.known import layout_named
from neffbuild.cache.layouts.placed import Outcome
from neffbuild.cache.layouts.vllm_neuron import VllmNeuron
from neffbuild.config.errors import IntegrityError, StoreError


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    foreign.vllm_entry(tmp_path / "fleet", 0)
    foreign.vllm_entry(tmp_path / "fleet", 1)
    return tmp_path / "fleet"


@pytest.fixture
def taken(fleet: Path, store: Path) -> Adopted:
    return adopted(fleet, store)


def whole(fleet: Path) -> dict[str, bytes]:
    return {name: data for name, data in content(fleet).items() if ".cache_accessed" not in name}


def outcomes(root: Path, store: Path, taken: Adopted, layout: str = "vllm-neuron") -> list[Outcome]:
    return [one.outcome for one in exported(store, taken.entries, root, layout).placed]


@pytest.mark.parametrize(
    "broken",
    [
        {"sentinel": None},
        {"neff": None},
        {"metadata": b"{}"},
        {"neff": neff(0)[:-7]},
        {"graph": None, "neff": None, "metadata": None, "sentinel": None},
    ],
)
def test_what_is_incomplete_is_replaced_as_a_whole(
    tmp_path: Path, fleet: Path, store: Path, taken: Adopted, broken: Mapping[str, bytes | None]
) -> None:
    serving = tmp_path / "serving"
    folder = foreign.vllm_entry(serving, 0, **broken)
    (folder / "of-another-compile").write_bytes(b"x")
    (serving / f".{key_of(0)}.compilation_metadata.lock").touch()
    assert outcomes(serving, store, taken) == [Outcome.WRITTEN, Outcome.WRITTEN]
    (serving / f".{key_of(0)}.compilation_metadata.lock").unlink()
    assert content(serving) == whole(fleet)


def test_a_failure_is_replaced_by_a_hit(tmp_path: Path, store: Path) -> None:
    """The engine would remember the failure and never look further."""
    folder = foreign.xla_module(tmp_path / "fleet", 0)
    there = foreign.xla_module(tmp_path / "serving", 0, neff=None, done=None, log=b"E", lock=b"")
    assert foreign.xla_state(there) == "failed"
    taken = adopted(tmp_path / "fleet", store, "libneuronxla")
    assert outcomes(tmp_path / "serving", store, taken, "libneuronxla") == [Outcome.WRITTEN]
    assert foreign.xla_state(there) == "success"
    assert content(there) == content(folder)


def test_what_is_there_is_not_touched(
    tmp_path: Path, fleet: Path, store: Path, taken: Adopted
) -> None:
    serving = tmp_path / "serving"
    folder = foreign.vllm_entry(serving, 0)
    (folder / "fxgraph.txt").write_bytes(b"printed by another release")
    before = content(serving)
    assert outcomes(serving, store, taken) == [Outcome.PRESENT, Outcome.WRITTEN]
    assert before.items() <= content(serving).items()


def test_an_entry_that_a_live_process_compiles_is_left_to_it(
    tmp_path: Path, fleet: Path, store: Path, taken: Adopted
) -> None:
    serving = tmp_path / "serving"
    foreign.vllm_entry(serving, 0, sentinel=None)
    before = content(serving / key_of(0))
    with (serving / f".{key_of(0)}.compilation_metadata.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        result = exported(store, taken.entries, serving)
        found = {one.place: one for one in result.placed}
        assert found[key_of(0)].outcome is Outcome.LOCKED
        assert str(os.getpid()) in (found[key_of(0)].reason or "")
        assert found[key_of(1)].outcome is Outcome.WRITTEN
        assert not result.hits
        assert content(serving / key_of(0)) == before
    assert exported(store, taken.entries, serving).hits
    assert foreign.vllm_hit(serving, key_of(0))


def test_while_an_entry_is_replaced_an_engine_that_comes_is_told_to_wait(
    tmp_path: Path, store: Path, taken: Adopted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It finds the lock taken and, in the metadata, a process that lives under the name it states."""
    serving = tmp_path / "serving"
    foreign.vllm_entry(serving, 0, sentinel=None)
    seen = []
    rename = filesystem.rename

    def look(source: Path, target: Path) -> None:
        if target == serving / key_of(0):
            metadata = serving / f".{key_of(0)}.compilation_metadata"
            lines = dict(line.split(":", 1) for line in metadata.read_text().splitlines())
            with metadata.with_name(f"{metadata.name}.lock").open() as lock, pytest.raises(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            seen.append(lines)
        rename(source, target)

    monkeypatch.setattr(filesystem, "rename", look)
    exported(store, taken.entries, serving)
    [lines] = seen
    assert int(lines["pid"]) == os.getpid()
    assert lines["process_name"] == Path("/proc/self/comm").read_text().strip()
    assert lines.keys() == {"pid", "process_name", "cmdline", "rank", "timestamp"}
    assert not list(serving.glob(".*.compilation_metadata"))


def test_what_an_engine_finished_in_the_meantime_stays(
    tmp_path: Path, store: Path, taken: Adopted, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = tmp_path / "serving"
    foreign.vllm_entry(serving, 0, sentinel=None)
    guarded = VllmNeuron.guarded

    def finish_first(self: VllmNeuron, root: Path, place: str) -> AbstractContextManager[None]:
        folder = foreign.vllm_entry(serving, 0)
        (folder / "fxgraph.txt").write_bytes(b"the engine's own")
        return guarded(self, root, place)

    monkeypatch.setattr(VllmNeuron, "guarded", finish_first)
    assert outcomes(serving, store, taken) == [Outcome.PRESENT, Outcome.WRITTEN]
    assert (serving / key_of(0) / "fxgraph.txt").read_bytes() == b"the engine's own"
    assert not list(serving.glob(".neffbuild-*"))


def test_what_would_be_no_hit_is_not_written(tmp_path: Path, store: Path) -> None:
    """An entry whose metadata is of another key, and one without a graph."""
    local = DirectoryStore(store)
    entries = {}
    for number, broken in enumerate([{"metadata": b"{}"}, {"graph": None}]):
        folder = foreign.vllm_entry(tmp_path / f"{number}", number, **broken)  # type: ignore[arg-type]
        paths = {
            f"engine/vllm-neuron/{key_of(number)}/{name}": folder / name for name in content(folder)
        }
        recipe = layout_recipe("vllm-neuron", "xla-2.32", key_of(number), {})
        entry = Entry(recipe, record_files(paths), "0" * 64, "0" * 64)
        entries[entry.key] = commit_entry(local, entry, paths)
    serving = tmp_path / "serving"
    result = exported(store, entries, serving)
    assert {one.outcome for one in result.placed} == {Outcome.REFUSED}
    assert all("would be no hit" in (one.reason or "") for one in result.placed)
    assert not content(serving)


def test_a_unit_that_was_compiled_here_gets_its_sentinel(tmp_path: Path, store: Path) -> None:
    """What a toolchain leaves has none yet: it is written with the NEFF's size, and beside other files."""
    folder = foreign.vllm_entry(tmp_path / "made", 3, sentinel=None)
    names = ("graph.hlo", f"graph_{key_of(3)}.neff", ".artifact_metadata_v0.json")
    paths = {f"engine/vllm-neuron/{key_of(3)}/{name}": folder / name for name in names}
    paths["program.neff"] = folder / f"graph_{key_of(3)}.neff"
    paths["engine/vllm/modelinfos/x.json"] = folder / "fxgraph.txt"
    entry = Entry({"kind": "unit"}, record_files(paths), "0" * 64, "0" * 64)
    commit_entry(DirectoryStore(store), entry, paths)
    serving = tmp_path / "serving"
    assert exported(store, {entry.key: entry}, serving).hits
    assert foreign.vllm_hit(serving, key_of(3))
    lines = foreign.sentinel_lines(serving, key_of(3))
    assert lines["neff_size"] == str(len(neff(3)))
    assert int(lines["completed"]) > 1_700_000_000
    assert set(content(serving / key_of(3))) == {*names, ".compilation_complete"}


def test_what_is_stored_with_a_folder_in_the_sentinels_place_costs_its_entry_alone(
    tmp_path: Path, store: Path, taken: Adopted
) -> None:
    folder = foreign.vllm_entry(tmp_path / "made", 3, sentinel=None)
    names = ("graph.hlo", f"graph_{key_of(3)}.neff", ".artifact_metadata_v0.json")
    paths = {f"engine/vllm-neuron/{key_of(3)}/{name}": folder / name for name in names}
    odd = f"engine/vllm-neuron/{key_of(3)}/.compilation_complete/extra"
    paths[odd] = folder / "fxgraph.txt"
    entry = Entry({"kind": "unit"}, record_files(paths), "0" * 64, "0" * 64)
    commit_entry(DirectoryStore(store), entry, paths)
    serving = tmp_path / "serving"
    placed = exported(store, {**taken.entries, entry.key: entry}, serving).placed
    found = {one.place: one for one in placed}
    assert found.pop(key_of(3)).reason == (
        f"what is stored of it would be no hit: {key_of(3)}/.compilation_complete is a folder in it"
    )
    assert {one.outcome for one in found.values()} == {Outcome.WRITTEN}
    assert {one.name for one in serving.iterdir()} == {key_of(0), key_of(1)}


@pytest.mark.parametrize("name", [".compilation_complete", "graph.hlo"])
def test_a_folder_where_a_file_of_an_entry_belongs_is_replaced_with_the_entry(
    tmp_path: Path, store: Path, taken: Adopted, fleet: Path, name: str
) -> None:
    serving = tmp_path / "serving"
    path = foreign.vllm_entry(serving, 0) / name
    path.unlink()
    foreign.write(path, {"extra": b"x"})
    assert outcomes(serving, store, taken) == [Outcome.WRITTEN] * 2
    assert content(serving / key_of(0)) == whole(fleet / key_of(0))


def test_a_damaged_blob_is_an_error_and_nothing_appears(
    tmp_path: Path, store: Path, taken: Adopted
) -> None:
    entry = next(one for one in taken.entries.values() if one.recipe["key"] == key_of(0))
    name = f"engine/vllm-neuron/{key_of(0)}/graph_{key_of(0)}.neff"
    path = DirectoryStore(store).blob_path(entry.files[name].digest)
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    serving = tmp_path / "serving"
    with pytest.raises(IntegrityError):
        exported(store, {entry.key: entry}, serving)
    assert not content(serving)
    assert not list(serving.iterdir())


def test_a_name_that_does_not_tell_two_programs_apart(tmp_path: Path, store: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    foreign.torch_entry(old, 0, build="2.27.5334.0")
    foreign.torch_entry(new, 0, build="2.28.7631.0")
    both = [adopted(tree, store, "torch-neuronx") for tree in (old, new)]
    serving = tmp_path / "serving"
    entries = {**both[0].entries, **both[1].entries}
    [one] = exported(store, entries, serving, "torch-neuronx").placed
    assert one.outcome is Outcome.REFUSED
    assert not content(serving)
    assert outcomes(serving, store, both[0], "torch-neuronx") == [Outcome.WRITTEN]
    [later] = exported(store, both[1].entries, serving, "torch-neuronx").placed
    assert later.outcome is Outcome.REFUSED
    assert "folder of its own" in (later.reason or "")
    assert content(serving) == content(old)


@pytest.mark.parametrize("ending", ["", ".lock"])
@pytest.mark.parametrize("what", [Path.mkdir, lambda path: path.symlink_to("/nowhere")])
def test_a_lock_that_is_none_costs_its_entry_alone(
    tmp_path: Path, store: Path, taken: Adopted, ending: str, what: Callable[[Path], object]
) -> None:
    serving = tmp_path / "serving"
    before = content(foreign.vllm_entry(serving, 0, sentinel=None))
    what(serving / f".{key_of(0)}.compilation_metadata{ending}")
    found = {one.place: one for one in exported(store, taken.entries, serving).placed}
    assert found[key_of(0)].outcome is Outcome.REFUSED
    assert "where a lock belongs" in (found[key_of(0)].reason or "")
    assert found[key_of(1)].outcome is Outcome.WRITTEN
    assert content(serving / key_of(0)) == before


def test_a_folder_whose_name_only_looks_like_ours_stays(
    tmp_path: Path, store: Path, taken: Adopted
) -> None:
    host = re.sub(r"[^A-Za-z0-9.]", "_", socket.gethostname())
    names = [f".neffbuild-{host}-{pid}-0123abcd" for pid in ("9" * 30, "²")]
    for name in names:
        (tmp_path / "serving" / name).mkdir(parents=True)
    assert exported(store, taken.entries, tmp_path / "serving").hits
    assert all((tmp_path / "serving" / name).is_dir() for name in names)


def test_links_in_the_engines_cache_are_not_written_through(
    tmp_path: Path, store: Path, taken: Adopted
) -> None:
    serving, elsewhere = tmp_path / "serving", tmp_path / "elsewhere"
    elsewhere.mkdir()
    serving.mkdir()
    (serving / key_of(0)).symlink_to(elsewhere)
    found = {one.place: one.outcome for one in exported(store, taken.entries, serving).placed}
    assert found == {key_of(0): Outcome.REFUSED, key_of(1): Outcome.WRITTEN}
    assert not content(elsewhere)
    foreign.torch_entry(tmp_path / "t", 0)
    (tmp_path / "ts").mkdir()
    (tmp_path / "ts" / key_of(0)[:2]).symlink_to(elsewhere)
    torch = adopted(tmp_path / "t", store, "torch-neuronx")
    assert outcomes(tmp_path / "ts", store, torch, "torch-neuronx") == [Outcome.REFUSED]
    (tmp_path / "ts" / key_of(0)[:2]).unlink()
    os.mkfifo(tmp_path / "ts" / key_of(0)[:2])
    assert outcomes(tmp_path / "ts", store, torch, "torch-neuronx") == [Outcome.REFUSED]
    assert not content(elsewhere)


def test_kernel_binaries_are_not_put_where_somebody_else_may_lie_in_wait(
    tmp_path: Path, store: Path
) -> None:
    nki = tmp_path / "nki"
    foreign.write(nki, {"a/k.klir": b"kernel"})
    foreign.vllm_entry(tmp_path / "fleet", 0, kernels=(f"{foreign.NKI_ROOT}/a/k.klir",))
    taken = adopted(tmp_path / "fleet", store, nki=nki)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "planted").symlink_to(tmp_path / "elsewhere")
    handed = hand_out(
        layout_named("vllm-neuron"), DirectoryStore(store), taken.entries, tmp_path / "serving",
        nki_root=tmp_path / "planted",
    )  # fmt: skip
    assert any("is no folder" in text for text in handed.warnings)
    assert not content(tmp_path / "elsewhere")
    # The NEFF is a hit without it.
    assert handed.hits
    assert foreign.vllm_hit(tmp_path / "serving", key_of(0))
    # A binary that is there already, of the same name and other content, stays and is named.
    other = foreign.write(tmp_path / "other", {"a/k.klir": b"of another release"})
    handed = hand_out(
        layout_named("vllm-neuron"), DirectoryStore(store), taken.entries, tmp_path / "serving",
        nki_root=other,
    )  # fmt: skip
    assert any("another file of this name" in text for text in handed.warnings)
    assert content(other) == {"a/k.klir": b"of another release"}


def test_kernels_that_are_found_later_are_handed_out_too(tmp_path: Path, store: Path) -> None:
    """Taken over without `--nki-cache` at first, as the remark was read after that."""
    foreign.write(tmp_path / "nki", {"a/k": b"kernel", "b/k": b"another"})
    paths = tuple(f"{foreign.NKI_ROOT}/{name}" for name in ("a/k", "b/k"))
    foreign.vllm_entry(tmp_path / "fleet", 0, kernels=paths)
    first = adopted(tmp_path / "fleet", store)
    again = adopted(tmp_path / "fleet", store, nki=tmp_path / "nki")
    third = adopted(tmp_path / "fleet", store, nki=tmp_path / "nki")
    assert [len(one.imported) for one in (first, again, third)] == [1, 2, 0]
    assert third.entries == again.entries
    handed = hand_out(
        layout_named("vllm-neuron"), DirectoryStore(store), third.entries, tmp_path / "serving",
        nki_root=tmp_path / "there",
    )  # fmt: skip
    assert handed.hits
    assert content(tmp_path / "there") == {"a/k": b"kernel", "b/k": b"another"}


@pytest.mark.parametrize("what", [Path.mkdir, lambda path: path.symlink_to("/etc/passwd")])
def test_what_is_no_file_where_a_kernel_belongs_stays(
    tmp_path: Path, store: Path, what: Callable[[Path], object]
) -> None:
    """A folder of other kernels, most of all: whoever pushed chose the name."""
    foreign.write(tmp_path / "nki", {"a/k": b"kernel"})
    foreign.vllm_entry(tmp_path / "fleet", 0, kernels=(f"{foreign.NKI_ROOT}/a/k",))
    taken = adopted(tmp_path / "fleet", store, nki=tmp_path / "nki")
    there = tmp_path / "there"
    (there / "a").mkdir(parents=True)
    what(there / "a/k")
    before = (there / "a/k").lstat().st_ino
    handed = hand_out(
        layout_named("vllm-neuron"), DirectoryStore(store), taken.entries, tmp_path / "serving",
        nki_root=there,
    )  # fmt: skip
    assert (there / "a/k").lstat().st_ino == before
    assert any("a/k is no regular file" in text for text in handed.warnings)
    assert handed.hits


def test_a_cache_that_cannot_be_written_is_an_error_with_its_path(
    tmp_path: Path, store: Path, taken: Adopted
) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="file"):
        exported(store, taken.entries, tmp_path / "file" / "serving")


EXPORT = """
import sys
from pathlib import Path
from neffbuild.cache.catalog import read_hits
from neffbuild.cache.directory import DirectoryStore
from neffbuild.cache.layouts.exporting import export
from neffbuild.cache.layouts.known import layout_named
store, root, layout, *keys = sys.argv[1:]
local = DirectoryStore(Path(store))
entries = read_hits(local, keys)
print(flush=True)
result = export(layout_named(layout), local, entries, Path(root))
print([one.outcome.value for one in result.placed])
"""


def start(store: Path, root: Path, taken: Adopted, before: str = "") -> subprocess.Popen[bytes]:
    words = [str(store), str(root), "vllm-neuron", *taken.entries]
    return subprocess.Popen(
        [sys.executable, "-P", "-c", before + EXPORT, *words], stdout=subprocess.PIPE
    )


KILLED = """
import os
from neffbuild.cache import filesystem
left = [{number}]
for name in ("rename", "make_folder", "create", "sync", "write", "unlink", "remove_tree"):
    def counting(*words, call=getattr(filesystem, name)):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), 9)
        return call(*words)
    setattr(filesystem, name, counting)
"""


def test_killed_at_any_call_no_false_hit_is_left_and_the_next_one_heals(
    tmp_path: Path, fleet: Path, store: Path, taken: Adopted
) -> None:
    """Before every call that changes the disk, of which a sample is taken. One entry is new, one is
    replaced."""
    serving = tmp_path / "serving"
    killed = 0
    for number in sorted(random.Random(7).sample(range(1, 90), 14)):
        subprocess.run(["rm", "-rf", str(serving)], check=True)
        foreign.vllm_entry(serving, 0, sentinel=None)
        with start(store, serving, taken, KILLED.format(number=number)) as process:
            process.communicate()
        killed += process.returncode == -signal.SIGKILL
        for one in range(2):
            if foreign.vllm_hit(serving, key_of(one)):
                folder = content(serving / key_of(one))
                assert folder == whole(fleet / key_of(one))
        again = exported(store, taken.entries, serving)
        assert again.hits
        for note in serving.glob(".*.compilation_metadata"):
            # Killed with the place whole and its note not yet gone: to the engine's rule it is stale.
            assert f"pid:{process.pid}\n" in note.read_text(encoding="utf-8")
            note.unlink()
        for lock in serving.glob(".*.lock"):
            lock.unlink()
        assert content(serving) == whole(fleet)
        assert not list(serving.glob(".neffbuild-*"))
    assert killed > 5


def test_many_at_once_leave_one_whole_entry_each(
    tmp_path: Path, fleet: Path, store: Path, taken: Adopted
) -> None:
    serving = tmp_path / "serving"
    foreign.vllm_entry(serving, 0, sentinel=None)
    processes = [start(store, serving, taken) for _ in range(4)]
    answers = []
    for process in processes:
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        answers.append(json.loads(out.splitlines()[-1].decode().replace("'", '"')))
    assert {outcome for answer in answers for outcome in answer} <= {"written", "present"}
    for lock in serving.glob(".*.lock"):
        lock.unlink()
    assert content(serving) == whole(fleet)
    assert not list(serving.glob(".neffbuild-*"))


def test_threads_of_one_process_do_not_meet_either(
    tmp_path: Path, fleet: Path, store: Path, taken: Adopted
) -> None:
    serving = tmp_path / "serving"
    foreign.vllm_entry(serving, 0, sentinel=None)
    results: list[list[Outcome]] = []
    threads = [
        threading.Thread(target=lambda: results.append(outcomes(serving, store, taken)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert {outcome for one in results for outcome in one} <= {Outcome.WRITTEN, Outcome.PRESENT}
    for lock in serving.glob(".*.lock"):
        lock.unlink()
    assert content(serving) == whole(fleet)
