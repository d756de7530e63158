"""What is refused without torch-mlir, and before it is asked for."""

from __future__ import annotations

import sys

import pytest
from step_samples import grid, quickstart, unit

from neffbuild.config.errors import MissingExtra, ToolchainRefusal
from neffbuild.grid.shapes import Family, PrefillShape
from neffbuild.toolchain.neuronx.stablehlo import capture, module_text


def test_without_torch_mlir_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_mlir", None)
    monkeypatch.delitem(sys.modules, "torch_mlir.fx", raising=False)
    config = quickstart()
    [shape, *_] = grid(config).values()
    for act in (lambda: capture(unit(config, shape)), lambda: module_text(b"")):
        with pytest.raises(MissingExtra, match="torch_mlir") as missing:
            act()
        assert "neffbuild[neuron]" in missing.value.hint


def test_a_prefill_shape_is_refused():
    with pytest.raises(ToolchainRefusal, match="prefill_s512 is a prefill one"):
        capture(unit(quickstart(), PrefillShape(Family.PREFILL, 512)))
