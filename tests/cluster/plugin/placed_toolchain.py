"""The hostile toolchain, writing down on which node each compile began: nodes differ by their HOME."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import psutil
from hostile_toolchain import HostileToolchain

from neffbuild.toolchain.base import Artifact, Captured, Unit


class PlacedToolchain(HostileToolchain):
    """See above; the lines of `places`, beside `serve.control`, are `UNIT NODE CORES`."""

    name = "placed"

    def compile(
        self, unit: Unit, captured: Captured, scratch: Path, *, shared: Path | None = None
    ) -> Artifact:
        control = Path((unit.config.serve.model_extra or {})["control"])
        cores = os.environ.get("NEURON_RT_VISIBLE_CORES", "none")
        with control.with_name("places").open("a") as places:
            places.write(f"{unit.shape.bucket_name} {Path(os.environ['HOME']).name} {cores}\n")
        return super().compile(unit, captured, scratch, shared=shared)

    def _kill_what_ray_started(self, scratch: Path) -> None:
        """What the kernel may do to any process when memory runs out."""
        for process in psutil.Process().parents():
            if process.name().startswith("ray::"):
                process.send_signal(signal.SIGKILL)


class DeviceToolchain(PlacedToolchain):
    """Compiles on a device, as a toolchain may that profiles what it generates."""

    name = "device"
    capabilities = replace(PlacedToolchain.capabilities, device_for=lambda config, shape: "neuron")
