"""Finding toolchains, without paying for them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from neffbuild.config.errors import ConfigError, MissingExtra
from neffbuild.toolchain.registry import load_toolchain, toolchain_names


@pytest.fixture
def third_party(tmp_path, monkeypatch):
    """A package of somebody else that brings two toolchains, one of them not importable."""
    information = tmp_path / "elsewhere-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(
        "[neffbuild.toolchains]\nelsewhere = elsewhere:Toolchain\nbroken = elsewhere.gone:Toolchain\n"
    )
    (tmp_path / "elsewhere.py").write_text("class Toolchain:\n    name = 'elsewhere'\n")
    monkeypatch.syspath_prepend(str(tmp_path))


def test_a_third_party_toolchain_is_found(third_party):
    assert {"inductor", "elsewhere", "broken"} <= set(toolchain_names())
    assert load_toolchain("elsewhere").name == "elsewhere"
    assert load_toolchain("inductor").name == "inductor"


def test_one_that_cannot_be_imported_is_a_missing_extra(third_party):
    with pytest.raises(MissingExtra, match="'broken' cannot be imported"):
        load_toolchain("broken")


def test_an_unknown_name_is_answered_with_the_available_ones():
    with pytest.raises(ConfigError) as refused:
        load_toolchain("inductr")
    assert refused.value.field == "toolchain.name"
    assert "available: " in refused.value.message
    assert "inductor" in refused.value.message
    assert refused.value.hint == "did you mean 'inductor'?"


def test_planning_with_inductor_imports_no_torch():
    code = """
import sys
sys.path.insert(0, sys.argv[1])
from toolchain_samples import decode, tiny_build
from neffbuild.toolchain.registry import load_toolchain
toolchain, config = load_toolchain("inductor"), tiny_build()
toolchain.identity(config), toolchain.refusal(config, decode(1)), toolchain.findings()
toolchain.host_refusal(config), toolchain.preload, toolchain.capabilities
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code, str(__file__).rpartition("/")[0]], check=True)
