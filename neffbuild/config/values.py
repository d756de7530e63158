"""Values as people write them: a number in quotes, `128k`, JSON inside a string.

Pure rules. `8` and `"8"` must lead to one key, and nothing else may be merged by accident.
"""

from __future__ import annotations

import re
from typing import Any

from neffbuild.config.documents import parse_json_text

MAX_INTEGER = 2**63 - 1
"""What engines and compilers hold a size in."""

_WHOLE = re.compile(r"[+-]?[0-9]{1,19}|[+-]?(?=[0-9_]{1,25}\Z)[0-9]+(?:_[0-9]+)+")
_SCALED = re.compile(r"([0-9]{1,19})(\.[0-9]{1,19})?([kKmMgGtT])")
_POWER = {"k": 1, "m": 2, "g": 3, "t": 4}


def whole_number(text: str) -> int | None:
    """The integer a text spells in decimal digits (`131072`, `131_072`), or None."""
    text = text.strip()
    return int(text) if _WHOLE.fullmatch(text) else None


def human_readable_integer(text: str) -> int | None:
    """As vLLM reads sizes: `128k` is 128,000, `128K` is 131,072, `25.6k` is 25,600; decimals go with
    the lower-case suffixes (k, m, g, t) alone. None for anything else."""
    match = _SCALED.fullmatch(text.strip())
    if match is None:
        return whole_number(text)
    whole, decimals, suffix = match.groups()
    power = _POWER[suffix.lower()]
    if suffix.isupper():
        return None if decimals else int(whole) * 1024**power
    return int(float(whole + (decimals or "")) * 1000**power)


def truth(text: str) -> bool | None:
    """`true` and `false` in any case, or None."""
    return {"true": True, "false": False}.get(text.strip().lower())


def scalar(text: str) -> Any:
    """The one spelling of a text whose type is not known: a number or boolean where the text is
    exactly how that value is written, else the text itself.

    "Exactly" keeps the merge harmless: `"8"` becomes 8, but `3.10`, `1e3` and `007` stay texts,
    because as numbers they could not be told from `3.1`, `1000.0` and 7.
    """
    boolean = truth(text)
    if boolean is not None:
        return boolean
    integer = whole_number(text)
    if integer is not None:
        return integer if str(integer) == text and abs(integer) <= MAX_INTEGER else text
    try:
        number = float(text)
    except ValueError:
        return text
    return number if repr(number) == text and text not in ("inf", "-inf", "nan") else text


def plain(value: Any) -> Any:
    """`value` with every scalar in its one spelling and JSON texts opened.

    Raises `ValueError` (one line, what is wrong) for what JSON cannot hold: another type, a key
    that is no text, a number that is not finite or has more than 63 bits.
    """
    if isinstance(value, dict):
        odd = next((key for key in value if not isinstance(key, str)), None)
        if odd is not None:
            raise ValueError(f"the key {odd!r} is not a text; write it in quotes")
        return {_whole_text(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, str):
        return plain_text(_whole_text(value))
    if isinstance(value, float):
        if value != value or value in (float("inf"), float("-inf")):
            raise ValueError(f"{value!r} is not a finite number")
        return value
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        if abs(value) > MAX_INTEGER:
            raise ValueError(f"a number of more than 63 bits (allowed: up to {MAX_INTEGER})")
        return value
    raise ValueError(f"a value of type {type(value).__name__}; allowed: what JSON can hold")


def _whole_text(text: str) -> str:
    """`text`, if UTF-8 can hold it: an argument of other bytes, and half a character, come as lone
    surrogates."""
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError(f"{text!r} is not UTF-8")
    return text


def plain_text(text: str) -> Any:
    """A text in its one spelling: opened when it is a JSON object or list, else `scalar`."""
    if text.lstrip()[:1] in ("{", "["):
        try:
            return plain(parse_json_text(text))
        except ValueError:
            return text
    return scalar(text)


_QUOTED = re.compile(r'("(?:[^"\\]|\\.)*")')
_SCALED_WORD = re.compile(r"\b[0-9]+(?:\.[0-9]+)?[kKmMgGtT]\b")


def json_option(text: str) -> Any:
    """The value of an option that takes JSON; like vLLM it may hold unquoted `80m` or `8K`.

    Raises `ValueError` saying what is malformed.
    """
    parts = _QUOTED.split(text)
    for index in range(0, len(parts), 2):  # even parts are outside quotes
        parts[index] = _SCALED_WORD.sub(_expanded, parts[index])
    return parse_json_text("".join(parts))


def _expanded(match: re.Match[str]) -> str:
    number = human_readable_integer(match.group())
    return match.group() if number is None else str(number)


def shown(value: Any) -> str:
    """A value for a message: as written, shortened."""
    try:
        text = repr(value)
    except ValueError:  # an integer with more digits than Python prints
        return f"an integer of {value.bit_length()} bits" if isinstance(value, int) else "a value"
    return text if len(text) <= 120 else text[:100] + " …" + text[-15:]
