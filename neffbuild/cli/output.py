"""What commands print: results and JSON documents on stdout, errors and remarks on stderr."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Mapping
from typing import Any, Self, TextIO

from neffbuild.config.errors import NeffbuildError
from neffbuild.config.printable import shown

INTERRUPTED = 130
"""Exit status of a command that was interrupted, as of any program."""
INTERNAL = 70
"""Exit status of a bug, so that nobody takes it for a unit that failed."""


class Unwritten(NeffbuildError):
    """The result is there and cannot be written to standard output."""

    @classmethod
    def because(cls, error: OSError) -> Self:
        return cls(f"cannot write the result to standard output: {error.strerror}")


def write(text: str) -> None:
    """A command's result on stdout, control characters as escapes: what is printed may be of a file or
    a store that somebody else has written.

    A reader that went away (`neffbuild plan … | head`) has seen what it wanted: the command goes on
    and its exit status stands. Raises `Unwritten` when the text cannot be written for another reason
    (a full disk behind a redirection).
    """
    _write(_escaped(text))


def _write(text: str) -> None:
    try:
        _put(sys.stdout, text)
    except BrokenPipeError:
        _discard(sys.stdout)
    except OSError as error:
        _discard(sys.stdout)
        raise Unwritten.because(error) from error


def is_watched() -> bool:
    """Whether a person looks at stderr as it is written: no animation otherwise, nor where `CI` is set,
    nor where there is no thread to draw it."""
    if sys.stderr is None or not sys.stderr.isatty() or os.environ.get("CI"):
        return False
    try:
        threading.Thread(target=int).start()
    except RuntimeError:
        return False
    return True


def discard() -> None:
    """Drop what is left for stdout, which takes no more."""
    _discard(sys.stdout)


def remark(text: str) -> None:
    """Lines on stderr, control characters as escapes. What cannot be written there is lost and stops
    nothing."""
    try:
        _put(sys.stderr, _escaped(text))
    except OSError:
        _discard(sys.stderr)


def print_json(document: Mapping[str, Any]) -> None:
    """One JSON document on stdout."""
    _write(_escaped_json(json.dumps(document, indent=2, ensure_ascii=False)))


def print_json_line(document: Mapping[str, Any]) -> None:
    """One JSON document on one line of stdout."""
    _write(_escaped_json(json.dumps(document, ensure_ascii=False)))


def error_document(error: NeffbuildError) -> dict[str, Any]:
    """The `neffbuild.error/1` document."""
    return {
        "schema": "neffbuild.error/1",
        "error": {
            "kind": error.kind,
            "field": error.field,
            "value": _plain(error.value),
            "message": error.message,
            "hint": error.hint,
        },
    }


def error_text(error: NeffbuildError) -> str:
    """An error for a person: what failed, then what to do."""
    lines = [f"neffbuild: error: {error.message}"]
    if error.hint:
        lines.append(f"  hint: {error.hint}")
    return "\n".join(lines)


def _escaped(text: str) -> str:
    return "\n".join(shown(line) for line in text.split("\n"))


def _escaped_json(text: str) -> str:
    """The same document. JSON itself lets some control characters stand."""
    return "\n".join(
        line
        if line.isprintable()
        else "".join(one if one.isprintable() else json.dumps(one)[1:-1] for one in line)
        for line in text.split("\n")
    )


def _put(stream: TextIO | None, text: str) -> None:
    if stream is not None:  # closed by who started us: nobody listens
        stream.write(f"{text}\n")
        stream.flush()


def _discard(stream: TextIO) -> None:
    """Send the rest nowhere: the interpreter flushes what is left at exit and would complain again."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _plain(value: object) -> Any:
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError):
        return repr(value)
