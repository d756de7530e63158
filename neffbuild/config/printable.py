"""Texts from elsewhere as lines that any file and any terminal takes."""

from __future__ import annotations


def printable(text: str) -> str:
    """One line that any file and any terminal takes: no bytes that are no text, no control sequences."""
    return shown(" ".join(text.split()))


def shown(line: str) -> str:
    """A line with its spaces, and escapes for what would move a terminal's cursor."""
    if line.isprintable():
        return line
    whole = line.expandtabs().encode("utf-8", "backslashreplace").decode()
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in whole)
