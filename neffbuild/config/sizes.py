"""Sizes as people write them: `500MB`, `20GiB`, `1073741824`."""

from __future__ import annotations

import re

from neffbuild.config.errors import ConfigError

_UNITS: dict[str, int] = {
    "": 1,
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGTP", 1)},
    **{f"{letter}IB": 1024**power for power, letter in enumerate("KMGTP", 1)},
}
_SIZE = re.compile(r"([0-9]{1,18})(?:\.([0-9]{1,3}))? ?([A-Za-z]{0,3})")


def parse_size(text: str, *, field: str) -> int:
    """Bytes. Raises `ConfigError` naming `field`."""
    parts = _SIZE.fullmatch(text)
    unit = _UNITS.get(parts[3].upper()) if parts else None
    if parts is None or unit is None:
        raise ConfigError(
            f"{text!r} is not a size; allowed: a number and one of B, KB, MB, GB, TB, PB, KiB, MiB, GiB, "
            "TiB, PiB",
            field=field,
            value=text,
            hint="for fifty gigabytes write 50GB",
        )
    fraction = f"{parts[2] or ''}000"[:3]
    thousandths: int = (int(parts[1]) * 1000 + int(fraction)) * unit
    return thousandths // 1000
