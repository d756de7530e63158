"""Durations as people write them: `90m`, `12h`, `30d`."""

from __future__ import annotations

import re
from datetime import timedelta

from neffbuild.config.errors import ConfigError

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_DURATION = re.compile(r"([0-9]{1,10})([smhdw])")
_LONGEST = timedelta(days=36500)


def parse_duration(text: str, *, field: str) -> timedelta:
    """A whole number of seconds, minutes, hours, days or weeks; at least a second, at most 100 years.

    Raises `ConfigError` naming `field`.
    """
    parts = _DURATION.fullmatch(text)
    if parts and not int(parts[1]):
        raise ConfigError(
            f"{text!r} is zero; allowed: a whole number and one of s, m, h, d, w, of at least 1s",
            field=field,
            value=text,
            hint="the shortest duration is 1s",
        )
    seconds = int(parts[1]) * _UNITS[parts[2]] if parts else 0
    if not 0 < seconds <= _LONGEST.total_seconds():
        raise ConfigError(
            f"{text!r} is not a duration; allowed: a whole number and one of s, m, h, d, w, "
            f"up to {_LONGEST.days}d",
            field=field,
            value=text,
            hint="for thirty days write 30d",
        )
    return timedelta(seconds=seconds)
