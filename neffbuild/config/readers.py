"""Readers of one value of a type the schema knows.

Each takes the value as given, the dotted path of its field, and the findings. A text that spells the
value is read, with a note; anything else is refused, and None returned.
"""

from __future__ import annotations

from typing import Any

from neffbuild.config import vllm_options
from neffbuild.config.findings import Findings
from neffbuild.config.values import (
    MAX_INTEGER,
    human_readable_integer,
    json_option,
    plain,
    shown,
    truth,
    whole_number,
)


def text(value: Any, path: str, findings: Findings) -> str | None:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)  # a folder named 7, read as a number
    findings.refuse(path, value, "a text")
    return None


def lower_text(value: Any, path: str, findings: Findings) -> str | None:
    read = text(value, path, findings)
    return None if read is None else read.lower()


def integer(value: Any, path: str, findings: Findings) -> int | None:
    number = value
    if isinstance(value, str):
        human = path.rpartition(".")[2] in vllm_options.HUMAN_READABLE
        number = human_readable_integer(value) if human else whole_number(value)
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= MAX_INTEGER:
        findings.refuse(path, value, "an integer of at least 1")
        return None
    if isinstance(value, str):
        findings.note(f"{path} {value!r} is read as {number}")
    return number


def length(value: Any, path: str, findings: Findings) -> int | None:
    if value in (-1, "-1") or (isinstance(value, str) and value.lower() == "auto"):
        findings.refuse(
            path,
            value,
            "an integer of at least 1",
            "the engine would fit it to its device's memory at start-up, which planning cannot know: "
            "pin the length it settles on",
        )
        return None
    return integer(value, path, findings)


def fraction(value: Any, path: str, findings: Findings) -> float | None:
    number = value
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            number = None
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number <= 1:
        findings.refuse(path, value, "a number above 0, up to 1")
        return None
    if isinstance(value, str):
        findings.note(f"{path} {value!r} is read as {number}")
    return float(number)


def boolean(value: Any, path: str, findings: Findings) -> bool | None:
    if isinstance(value, bool):
        return value
    read = truth(value) if isinstance(value, str) else None
    if read is None:
        findings.refuse(path, value, "true, false")
        return None
    findings.note(f"{path} {value!r} is read as {str(read).lower()}")
    return read


def mapping(value: Any, path: str, findings: Findings) -> dict[str, Any] | None:
    """A mapping, or the JSON text of one; what is in it still as given."""
    try:
        opened = json_option(value) if isinstance(value, str) else value
    except ValueError as error:
        findings.problem(path, value, f"{path} is {shown(value)}: {error}; allowed: a mapping")
        return None
    if not isinstance(opened, dict):
        findings.refuse(path, value, "a mapping, or the JSON text of one")
        return None
    for key in opened:
        if not isinstance(key, str):
            findings.problem(
                path, key, f"{path}: the key {key!r} is not a text", "write it in quotes"
            )
            return None
    return opened


def plain_mapping(value: Any, path: str, findings: Findings) -> dict[str, Any] | None:
    opened = mapping(value, path, findings)
    plain_object: dict[str, Any] | None = plain_value(opened, path, findings)
    return plain_object


def plain_value(value: Any, path: str, findings: Findings) -> Any:
    """`value` in its one spelling, or None with a problem."""
    try:
        return plain(value)
    except ValueError as error:
        findings.problem(path, value, f"{path} is {shown(value)}: {error}")
        return None
