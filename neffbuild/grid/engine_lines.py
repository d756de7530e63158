"""The messages in the lines of an engine's log, and where each of them begins.

A server's log also holds what its clients said: a prompt may quote any line that an engine prints, or a whole
log. So words count only where a message begins, after what a logger, a collector of logs or the name of an
error puts before it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NamedTuple


class Message(NamedTuple):
    """One message. `process` tells processes apart, and `name` is what one is called (`EngineCore_DP0`); both
    are empty where the log does not say."""

    text: str
    process: str = ""
    name: str = ""


_ESCAPES = re.compile(r"\x1b\[[0-9;:?]*[ -/]*[@-~]")
_PROCESS = re.compile(r"\((([\w.:-]{1,60}) pid=[0-9]{1,10})\)")
_LEVEL = r"(?:TRACE|DEBUG|INFO|WARN(?:ING)?|ERROR|FATAL|CRITICAL)"
_PLACE = r"\[?[\w./<>-]{1,100}\.[a-z]{1,3}:[0-9]{1,7}\] "
# Where a second message begins: processes that share a pipe may lose the end of a line between them.
_NEXT = re.compile(
    r"\r|(?<!['\"`])(?=\([\w.:-]{1,60} pid=[0-9]{1,10}\))"
    rf"|(?<!['\"` ])(?={_LEVEL} [0-9]{{2}}-[0-9]{{2}} [0-9:]{{8}} {_PLACE})"
)
# What follows is a client's, or a model's answer to it.
_QUOTED = re.compile(r"\b(?:prompt|output): ?['\"]")

_LOGGER = rf"(?:(?!{_PLACE})[^'\"])*+{_PLACE}"
_COLLECTOR_PART = (
    r"(?>\s++|[|>-]++|:(?=\s)"
    r"|\([^()'\"]{1,100}\)|\[[^\[\]'\"]{1,200}\]"
    rf"|{_LEVEL}(?::[\w.]{{1,100}}:|:?(?=[\s|\[]|$))"
    r"|(?:[0-9][\w.:,/+-]{0,60}|stdout|stderr|[FP]"
    r"|Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)(?=[\s|]|$)"
    r"|[A-Za-z][\w.-]{0,60}(?:\[[0-9]{1,10}\]:| *\|)"
    r"|[A-Za-z]++[\w./@-]{1,200}+:?(?=[\s|]|$))"
)
_ERROR = (
    r"(?>[\s|+]++"
    r"|(?:\w{1,80}\.){0,8}\w{0,80}(?:Error|Exception|Failed)(?:\(\w{1,80}\))?: "
    rf"|{_LEVEL}: |VLLM_NEURON_\w{{1,80}}: |\[rank[0-9]{{1,6}}\]: "
    r"|Compilation failed - terminating process for cleanup: "
    r"|Worker failed with error ['\"])*+"
)
_BEFORE = re.compile(rf"(?:{_LOGGER}|{_COLLECTOR_PART}*+){_ERROR}")
_BEFORE_FIELDS = re.compile(rf"(?:(?!{_PLACE}){_COLLECTOR_PART})*+")
_LONGEST = 2000

_FIELD = re.compile(r'"([@\w.-]{1,60})"\s*:\s*"((?:[^"\\]|\\.)*+)')
_NUMBER = re.compile(r'"process": ?([0-9]{1,10})')
_LOGFMT = re.compile(r'(?:[\w.]{1,60}=(?:"[^"]{0,300}"|[^\s"]{0,300})\s+){0,40}+(?:msg|message)="')
_SAID = frozenset(
    (
        *("message", "msg", "log", "event", "body", "textpayload", "error", "err", "exception"),
        *("exc_info", "exc_text", "stack", "stack_trace", "stacktrace", "traceback"),
    )
)
"""Fields of a JSON line that a process says something in; others may hold a client's words."""


def messages_of(line: str) -> Iterator[Message]:
    """The messages in a line, which may be of several processes, coloured, prefixed, JSON or logfmt."""
    line = _ESCAPES.sub("", line)
    before = _BEFORE_FIELDS.match(line)
    start = before.end() if before else 0
    if line.startswith("{", start):
        number = _NUMBER.search(line, start)
        process = number[1] if number else ""
        for name, value in _FIELD.findall(line, start):
            if name.lower().removeprefix("@") in _SAID:
                for part in _unescaped(value).split("\n"):
                    for inner in messages_of(part):
                        yield inner if inner.process else inner._replace(process=process)
        return
    if logfmt := _LOGFMT.match(line, start):
        line = line[logfmt.end() :]
    if quoted := _QUOTED.search(line):
        line = line[: quoted.start()]
    for text in _NEXT.split(line):
        found = _PROCESS.search(text)
        yield Message(text, found[1], found[2]) if found else Message(text)


def at_start(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """What the pattern finds where the message in a text begins; None where it finds nothing there."""
    found = pattern.search(text)
    return found if found and _begins(text, found.start()) else None


def _begins(text: str, position: int) -> bool:
    return position <= _LONGEST and _BEFORE.fullmatch(text, 0, position) is not None


def _unescaped(value: str) -> str:
    try:
        return str(json.loads(f'"{value}"', strict=False))
    except ValueError:  # cut off, or no JSON after all
        return value
