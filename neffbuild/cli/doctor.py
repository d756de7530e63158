"""`neffbuild doctor`: what is installed, which toolchains can run here and why not."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from neffbuild import __version__
from neffbuild.cli import options, output

if TYPE_CHECKING:
    from neffbuild.toolchain.base import Finding


@click.command(name="doctor")
@click.argument("config_file", metavar="[CONFIG]", required=False, type=click.Path(path_type=Path))
@click.option(
    "--remote", "urls", multiple=True, metavar="URL", help="A store to look at; repeatable."
)
@options.json_option
def command(config_file: Path | None, urls: tuple[str, ...], as_json: bool) -> int:
    """What is installed, which toolchains can run here and why not.

    With a CONFIG, or --remote, also with which settings its remote stores are reached and whether they
    answer; the exit status is 3 where one does not.
    """
    from neffbuild.config.errors import StoreError
    from neffbuild.toolchain.registry import toolchain_names

    host = _host_findings()
    remotes = [_remote(url, mode) for url, mode in _urls(config_file, urls)]
    toolchains = {name: _toolchain_findings(name) for name in toolchain_names()}
    status = 0 if all(remote["ok"] for remote in remotes) else StoreError.exit_status
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
                "remotes": remotes,
            }
        )
        return status
    output.write("\n".join([f"neffbuild {__version__}", *_lines(host)]))
    for name, findings in toolchains.items():
        state = "ready" if _ready(findings) else "not ready"
        output.write("\n".join([f"\ntoolchain {name}: {state}", *_lines(findings)]))
    for remote in remotes:
        output.write(_remote_text(remote))
    return status


def _urls(config_file: Path | None, urls: tuple[str, ...]) -> list[tuple[str, str]]:
    """(URL, mode) of the stores to look at."""
    from neffbuild.config.load import load_config

    remotes = load_config(config_file).cache.remotes if config_file else ()
    return [*((one.url, one.mode) for one in remotes), *((url, "rw") for url in urls)]


def _remote(url: str, mode: str) -> dict[str, Any]:
    """The settings in force for a store, and whether it answers: one listing, nothing is written."""
    from neffbuild.cache.open import open_store
    from neffbuild.config.errors import NeffbuildError

    found: dict[str, Any] = {"url": url, "mode": mode, "ok": True, "settings": {}}
    found |= {"tags": [], "detail": None, "hint": None}
    try:
        store = open_store(url)
        found["settings"] = dict(store.effective())
        names = (listed.name.removeprefix("tags/") for listed in store.list("tags/"))
        found["tags"] = sorted(name.removesuffix(".json").replace("/", ":") for name in names)
    except NeffbuildError as error:
        found |= {"ok": False, "detail": error.message, "hint": error.hint}
    return found


def _remote_text(remote: Mapping[str, Any]) -> str:
    lines = [f"\nremote {remote['url']} ({remote['mode']}): {'ok' if remote['ok'] else 'NOT ok'}"]
    lines += [f"  {name}: {value}" for name, value in remote["settings"].items()]
    if remote["ok"]:
        lines.append(f"  tags: {', '.join(remote['tags'][:20]) or 'none'}")
    else:
        lines.append(f"  {remote['detail']}")
        lines += [f"  {remote['hint']}"] if remote["hint"] else []
    return "\n".join(lines)


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
