"""The events of a run as lines of JSON, for whoever follows a farm by machine."""

from __future__ import annotations

import time
from dataclasses import fields
from typing import Any

from neffbuild.cli import output
from neffbuild.farm.outcomes import Event, FarmStarted, UnitFinished, UnitMemory
from neffbuild.toolchain.base import Unit

SCHEMA = "neffbuild.event/1"


class EventLines:
    """Call it with each event: it is printed as a `neffbuild.event/1` document on a line. What happens
    several times a second is left out.

    A line that cannot be written costs no compile: what follows is dropped, and `unwritten` says why.
    """

    def __init__(self) -> None:
        self.unwritten: output.Unwritten | None = None

    def __call__(self, event: Event) -> None:
        if self.unwritten is not None or isinstance(event, UnitMemory):
            return
        try:
            output.print_json_line(event_document(event))
        except output.Unwritten as error:
            self.unwritten = error
            output.remark(f"{error.message}; the run goes on without it")


def event_document(event: Event) -> dict[str, Any]:
    """The `neffbuild.event/1` document of what happened just now.

    `event` names what happened (`unit_finished`); the other fields are those of the event, a unit as
    its `bucket_name` and `key`, a result as it stands in `neffbuild.run/1`.
    """
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "event": _snake_case(type(event).__name__),
        "time": round(time.time(), 3),
    }
    for field in fields(event):
        if isinstance(event, FarmStarted) and field.name == "expected_seconds":
            continue  # each unit's stands in its `unit_started`
        value = getattr(event, field.name)
        if isinstance(value, Unit):
            document |= {"bucket_name": value.bucket_name, "key": value.key}
        elif not isinstance(event, UnitFinished):
            document[field.name] = value
    if isinstance(event, UnitFinished):
        document["result"] = event.result.document()
    return document


def _snake_case(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)[1:]
