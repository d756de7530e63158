"""`neffbuild doctor`: what is installed, which toolchains can run here and why not."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import click

from neffbuild import __version__
from neffbuild.cli import options, output

if TYPE_CHECKING:
    from neffbuild.toolchain.base import Finding


@click.command(name="doctor")
@options.json_option
def command(as_json: bool) -> int:
    """What is installed, which toolchains can run here and why not."""
    from neffbuild.toolchain.registry import toolchain_names

    host = _host_findings()
    toolchains = {name: _toolchain_findings(name) for name in toolchain_names()}
    if as_json:
        output.print_json(
            {
                "schema": "neffbuild.doctor/1",
                "version": __version__,
                "ok": any(map(_ready, toolchains.values())),
                "host": [_document(one) for one in host],
                "toolchains": [
                    {
                        "name": name,
                        "ok": _ready(findings),
                        "findings": [_document(one) for one in findings],
                    }
                    for name, findings in toolchains.items()
                ],
            }
        )
        return 0
    output.write("\n".join([f"neffbuild {__version__}", *_lines(host)]))
    for name, findings in toolchains.items():
        state = "ready" if _ready(findings) else "not ready"
        output.write("\n".join([f"\ntoolchain {name}: {state}", *_lines(findings)]))
    return 0


def _host_findings() -> list[Finding]:
    from neffbuild.config.build import CacheConfig, cache_directory
    from neffbuild.report.text import size
    from neffbuild.toolchain.base import Finding

    cache = cache_directory(CacheConfig())
    there = next(folder for folder in (cache, *cache.parents) if folder.exists())
    writable = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    return [
        Finding("python", True, f"{platform.python_version()} on {platform.machine()}"),
        Finding("cores", True, str(len(os.sched_getaffinity(0)))),
        Finding(
            "local cache",
            writable,
            f"{cache}, {size(shutil.disk_usage(there).free)} free"
            if writable
            else f"{cache} cannot be written",
            "set NEFFBUILD_CACHE, cache.local or --cache to a directory of your own",
        ),
        _extra("stores in S3", "s3", "boto3", "zstandard"),
        _extra("signatures", "sign", "securesystemslib", "cryptography"),
    ]


def _extra(subject: str, extra: str, *modules: str) -> Finding:
    """Whether what an extra of this package needs is installed."""
    from neffbuild.toolchain.base import Finding

    missing = [module for module in modules if find_spec(module) is None]
    return Finding(
        subject,
        not missing,
        f"not usable: {' and '.join(missing)} not installed" if missing else "usable",
        f"pip install 'neffbuild[{extra}]'",
        needed=False,
    )


def _toolchain_findings(name: str) -> list[Finding]:
    from neffbuild.toolchain.base import Finding
    from neffbuild.toolchain.registry import load_toolchain

    try:
        return load_toolchain(name).findings()
    except Exception as error:
        # Anybody's package: whatever it raises is what there is to know about it.
        return [Finding("import", False, f"{type(error).__name__}: {error}", "install it again")]


def _ready(findings: Sequence[Finding]) -> bool:
    return all(one.ok for one in findings if one.needed)


def _document(finding: Finding) -> dict[str, Any]:
    return {
        "subject": finding.subject,
        "ok": finding.ok,
        "needed": finding.needed,
        "detail": finding.detail,
        "hint": finding.hint,
    }


def _lines(findings: Sequence[Finding]) -> list[str]:
    lines = []
    for one in findings:
        mark = "ok" if one.ok else "NO" if one.needed else "--"
        lines.append(f"  {mark} {one.subject}: {one.detail}")
        if one.hint and not one.ok:
            lines.append(f"     {one.hint}")
    return lines
