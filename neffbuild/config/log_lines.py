"""A text of any size, read line by line: a log, which may hold bytes that are no text."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from neffbuild.config.errors import ConfigError

_LONGEST_LINE = 1 << 20


def read_lines(path: Path) -> Iterator[str]:
    """The lines of a file, or of standard input where the path is `-`, without their ends. Bytes that are
    not UTF-8 are replaced, and a line of more than a mebibyte is several.

    Raises `ConfigError`, naming the path and the reason, when the file cannot be read.
    """
    try:
        if str(path) == "-":
            yield from _lines(sys.stdin.buffer)
            return
        if path.is_dir():
            raise ConfigError(f"{path} is a directory, not a log", value=str(path))
        with path.open("rb") as file:
            yield from _lines(file)
    except FileNotFoundError:
        raise ConfigError(
            f"there is no file {path} (a log was expected)", value=str(path)
        ) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"cannot read {path}: {reason}", value=str(path)) from error


def _lines(file: BinaryIO) -> Iterator[str]:
    while line := file.readline(_LONGEST_LINE):
        yield line.decode("utf-8", "replace").rstrip("\r\n")
