"""`neffbuild doctor`: what is installed, which toolchains can run here and why not."""

from __future__ import annotations

import click

from neffbuild import __version__
from neffbuild.cli import options, output


@click.command(name="doctor")
@options.json_option
def command(as_json: bool) -> int:
    """What is installed, which toolchains can run here and why not."""
    from neffbuild.toolchain.registry import load_toolchain, toolchain_names

    found = {name: load_toolchain(name).findings() for name in toolchain_names()}
    document = {
        "schema": "neffbuild.doctor/1",
        "version": __version__,
        "ok": any(all(one.ok for one in findings) for findings in found.values()),
        "toolchains": [
            {
                "name": name,
                "ok": all(one.ok for one in findings),
                "findings": [
                    {"subject": one.subject, "ok": one.ok, "detail": one.detail, "hint": one.hint}
                    for one in findings
                ],
            }
            for name, findings in found.items()
        ],
    }
    if as_json:
        output.print_json(document)
        return 0
    click.echo(f"neffbuild {__version__}")
    for name, findings in found.items():
        click.echo(
            f"\ntoolchain {name}: {'ready' if all(one.ok for one in findings) else 'not ready'}"
        )
        for one in findings:
            click.echo(f"  {'ok ' if one.ok else 'no '} {one.subject}: {one.detail}")
            if one.hint and not one.ok:
                click.echo(f"      {one.hint}")
    return 0
