"""`neffbuild.run/1` documents as files have them: whoever wrote them, wherever."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from neffbuild.config.documents import parse_json_text, read_text
from neffbuild.config.errors import ConfigError
from neffbuild.config.values import shown

_MAX_BYTES = 256 << 20
_MOST_SHARDS = 100_000
_LONGEST_NAME = 200
_Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
"""More than thirty years are no compile's; sums of these stay numbers."""
_Count = Annotated[int, Field(ge=0, le=2**63 - 1)]


class _Part(BaseModel):
    # What later versions add passes through.
    model_config = ConfigDict(extra="allow", strict=True)


class _Unit(_Part):
    bucket_name: str = Field(max_length=_LONGEST_NAME)
    family: str = Field(max_length=_LONGEST_NAME)
    key: str | None = Field(pattern=r"^[0-9a-f]{64}$")
    outcome: Literal["built", "cached", "failed", "cancelled", "skipped"]
    compile_seconds: _Seconds | None
    peak_memory_bytes: _Count | None
    artifact_bytes: _Count | None
    cause: str | None = None
    cause_kind: str | None = None


class _Remote(_Part):
    url: str
    mode: Literal["rw", "ro"]
    readable: bool
    hits: _Count
    published: _Count
    faults: _Count
    last_fault: str | None


class ShardOfRun(_Part):
    """Which part of a config's units a run was about."""

    index: int = Field(ge=1)
    count: int = Field(ge=1, le=_MOST_SHARDS)
    of_units: _Count

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


class Run(_Part):
    """A run, or several that were joined."""

    wall_seconds: _Seconds
    absent_units: _Count = 0
    units: list[_Unit]
    remotes: list[_Remote] = Field(default_factory=list)
    shard: ShardOfRun | None = None


@dataclass(frozen=True, slots=True)
class RunReport:
    """A `neffbuild.run/1` document and the file it was read from."""

    source: str
    run: Run


def read_report(path: Path) -> RunReport:
    """The report in a file, as `parse_report` says. Raises `ConfigError` for a file that cannot be read,
    too."""
    return parse_report(read_text(path, "a report", _MAX_BYTES), str(path))


def parse_report(text: str, source: str) -> RunReport:
    """The report that `--json` printed (or `--json-lines`: its last line) into the file `source`.

    Raises `ConfigError`, naming the file, for whatever is no `neffbuild.run/1` document.
    """
    lines = text.strip().splitlines()
    if not lines:
        raise ConfigError(
            f"{source} is empty",
            value=source,
            hint="the command that should have written it did not end; run it again",
        )
    try:
        events = len(lines) > 1 and lines[0].startswith("{") and lines[0].endswith("}")
        document = parse_json_text(lines[-1] if events else text)
        json.dumps(document, allow_nan=False)  # 1e400 parses, and can be written by nobody
    except ValueError as error:
        raise ConfigError(f"{source} is not valid JSON: {error}", value=source) from error
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema == "neffbuild.error/1":
        raise ConfigError(
            f"{source} reports no run but an error: {_message(document)}",
            value=source,
            hint="run that shard again, or leave its file out",
        )
    if schema != "neffbuild.run/1":
        raise ConfigError(
            f"{source} is no report: its schema is {schema!r}; allowed: 'neffbuild.run/1'",
            value=source,
            hint="give it what `neffbuild compile --json` or `neffbuild report --json` printed",
        )
    try:
        return RunReport(source, Run.model_validate(document))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        allowed = first["msg"].removeprefix("Input should be ")
        wrong = f"{where} is {shown(first['input'])}; allowed: {allowed}"
        raise ConfigError(
            f"{source} is a damaged report: "
            + (f"{where} is missing" if first["type"] == "missing" else wrong),
            field=where,
            value=source,
        ) from error


def _message(document: dict[str, Any]) -> str:
    error = document.get("error")
    return str(error.get("message")) if isinstance(error, dict) else "it does not say which"
