"""What commands print: JSON documents and errors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import click

from neffbuild.config.errors import NeffbuildError


def print_json(document: Mapping[str, Any]) -> None:
    """One JSON document on stdout."""
    click.echo(json.dumps(document, indent=2, ensure_ascii=False))


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


def _plain(value: object) -> Any:
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError):
        return repr(value)
