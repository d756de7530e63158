"""What there is of Neuron on this host, and what it suits; nothing of Neuron's is imported."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from neffbuild.cache.index import Fit
from neffbuild.toolchain.base import Finding
from neffbuild.toolchain.neuronx.routes import COMPILER
from neffbuild.toolchain.neuronx.target import LOGICAL_CORES, TARGET_OVERRIDE, TARGETS
from neffbuild.toolchain.neuronx.versions import (
    compiler_path,
    compiler_version,
    installed_versions,
    may_be,
)

_DEVICES = Path("/dev")
_DEVICE = re.compile(r"neuron\d+")
_ANY = "/dev/neuron*"
_RUNTIME = Path("/opt/aws/neuron/lib/libnrt.so.1")
"""Where the package aws-neuronx-runtime-lib puts it."""
_OF_ENGINES = ("nki", "libtorch-neuronx-lite", "torch-neuronx", "vllm-neuron")
"""Tools whose versions are in the keys that an engine looks its own cache up by."""
_CAPTURE = ("torch", "torch-mlir")
_LACKING = {
    "nki": "engine vllm-neuron has its version in every key",
    "libtorch-neuronx-lite": "engine vllm-neuron has its version in the keys of route native",
    "torch-neuronx": "engine torch-neuronx compiles where it is, and engine vllm-neuron has its version in "
    "the keys of route xla",
    "vllm-neuron": "its graphs are captured where it is (route xla without hlo_dir), and its version is in "
    "the keys",
}
"""What each of `_OF_ENGINES` would be needed for."""


def neuron_devices() -> list[str]:
    """The Neuron devices that this process can see. A container may be given some of its host's, and not
    the first."""
    found = [path for path in _DEVICES.iterdir() if _DEVICE.fullmatch(path.name)]
    return [str(path) for path in sorted(found, key=lambda path: (len(path.name), path.name))]


def runtime_refusal() -> str:
    """Why NEFFs are not loaded here."""
    lacking = [*([] if _RUNTIME.exists() else [_RUNTIME]), *([] if neuron_devices() else [_ANY])]
    if lacking:
        return f"NEFFs run on a host with Neuron's runtime and a Neuron device: there is no {lacking[0]} here"
    return "neffbuild does not run NEFFs itself: vLLM Neuron loads them from its compile cache at its start"


def host_fit(platform: Mapping[str, Any]) -> Fit:
    """See `Toolchain.fit`. Without a device a host says nothing of chips, so nothing is ruled out; the
    variables that the engine reads do, and versions of its packages that are installed."""
    chip, _, grouping = str(platform.get("target")).partition("+lnc")
    if chip not in TARGETS:
        return Fit(f"its target is {platform.get('target')!r:.50}")
    here = os.environ.get(TARGET_OVERRIDE)
    if here and here != chip:
        return Fit(f"{TARGET_OVERRIDE} is {here} here")
    lnc, said = grouping or str(TARGETS[chip][0]), os.environ.get(LOGICAL_CORES)
    if said and said != lnc:
        return Fit(f"{LOGICAL_CORES} is {said} here, and it is for {lnc}")
    versions = platform.get("versions")
    if isinstance(versions, Mapping):
        for tool, installed in installed_versions(_OF_ENGINES).items():
            if tool in versions and not may_be(str(versions[tool]), installed):
                return Fit(f"{tool} {installed} is installed here")
    # The grouping that nobody asked for otherwise is the one to run.
    return Fit(None, 0 if grouping else 1)


def neuronx_findings() -> list[Finding]:
    """What is installed, a line each."""
    return [_compiler(), *_capture(), *_engines(), *_device()]


def _compiler() -> Finding:
    path = compiler_path()
    if path is None:
        hint = "install neuronx-cc from Neuron's package repository; planning and pulling need none"
        return Finding(COMPILER, False, "not on PATH", hint)
    version = compiler_version()
    if version is None:
        hint = f"run `{COMPILER} --version`, which must name one"
        return Finding(COMPILER, False, f"{path} does not say its version", hint)
    return Finding(COMPILER, True, f"{version}, {path}")


def _capture() -> list[Finding]:
    found = installed_versions(_CAPTURE)
    hint = "pip install 'neffbuild[neuron]'"
    return [
        Finding(tool, True, found[tool], needed=False)
        if tool in found
        else Finding(
            tool,
            False,
            "not installed: the reference decoder cannot be captured",
            hint,
            needed=False,
        )
        for tool in _CAPTURE
    ]


def _engines() -> list[Finding]:
    found = installed_versions(_OF_ENGINES)
    return [
        Finding(
            tool,
            tool in found,
            found.get(tool) or f"not installed: {_LACKING[tool]}",
            "install it from Neuron's package repository; planning takes a pin, "
            f"toolchain.versions.{tool}",
            needed=False,
        )
        for tool in _OF_ENGINES
    ]


def _device() -> list[Finding]:
    return [
        Finding(
            subject,
            bool(found),
            ", ".join(found) or f"no {place}; {without}",
            "serve on a Trainium or Inferentia instance",
            needed=False,
        )
        for subject, found, place, without in (
            (
                "Neuron device",
                neuron_devices(),
                _ANY,
                "compiling needs none, but for speculation by engine vllm-neuron",
            ),
            (
                "Neuron runtime",
                [str(_RUNTIME)] if _RUNTIME.exists() else [],
                _RUNTIME,
                "compiling needs none",
            ),
        )
    ]
