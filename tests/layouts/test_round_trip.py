"""A fleet's cache goes through a store to another machine, whose engine then sees the same hits."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import foreign_trees as foreign
import pytest
from cli_samples import Project
from foreign_trees import NKI_ROOT, content, key_of

PARTIAL = "--allow-partial"  # the plan's own units are not what is moved here


def adopt(project: Project, tree: Path, layout: str, *words: str) -> dict[str, object]:
    ran = project.call(
        "import", str(tree), "--layout", layout, "--config", "config.yaml", "--json", *words
    )
    assert ran.status == 0, ran
    return ran.document


def move(
    project: Project, layout: str, into: Path, *words: str, cache: str = "node"
) -> dict[str, object]:
    """Push what was adopted, and pull it on a machine with an empty cache."""
    pushed = project.call("push", "config.yaml", "--to", "remote", "--tag", "t", PARTIAL)
    assert pushed.status == 0, pushed
    return pull(project, layout, into, *words, cache=cache)


def pull(
    project: Project, layout: str, into: Path, *words: str, cache: str = "node"
) -> dict[str, object]:
    ran = project.call(
        "pull", "remote", "--tag", "llama:t", "--cache", cache, PARTIAL, "--json",
        "--layout", layout, "--into", str(into), *words,
    )  # fmt: skip
    assert ran.status == 0, ran
    return ran.document["layout"]


def without(files: dict[str, bytes], *suffixes: str) -> dict[str, bytes]:
    return {name: data for name, data in files.items() if not name.endswith(suffixes)}


def test_vllm_neuron(project: Project, tmp_path: Path) -> None:
    fleet, serving, nki, other_nki = (
        tmp_path / name for name in ("fleet", "serving", "nki", "nki2")
    )
    for number in range(3):
        foreign.vllm_entry(fleet, number, kernels=(f"{NKI_ROOT}/v1/kernel{number}.klir",))
    foreign.write(nki, {f"v1/kernel{number}.klir": b"binary %d" % number for number in range(4)})
    foreign.write(
        fleet,
        {
            "nki/00ff.json": json.dumps(
                {"klir_binary": {"binary": f"{NKI_ROOT}/v1/kernel3.klir"}}
            ).encode(),
            f".{key_of(0)}.compilation_metadata.lock": b"",
            f"{key_of(1)}/scratch.lock": b"",
        },
    )
    document = adopt(project, fleet, "vllm-neuron", "--nki-cache", str(nki))
    assert document["layout"]["counts"]["complete"] == 4
    layout = move(project, "vllm-neuron", serving, "--nki-cache", str(other_nki))
    assert layout["hits"]
    assert layout["counts"] == {"written": 4, "present": 0, "locked": 0, "refused": 0}

    assert all(foreign.vllm_hit(serving, key_of(number)) for number in range(3))
    never = (".cache_accessed", ".lock")
    assert content(serving) == without(content(fleet), *never)
    assert content(other_nki) == content(nki)
    for number in range(3):
        lines = foreign.sentinel_lines(serving, key_of(number))
        assert lines == foreign.sentinel_lines(fleet, key_of(number))
        size = (serving / key_of(number) / f"graph_{key_of(number)}.neff").stat().st_size
        assert lines["neff_size"] == str(size)

    again = pull(project, "vllm-neuron", serving, "--nki-cache", str(other_nki))
    assert again["counts"] == {"written": 0, "present": 4, "locked": 0, "refused": 0}
    assert again["bytes_written"] == 0


def test_torch_neuronx(project: Project, tmp_path: Path) -> None:
    fleet, serving = tmp_path / "fleet", tmp_path / "serving"
    for number in range(3):
        foreign.torch_entry(fleet, number)
    foreign.write(fleet, {f"{key_of(0)[:2]}/{key_of(0)[2:4]}/tmpk3l9": b"half"})
    document = adopt(project, fleet, "torch-neuronx")
    assert document["layout"]["counts"]["complete"] == 3
    assert move(project, "torch-neuronx", serving)["counts"]["written"] == 3
    assert all(foreign.torch_hit(serving, key_of(number)) for number in range(3))
    assert content(serving) == {
        name: data for name, data in content(fleet).items() if name.endswith(".neff")
    }


def test_libneuronxla(project: Project, tmp_path: Path) -> None:
    fleet, serving = tmp_path / "fleet", tmp_path / "serving"
    good = [foreign.xla_module(fleet, number) for number in range(2)]
    good.append(foreign.xla_module(fleet, 7, version="2.15.1.0", lock=b""))
    failed = foreign.xla_module(fleet, 3, neff=None, done=None, log=b"NCC_EVRF007")
    document = adopt(project, fleet, "libneuronxla")
    counts = document["layout"]["counts"]
    assert (counts["complete"], counts["failed"]) == (3, 1)
    move(project, "libneuronxla", serving)
    for folder in good:
        assert foreign.xla_state(serving / folder.relative_to(fleet)) == "success"
    assert not (serving / failed.relative_to(fleet)).exists()
    assert content(serving) == {
        name: data
        for name, data in without(content(fleet), ".lock").items()
        if not name.startswith(str(failed.relative_to(fleet)))
    }


def test_nothing_says_where_it_came_from(project: Project, tmp_path: Path) -> None:
    """Outside the two files that hold the compiler's command line by contract."""
    fleet = tmp_path / "fleet-of-somebody"
    foreign.vllm_entry(fleet, 1)
    adopt(project, fleet, "vllm-neuron")
    serving = tmp_path / "serving"
    move(project, "vllm-neuron", serving)
    by_contract = {
        data
        for name, data in content(serving).items()
        if name.endswith(("command.txt", "log-neuron-cc.txt"))
    }
    assert len(by_contract) == 2
    for place in (project.cache, project.root / "remote", project.root / "node", serving):
        for name, data in content(place).items():
            assert b"fleet-of-somebody" not in data, name
            assert str(tmp_path).encode() not in data, name
            if data not in by_contract:
                assert foreign.SOURCE_PATH.encode() not in data, name


@pytest.mark.parametrize("layout", ["vllm-neuron", "torch-neuronx", "libneuronxla"])
def test_the_same_entry_has_the_same_key_wherever_it_is_found(
    project: Project, tmp_path: Path, layout: str
) -> None:
    """By another user's machine, at another time, with other files beside it."""
    write = {
        "vllm-neuron": foreign.vllm_entry,
        "torch-neuronx": foreign.torch_entry,
        "libneuronxla": foreign.xla_module,
    }[layout]
    keys = []
    for name in ("one", "two/deep"):
        tree = tmp_path / name
        write(tree, 5)
        if name != "one":
            write(tree, 6)
            for path in tree.rglob("*"):
                os.utime(path, (1, 1))
        cache = f"cache-{len(keys)}"
        ran = project.call("import", str(tree), "--layout", layout, "--cache", cache, "--json")
        assert ran.status == 0, ran
        keys.append({path.stem for path in (project.root / cache).glob("v1/entries/*/*.json")})
    assert len(keys[0]) == 1
    assert keys[0] < keys[1]


def test_what_was_adopted_goes_with_its_config_from_then_on(
    project: Project, tmp_path: Path
) -> None:
    foreign.vllm_entry(tmp_path / "fleet", 1)
    adopt(project, tmp_path / "fleet", "vllm-neuron")
    shutil.rmtree(tmp_path / "fleet")
    foreign.vllm_entry(tmp_path / "later", 2)
    adopt(project, tmp_path / "later", "vllm-neuron")
    pushed = project.call("push", "config.yaml", "--to", "remote", "--tag", "t", PARTIAL, "--json")
    assert (pushed.document["units"], pushed.document["adopted"]) == (2, 2)
    layout = pull(project, "vllm-neuron", tmp_path / "serving")
    assert layout["counts"]["written"] == 2
    # And from the machine that pulled it, on.
    project.environment["NEFFBUILD_CACHE"] = str(project.root / "node")
    pushed = project.call("push", "config.yaml", "--to", "remote2", "--tag", "t", PARTIAL, "--json")
    assert pushed.document["adopted"] == 2
    # Another config knows nothing of it.
    project.write("other.yaml", max_num_seqs=2, sections={"cache": {"name": "llama"}})
    other = project.call("push", "other.yaml", "--to", "remote2", "--tag", "o", PARTIAL, "--json")
    assert other.document["adopted"] == 0


def test_without_a_config_nothing_names_them_and_that_is_said(
    project: Project, tmp_path: Path
) -> None:
    foreign.vllm_entry(tmp_path / "fleet", 1)
    ran = project.call("import", str(tmp_path / "fleet"), "--layout", "vllm-neuron")
    assert ran.status == 0
    assert "took over 1 entry (" in ran.out
    assert "--config CONFIG" in ran.out
    again = project.call("import", str(tmp_path / "fleet"), "--layout", "vllm-neuron")
    assert "took over 0 entries (0 B copied); 1 were here already" in again.out


def test_the_native_route_is_carried_and_called_unverified(
    project: Project, tmp_path: Path
) -> None:
    fleet = tmp_path / "fleet"
    foreign.native_entry(fleet, 4)
    document = adopt(project, fleet, "vllm-neuron")
    [place] = document["layout"]["places"]
    assert place["generation"] == "native-unverified"
    assert any("unverified" in note for note in place["notes"])
    move(project, "vllm-neuron", tmp_path / "serving")
    assert content(tmp_path / "serving") == content(fleet)


def test_unknown_files_are_carried_along_and_named(project: Project, tmp_path: Path) -> None:
    fleet = tmp_path / "fleet"
    folder = foreign.vllm_entry(fleet, 4)
    (folder / "profile.bin").write_bytes(b"new in some release")
    document = adopt(project, fleet, "vllm-neuron")
    [place] = document["layout"]["places"]
    assert any("profile.bin" in note for note in place["notes"])
    move(project, "vllm-neuron", tmp_path / "serving")
    assert (tmp_path / "serving" / key_of(4) / "profile.bin").read_bytes() == b"new in some release"


def test_the_ready_file_says_that_all_are_hits(project: Project, tmp_path: Path) -> None:
    foreign.vllm_entry(tmp_path / "fleet", 1)
    adopt(project, tmp_path / "fleet", "vllm-neuron")
    ready, serving = tmp_path / "ready", tmp_path / "serving"
    move(project, "vllm-neuron", serving, "--ready-file", str(ready))
    assert json.loads(ready.read_text())["layout"]["hits"]
    # An entry that somebody is at work on is no hit.
    shutil.rmtree(serving / key_of(1))
    own = Path("/proc/self/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    name = Path("/proc/self/comm").read_text().strip()
    foreign.vllm_metadata(serving, 1, pid=os.getpid(), name=name, command=own)
    ran = project.call(
        "pull", "remote", "--tag", "llama:t", "--cache", "node", PARTIAL, "--ready-file", str(ready),
        "--layout", "vllm-neuron", "--into", str(serving),
    )  # fmt: skip
    assert ran.status == 1
    assert f"locked {key_of(1)}: process {os.getpid()} is compiling it" in ran.out
    assert not ready.exists()
    assert not (serving / key_of(1)).exists()


def test_options_that_go_together(project: Project, tmp_path: Path) -> None:
    lines = [
        (
            ("import", "fleet", "--layout", "vllm"),
            "allowed: vllm-neuron, torch-neuronx, libneuronxla",
        ),
        (("import", "fleet", "--layout", "vllm-neuron"), "is not there"),
        (("import", "", "--layout", "vllm-neuron"), "is no path"),
        (("import", "fleet", "--nki-cache", "x"), "--nki-cache goes with --layout"),
        (("pull", "remote", "--tag", "a:b", "--layout", "vllm-neuron"), "needs --into"),
        (("pull", "remote", "--tag", "a:b", "--into", "x"), "--into goes with --layout"),
        (("pull", "remote", "--tag", "a:b", "--layout", "vllm-neuron", "--into", ""), "no path"),
    ]
    for words, message in lines:
        ran = project.call(*words)
        assert ran.status == 2, ran
        assert message in ran.err
    assert project.call("push", "config.yaml", "--to", "remote", "--tag", "t", PARTIAL).status == 0
    ran = project.call(
        "pull", "remote", "--tag", "llama:t", "--cache", "node", PARTIAL,
        "--layout", "vllm-neuron", "--into", str(tmp_path / "x"),
    )  # fmt: skip
    assert ran.status == 1
    assert "has nothing for the layout vllm-neuron" in ran.err
    assert not (tmp_path / "x").exists()
