"""Of what a tag has for several platforms, an engine is served what was built for it."""

from __future__ import annotations

import contextlib
import fcntl
import sys
from pathlib import Path

import pytest
from hydration_samples import Fleet

sys.path.append(str(Path(__file__).parents[1] / "cache"))

from cache_samples import ANYONE, fill, make_manifest

from neffbuild.cache.catalog import write_manifest
from neffbuild.cache.directory import DirectoryStore
from neffbuild.cache.reference import Reference
from neffbuild.cache.tag import TagRef
from neffbuild.cache.transfer import push
from neffbuild.config.errors import LockTimeout
from neffbuild.runtime.hydrate import hydrate
from neffbuild.runtime.hydration import HydrationSettings
from neffbuild.toolchain.inductor.identity import ROUTE, installed_versions


def settings(url: Path) -> HydrationSettings:
    return HydrationSettings(Reference(str(url), "llama:prod"), False, 5.0, (), 0, None)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DirectoryStore:
    monkeypatch.setenv("NEFFBUILD_CACHE", str(tmp_path / "node"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
    return DirectoryStore(tmp_path / "node")


def test_what_was_built_for_the_engine_is_chosen(tmp_path: Path, node: DirectoryStore) -> None:
    builder, remote = DirectoryStore(tmp_path / "builder"), DirectoryStore(tmp_path / "remote")
    entries = fill(builder, tmp_path / "files", 2)
    host = {"torch": installed_versions().get("torch", "2.13.0")}
    manifests = {}
    for name, versions in {"reference": host, "engine": {**host, "vllm": "0.32.0"}}.items():
        platform = {
            "toolchain": "inductor",
            "route": ROUTE,
            "target": "x86-64-v3",
            "versions": versions,
        }
        manifest = make_manifest(entries, platform=platform)
        manifests[name] = write_manifest(builder, manifest)
        push(builder, remote, manifest, TagRef("llama", "prod"), trust=ANYONE)
    done = hydrate(settings(tmp_path / "remote"), {"VLLM_CACHE_ROOT": str(tmp_path / "vllm")})
    assert done.hydration.manifest == manifests["engine"]
    assert node.read(f"manifests/{manifests['reference']}.json") is None


def test_an_engine_that_never_ends_hydrating_is_named(fleet: Fleet, node: DirectoryStore) -> None:
    reference = Reference(str(fleet.root / "remote"), "llama:prod")
    impatient = HydrationSettings(reference, False, 0.2, (), 0, None)
    root = {"VLLM_CACHE_ROOT": str(fleet.root / "vllm")}
    hydrate(impatient, root)
    with contextlib.ExitStack() as held:
        for path in (fleet.root / "neffbuild").glob("*.lock"):
            fcntl.flock(held.enter_context(path.open("r+")), fcntl.LOCK_EX)
        with pytest.raises(LockTimeout) as caught:
            hydrate(impatient, root)
    assert f"the hydration of {node.url} from {reference}" in caught.value.message
    assert "is locked by process" in caught.value.message
