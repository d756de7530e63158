"""vLLM's plugin: hydrates before anything is compiled, once, and says what it did."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from fault_proxy import Answer, FaultProxy, Forward, Request
from hydration_samples import Fleet, Started, ended

from neffbuild.cache.directory import DirectoryStore
from neffbuild.config.errors import ConfigError
from neffbuild.runtime.backend_settings import backend_settings
from neffbuild.runtime.hydration import Hydration, inherited

UNITS = 6


def blobs(store: Path) -> list[Path]:
    return [path for path in (store / "v1/blobs").rglob("*") if path.is_file()]


def visible(store: Path) -> list[Path]:
    """Entries and manifests of a store."""
    return [
        path
        for folder in ("entries", "manifests")
        for path in (store / "v1" / folder).rglob("*.json")
    ]


def test_an_engine_finds_everything_that_was_compiled(fleet: Fleet) -> None:
    started = fleet.start(fleet.reference)
    assert started.status == 0, started.err
    hydration = started.hydration
    assert hydration["hits"] == UNITS
    assert hydration["misses"] == 0
    assert hydration["blobs_copied"] == len(blobs(fleet.cache))
    assert hydration["bytes_copied"] == sum(path.stat().st_size for path in blobs(fleet.cache))
    assert started.err.startswith(f"neffbuild: hydrated {UNITS} units from {fleet.reference} in ")
    assert fleet.whole()
    again = fleet.start(fleet.reference)
    assert (again.hydration["hits"], again.hydration["blobs_copied"]) == (UNITS, 0)
    assert again.hydration["manifest"] == hydration["manifest"]


def test_processes_below_do_nothing(fleet: Fleet) -> None:
    started = fleet.start(fleet.reference, BELOW="1")
    assert started.answer is not None
    assert started.answer["below"]["hydration"] == started.hydration
    assert started.err.count("hydrated") == 1
    assert started.answer["below"]["seconds"] < 1


def test_a_digest_names_an_index_or_a_manifest(fleet: Fleet) -> None:
    [manifest] = (fleet.root / "remote/v1/manifests").iterdir()
    [index] = (fleet.root / "remote/v1/indexes").iterdir()
    for path in (manifest, index):
        started = fleet.start(f"file://{fleet.root}/remote@sha256:{path.stem}", STRICT="1")
        assert started.hydration["manifest"] == manifest.stem


def test_from_s3_with_nothing_left_behind(fleet: Fleet, proxy: FaultProxy) -> None:
    url = proxy.server.url("fleet")
    fleet.push(url)
    proxy.behave()
    started = fleet.start(f"{url}#llama:prod", STRICT="1")
    assert started.status == 0, started.err
    assert started.answer is not None
    assert fleet.whole()
    # What forks must hold no threads, and a server no S3 client that it does not use.
    assert started.answer["threads"] == 1
    assert not {"boto3", "botocore", "torch"} & set(started.answer["modules"])


def test_two_engines_at_once_hydrate_once(fleet: Fleet, proxy: FaultProxy) -> None:
    url = proxy.server.url("fleet")
    fleet.push(url)
    proxy.behave()

    def slowly(request: Request, forward: Forward) -> Answer:
        time.sleep(0.3)
        return forward(request)

    proxy.misbehave(slowly)
    engines = [fleet.launch(f"{url}#llama:prod") for _ in range(2)]
    both = [ended(engine) for engine in engines]
    assert [one.status for one in both] == [0, 0]
    assert sorted(one.hydration["shared"] for one in both) == [False, True]
    fetched = [request.key for request in proxy.requests if request.method == "GET"]
    assert len(fetched) == len(set(fetched))
    assert len([key for key in fetched if "/blobs/" in key]) == len(blobs(fleet.cache))
    assert sorted(one.hydration["blobs_copied"] for one in both) == [0, len(blobs(fleet.cache))]
    assert sum("by another process" in one.err for one in both) == 1


def test_whoever_believes_others_does_not_share(
    fleet: Fleet, tmp_path: Path, proxy: FaultProxy
) -> None:
    url = proxy.server.url("fleet")
    fleet.push(url)
    assert fleet.builder.run("keygen", "--out", str(tmp_path / "key")).status == 0

    def slowly(request: Request, forward: Forward) -> Answer:
        time.sleep(0.3)
        return forward(request)

    proxy.misbehave(slowly)
    anyone = fleet.launch(f"{url}#llama:prod")
    careful = fleet.launch(f"{url}#llama:prod", KEYS=str(tmp_path / "key.pub"), STRICT="1")
    assert ended(anyone).status == 0
    assert ended(careful).status == 4


def unreachable() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def test_a_store_that_is_down(fleet: Fleet) -> None:
    reference = f"s3://fleet/p?endpoint={unreachable()}&retry_seconds=1&region=eu-west-1#llama:prod"
    started = fleet.start(reference)
    assert started.status == 0
    assert started.hydration["manifest"] is None
    first, second = started.err.splitlines()
    assert first.startswith(
        f"neffbuild: warning: nothing was hydrated from {reference}: cannot read"
    )
    assert "compiles what the local cache lacks" in second
    assert "NEFFBUILD_HYDRATE_WAIT" in second
    strict = fleet.start(reference, STRICT="1")
    assert strict.status == 3
    assert strict.answer is None
    assert strict.err.startswith("neffbuild: error: refusing to start: cannot read s3://fleet/p/")


def test_a_store_that_never_answers_is_waited_for_so_long(fleet: Fleet) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        reference = f"s3://fleet/p?endpoint={endpoint}&region=eu-west-1#llama:prod"
        began = time.monotonic()
        started = fleet.start(reference, HYDRATE_WAIT="3", BELOW="1")
        assert time.monotonic() - began < 30
        assert started.status == 0
        assert started.answer is not None
        assert 3 <= started.answer["seconds"] < 20
        assert (
            "it did not end within 3 s (NEFFBUILD_HYDRATE_WAIT=SECONDS waits longer)" in started.err
        )
        # The engine's other processes do not wait again.
        assert started.answer["below"]["seconds"] < 1
        assert started.answer["below"]["hydration"] == started.hydration
        assert fleet.start(reference, HYDRATE_WAIT="0.5", STRICT="1").status == 3


def test_a_damaged_artifact_is_noticed_before_anything_is_visible(fleet: Fleet) -> None:
    victim = blobs(fleet.root / "remote")[0]
    victim.write_bytes(bytes(victim.stat().st_size))
    started = fleet.start(fleet.reference)
    assert started.status == 0
    assert started.hydration["manifest"] is None
    assert f"blob {victim.name} in {fleet.root}/remote is damaged" in started.err
    assert visible(fleet.cache) == []
    strict = fleet.start(fleet.reference, STRICT="1")
    assert strict.status == 4
    assert victim.name in strict.err
    assert visible(fleet.cache) == []


def test_strict_mode_lists_every_missing_unit(fleet: Fleet) -> None:
    built = fleet.root / "partial"
    shutil.copytree(fleet.builder.cache, built)
    gone = []
    for path in sorted((built / "v1/entries").rglob("*.json"))[:2]:
        shape = json.loads(path.read_text())["recipe"]["shape"]
        gone.append(f"decode_b{shape['num_seqs']}_ctx{shape['context_len']}")
        path.unlink()
    fleet.push(f"{fleet.root}/part", "--allow-partial", "--cache", str(built))
    reference = f"{fleet.root}/part#llama:prod"
    strict = fleet.start(reference, STRICT="1")
    assert strict.status == 1
    assert f"refusing to start: 2 units of {reference} are missing: " in strict.err
    for name in gone:
        assert name in strict.err
    started = fleet.start(reference)
    assert started.status == 0
    assert (started.hydration["hits"], started.hydration["misses"]) == (UNITS - 2, 2)


def test_signatures_are_checked(fleet: Fleet, tmp_path: Path) -> None:
    for name in ("release", "stranger"):
        assert fleet.builder.run("keygen", "--out", str(tmp_path / name)).status == 0
    release, stranger = (str(tmp_path / f"{name}.pub") for name in ("release", "stranger"))
    unsigned = fleet.start(fleet.reference, KEYS=release, STRICT="1")
    assert unsigned.status == 4
    assert "signature" in unsigned.err
    assert visible(fleet.cache) == []
    fleet.push(f"{fleet.root}/signed", "--key", str(tmp_path / "release.key"))
    signed = f"{fleet.root}/signed#llama:prod"
    assert fleet.start(signed, KEYS=stranger, STRICT="1").status == 4
    assert fleet.start(signed, KEYS=release, MIN_SEQUENCE="2", STRICT="1").status == 4
    assert visible(fleet.cache) == []
    both = f"{stranger}{os.pathsep}{release}"
    assert fleet.start(signed, KEYS=both, STRICT="1").status == 0
    assert fleet.whole()


def test_the_ready_file_speaks_of_this_start(fleet: Fleet) -> None:
    ready = fleet.root / "ready"
    ready.write_text("of an earlier start")
    down = f"s3://fleet/p?endpoint={unreachable()}&retry_seconds=0&region=eu-west-1#llama:prod"
    fleet.start(down, READY_FILE=str(ready))
    assert not ready.exists()
    ready.write_text("of an earlier start")
    assert fleet.start(fleet.reference, READY_FILE=str(ready), STRICT="yes").status == 2
    assert not ready.exists()
    started = fleet.start(fleet.reference, READY_FILE=str(ready))
    document = json.loads(ready.read_text())
    assert document["schema"] == "neffbuild.pull/1"
    assert (document["units"], document["missing"]) == (UNITS, 0)
    assert document["manifest"] == started.hydration["manifest"]


@pytest.mark.parametrize(
    ("reference", "variables", "needle"),
    [
        ("s3://bucket/prefix", {}, "not what to take from it"),
        ("gs://bucket/prefix#a:b", {}, "gs:// is not supported"),
        ("remote#a b", {}, "'a b' cannot be part of a tag"),
        ("remote#llama:prod", {"STRICT": "yes"}, "NEFFBUILD_STRICT is 'yes'; allowed: 1, 0"),
        ("remote#llama:prod", {"HYDRATE_WAIT": "0"}, "NEFFBUILD_HYDRATE_WAIT is '0'; allowed: sec"),
        ("remote#llama:prod", {"HYDRATE_WAIT": "5m"}, "NEFFBUILD_HYDRATE_WAIT is '5m'"),
        ("remote#llama:prod", {"HYDRATE_WAIT": "nan"}, "NEFFBUILD_HYDRATE_WAIT is 'nan'"),
        ("remote#llama:prod", {"MIN_SEQUENCE": "-1"}, "NEFFBUILD_MIN_SEQUENCE is '-1'"),
        ("remote#llama:prod", {"KEYS": "absent.pub"}, "absent.pub"),
        # A variable in their place that is not set.
        ("remote#llama:prod", {"KEYS": ""}, "NEFFBUILD_KEYS is ''"),
        ("remote#llama:prod", {"KEYS": ":"}, "NEFFBUILD_KEYS is ':'"),
        ("#llama:prod", {}, "names no release of a store"),
        ("remote", {}, "names no release of a store"),
        (" ", {}, "names no release of a store"),
        ("remote#llama:prod", {"READY_FILE": "no/such/ready"}, "NEFFBUILD_READY_FILE is"),
        ("remote#llama:prod", {"READY_FILE": "remote"}, "NEFFBUILD_READY_FILE is 'remote'"),
    ],
)
def test_a_wrong_setting_is_refused_strict_or_not(
    fleet: Fleet, reference: str, variables: dict[str, str], needle: str
) -> None:
    started = fleet.start(reference, **variables)
    assert started.status == 2, started.err
    assert started.err.startswith("neffbuild: error: refusing to start: ")
    assert needle in started.err


@pytest.mark.parametrize("reference", [None, "", "0" * 64, "/cache/manifest.json"])
def test_where_no_store_is_named_nothing_is_imported(fleet: Fleet, reference: str | None) -> None:
    started = fleet.start(reference)
    assert started.status == 0
    assert started.answer is not None
    assert started.answer["hydration"] is None
    ours = {name for name in started.answer["modules"] if name.startswith("neffbuild")}
    heads = {"neffbuild", "neffbuild.runtime", "neffbuild.runtime.vllm_plugin"}
    if reference != "/cache/manifest.json":
        assert ours == heads
    assert started.answer["seconds"] < 0.5
    assert not fleet.cache.exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("vllm",),
        ("vllm", "--version"),
        ("vllm", "serve", "--help=all"),
        ("/usr/bin/vllm", "chat"),
        ("api_server.py", "-h"),
        ("vllm", "bench", "serve", "--model", "m"),
    ],
)
def test_a_command_line_that_starts_no_engine_hydrates_nothing(
    fleet: Fleet, arguments: tuple[str, ...]
) -> None:
    started = fleet.start(fleet.reference, arguments=arguments)
    assert started.status == 0
    assert started.hydration is None
    assert not fleet.cache.exists()


def test_a_script_of_ones_own_hydrates(fleet: Fleet) -> None:
    assert fleet.start(fleet.reference, arguments=("serve.py",)).hydration["hits"] == UNITS


def test_the_backend_looks_in_what_was_hydrated(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEFFBUILD_CACHE", str(fleet.cache))
    started = fleet.start(fleet.reference)
    environment = {
        "NEFFBUILD_MANIFEST": fleet.reference,
        "NEFFBUILD_HYDRATION": json.dumps(started.hydration),
    }
    [manifest] = backend_settings({}, environment).manifests
    assert manifest.digest == started.hydration["manifest"]
    # Where the engine was to start all the same: what is in the cache.
    failed = Hydration(fleet.reference, socket.gethostname(), cause="down")
    environment["NEFFBUILD_HYDRATION"] = failed.to_json()
    [manifest] = backend_settings({}, environment).manifests
    assert manifest.digest == started.hydration["manifest"]
    for told in (
        {},
        {"NEFFBUILD_HYDRATION": Hydration("other#a:b", socket.gethostname()).to_json()},
    ):
        with pytest.raises(ConfigError, match="nothing was pulled from there for this process"):
            backend_settings({}, {"NEFFBUILD_MANIFEST": fleet.reference, **told})


@pytest.mark.parametrize(
    "text",
    ["", "no JSON", "[]", '{"reference": "r"}', Hydration("r", "another host").to_json(),
     Hydration("other", socket.gethostname()).to_json()],
)  # fmt: skip
def test_what_is_not_of_this_host_and_store_is_not_inherited(text: str) -> None:
    assert inherited({"NEFFBUILD_MANIFEST": "r", "NEFFBUILD_HYDRATION": text}) is None


def test_a_hydrating_process_that_dies_is_named(fleet: Fleet, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "sitecustomize.py").write_text(
        "import os, sys\nif 'neffbuild.runtime.hydrate' in sys.orig_argv: os._exit(7)\n"
    )
    path = f"{broken}{os.pathsep}{fleet.environment['PYTHONPATH']}"
    started: Started = fleet.start(fleet.reference, PYTHONPATH=path)
    assert started.status == 0
    assert "the hydrating process ended with status 7" in started.err


def test_metrics_stand_beside_the_engines_own(fleet: Fleet, tmp_path: Path) -> None:
    exposition = pytest.importorskip("prometheus_client").exposition
    from neffbuild.runtime.hydration_metrics import expose

    expose(Hydration("r", "h", manifest="0" * 64, seconds=1.5, bytes_copied=7, hits=5, misses=1))
    shown = exposition.generate_latest().decode()
    for line in ("success 1.0", "seconds 1.5", "bytes 7.0", "hits 5.0", "misses 1.0"):
        assert f"\nneffbuild_hydrate_{line}\n" in shown


def with_engine_files(fleet: Fleet, tmp_path: Path, files: dict[str, str]) -> Any:
    from neffbuild.cache.catalog import commit_entry, record_files
    from neffbuild.cache.entry import Entry
    from neffbuild.cache.manifest import Manifest

    store = DirectoryStore(fleet.cache)
    paths = {}
    for number, (name, content) in enumerate(files.items()):
        paths[name] = tmp_path / f"file{number}"
        paths[name].write_text(content)
    entry = Entry({"kind": "graph"}, record_files(paths), "0" * 64, "1" * 64)
    commit_entry(store, entry, paths)
    return store, Manifest("0" * 64, {}, {}, (), {entry.key: entry})


def test_files_of_the_engines_own_cache_come_along(fleet: Fleet, tmp_path: Path) -> None:
    from neffbuild.runtime.engine_files import lay_out_engine_files, vllm_cache_root

    store, manifest = with_engine_files(
        fleet,
        tmp_path,
        {
            "program.so": "program",
            "engine/vllm/modelinfos/llama.json": "ours",
            "engine/vllm/modelinfos/other.json": "ours too",
            "engine/neuron/x": "not asked for",
        },
    )
    root = vllm_cache_root({"VLLM_CACHE_ROOT": str(tmp_path / "root")})
    (root / "modelinfos").mkdir(parents=True)
    (root / "modelinfos/other.json").write_text("the engine's")
    assert lay_out_engine_files(store, manifest, {"vllm": root}) == 1
    found = {path.name: path.read_text() for path in root.rglob("*") if path.is_file()}
    assert found == {"llama.json": "ours", "other.json": "the engine's"}
    assert lay_out_engine_files(store, manifest, {"vllm": root}) == 0
    # An engine does without.
    (tmp_path / "file").write_text("in the way")
    assert lay_out_engine_files(store, manifest, {"vllm": tmp_path / "file"}) == 0


@pytest.mark.parametrize(
    ("variables", "root"),
    [
        ({"VLLM_CACHE_ROOT": "/a"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/vllm"),
        ({}, str(Path("~/.cache/vllm").expanduser())),
    ],
)
def test_where_vllm_keeps_its_cache(variables: dict[str, str], root: str) -> None:
    from neffbuild.runtime.engine_files import vllm_cache_root

    assert str(vllm_cache_root(variables)) == root


def test_a_url_is_no_cache_of_the_backend() -> None:
    with pytest.raises(ConfigError, match=r"options\.cache is 's3://bucket/prefix', a URL"):
        backend_settings({"cache": "s3://bucket/prefix"}, {})
