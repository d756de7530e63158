"""Structured log lines on stderr: an event and its fields, as `key=value` text or as JSON."""

from __future__ import annotations

import json
import logging
import sys
import time


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        pairs = "".join(f" {name}={_quoted(value)}" for name, value in fields.items())
        lines = [f"{record.levelname.lower()}: {record.getMessage()}{pairs}"]
        if record.exc_info:
            lines.append(self.formatException(record.exc_info))
        return "\n".join(lines)


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(
            {
                "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created)),
                "level": record.levelname.lower(),
                "event": record.getMessage(),
                **getattr(record, "fields", {}),
                **({"traceback": self.formatException(record.exc_info)} if record.exc_info else {}),
            },
            default=str,
        )


def configure(level: str, style: str) -> None:
    """Send the `neffbuild` loggers to stderr. Fields travel as `extra={"fields": {...}}`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if style == "json" else _Text())
    logger = logging.getLogger("neffbuild")
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False


def _quoted(value: object) -> str:
    text = str(value)
    return json.dumps(text) if not text or any(c in text for c in ' "=\n\t') else text
