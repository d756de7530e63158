"""`neffbuild keygen`: a key pair to sign tags with."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from neffbuild.cli import options, output


@click.command(name="keygen")
@click.option(
    "--out",
    "prefix",
    type=click.Path(path_type=Path, dir_okay=False),
    default="neffbuild",
    show_default=True,
    metavar="PREFIX",
    help="Write PREFIX.key (private) and PREFIX.pub (public).",
)
@click.option(
    "--algorithm",
    type=click.Choice(["ed25519", "ecdsa", "rsa"]),
    default="ed25519",
    show_default=True,
    help="ECDSA is on the curve P-256, RSA has 3072 bits.",
)
@options.json_option
def command(prefix: Path, algorithm: str, as_json: bool) -> int:
    """Make a key pair. Files that exist are never overwritten."""
    from neffbuild.cache.signing import generate_key, write_key_pair

    private, public = (prefix.with_name(prefix.name + ending) for ending in (".key", ".pub"))
    pair = generate_key(algorithm)
    write_key_pair(pair, private, public)
    if as_json:
        output.print_json(
            {
                "schema": "neffbuild.keygen/1",
                "private_key": str(private),
                "public_key": str(public),
                "keyid": pair.keyid,
                "algorithm": algorithm,
            }
        )
    else:
        output.write(f"private key {private} (for who signs, and nobody else)")
        output.write(f"public key  {public}")
        output.write(f"key id      {pair.keyid}")
        output.write(
            f"sign with:    {shlex.join(['neffbuild', 'push', 'CONFIG', '--key', str(private)])}"
        )
        output.write(f"believe with: cache.keys: [{public}] in the config of who pulls")
    return 0
