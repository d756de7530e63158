"""`neffbuild inspect`: what a compiled file says of itself, and whether it is whole."""

from __future__ import annotations

from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from neffbuild.cli import options, output
from neffbuild.config.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from neffbuild.toolchain.neuronx.neff import Neff

_SHOWN_MEMBERS = 40
_MOST_FACTS = 32
_LONGEST_FACT = 200


@click.command(name="inspect")
@click.argument("file", type=click.Path(path_type=Path), metavar="FILE")
@options.json_option
def command(file: Path, as_json: bool) -> int:
    """What a NEFF holds: its header, whether its payload is whole, its members and `info.json`.

    Nothing is unpacked. A file that is no whole NEFF is refused with exit status 4, naming what is wrong
    and where.
    """
    from neffbuild.toolchain.neuronx.neff import NeffError, read_neff_file

    if not file.is_file():
        raise ConfigError(
            f"there is no file {file}" if not file.exists() else f"{file} is no file",
            field="FILE",
            value=str(file),
        )
    try:
        neff = read_neff_file(file)
    except NeffError as error:
        raise NeffError(
            f"{file} is no whole NEFF: {error.message}",
            field=error.field,
            value=error.value,
            hint=error.hint,
            offset=error.offset,
        ) from error
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read: {error.strerror}", field="FILE", value=str(file)
        ) from error
    document = _document(file, neff)
    if as_json:
        output.print_json(document)
    else:
        output.write("\n".join(_lines(document)))
    return 0


def _document(file: Path, neff: Neff) -> dict[str, Any]:
    """The `neffbuild.inspect/1` document."""
    header = neff.header
    return {
        "schema": "neffbuild.inspect/1",
        "file": str(file),
        "kind": "neff",
        "ok": True,
        "header": {**header.document(), "name": header.name, "uuid": header.uuid},
        "payload_bytes": neff.payload_bytes,
        "members": [{"name": one.name, "size": one.size} for one in neff.members],
        "info": None if neff.info is None else _facts(neff.info),
    }


def _facts(info: Mapping[str, Any]) -> dict[str, Any]:
    """What is short in `info.json`; of what is not, how long it is."""
    return {
        _cut(name): value
        if isinstance(value, bool | int)
        or value is None
        or (isinstance(value, float) and isfinite(value))
        else _brief(value)
        for name, value in list(info.items())[:_MOST_FACTS]
    }


def _brief(value: object) -> str:
    if isinstance(value, str):
        return _cut(value)
    if isinstance(value, list | dict):
        return f"({len(value)} items)"
    return _cut(repr(value))


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_FACT else f"{text[: _LONGEST_FACT - 1]}…"


def _lines(document: Mapping[str, Any]) -> Iterator[str]:
    from neffbuild.config.printable import printable
    from neffbuild.report.text import counted, size

    header, members = document["header"], document["members"]
    digest = "MD5" if header["pkg_version"] == 2 else "SHA-256"
    yield f"{document['file']}: a whole NEFF"
    yield f"  format        {header['neff_version']}, package version {header['pkg_version']}"
    yield f"  compiler      {header['build_version'] or '(not stated)'}"
    yield f"  name          {header['name'] or '(not stated)'}"
    yield f"  uuid          {header['uuid']}"
    yield f"  LNC           {header['lnc_size']}"
    yield f"  feature bits  {header['feature_bits']:#x}"
    yield f"  payload       {size(header['data_size'])}, {digest} {header['digest']}: as the header says"
    for name, value in (document["info"] or {}).items():
        yield f"  info.json     {printable(f'{name}: {value}')}"
    yield f"  {counted(len(members), 'member')}, {size(document['payload_bytes'])} unpacked"
    for member in members[:_SHOWN_MEMBERS]:
        yield f"    {printable(member['name'])}  {size(member['size'])}"
    if len(members) > _SHOWN_MEMBERS:
        yield f"    … and {len(members) - _SHOWN_MEMBERS} more (--json lists them)"
