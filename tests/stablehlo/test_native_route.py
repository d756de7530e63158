"""The native route from a config to NEFFs in another cache: captured for real, compiled by the stand-in."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch_mlir")

_TESTS = Path(__file__).parents[1]
for _folder in (_TESTS / "cli", _TESTS / "neuronx"):
    if str(_folder) not in sys.path:
        sys.path.append(str(_folder))

from neuron_project import NeuronProject  # noqa: E402

from neffbuild.cache.catalog import Hit, read_entry  # noqa: E402
from neffbuild.cache.directory import DirectoryStore  # noqa: E402
from neffbuild.config.load import load_config  # noqa: E402
from neffbuild.toolchain.base import Unit  # noqa: E402
from neffbuild.toolchain.neuronx.neff import read_neff_file  # noqa: E402
from neffbuild.toolchain.neuronx.stablehlo import capture  # noqa: E402
from neffbuild.toolchain.neuronx.toolchain import NeuronxToolchain  # noqa: E402
from neffbuild.toolchain.planning import plan_config  # noqa: E402


@pytest.fixture
def project(tmp_path: Path) -> NeuronProject:
    return NeuronProject(tmp_path)


def test_a_config_is_captured_compiled_pushed_and_pulled(project: NeuronProject) -> None:
    config = project.write(
        toolchain={
            "name": "neuronx",
            "engine": "reference",
            "target": "trn2",
            "phases": "decode",
            "flags": ["-O1", "--enable-saturate-infinity"],
        },
        max_num_seqs=1,
        model="small",
    )
    small = (project.root / "model" / "config.json").read_text()
    (project.root / "small").mkdir()
    (project.root / "small" / "config.json").write_text(
        small.replace('"num_hidden_layers": 8', '"num_hidden_layers": 2')
    )
    ran = project.run("compile", config, "--json")
    assert ran.status == 0, ran
    asked = {one["graph"]: one["words"] for one in project.received()}
    assert len(asked) == 2
    assert {" ".join(words) for words in asked.values()} == {
        "compile module.mlir --framework XLA --target trn2 --lnc 2 -O1 --model-type transformer "
        "--auto-cast=none --enable-saturate-infinity --output module.neff"
    }
    store = DirectoryStore(project.cache)
    loaded = load_config(project.root / config)
    # The environment of this process has no stand-in on PATH.
    document = project.call("plan", config, "--json").document
    keys = {unit["bucket_name"]: unit["key"] for unit in document["units"]}
    for name, key in keys.items():
        hit = read_entry(store, key)
        assert isinstance(hit, Hit)
        assert hit.entry.graph_digest in asked, name
        assert list(hit.entry.files) == ["module.neff"]
        neff = read_neff_file(store.blob_path(hit.entry.files["module.neff"].digest))
        assert neff.header.lnc_size == 2
        assert hit.entry.statistics["neff"]["digest"] == neff.header.digest
    shape = next(u.shape for u in plan_config(loaded, NeuronxToolchain(), store).units)
    again = capture(Unit(loaded, shape, {}, ""))
    assert hashlib.sha256(again.graph.module).hexdigest() in asked

    store_folder, other = str(project.root / "store"), str(project.root / "other")
    assert project.call("push", config, "--to", store_folder, "--tag", "n:1").status == 0
    assert project.call("pull", store_folder, "--tag", "n:1", "--cache", other).status == 0
    assert project.call("verify", config, "--cache", other, "--json").document["ok"]
    assert len(project.received()) == 2
