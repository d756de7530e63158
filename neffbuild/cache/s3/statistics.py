"""What a store asked of S3 and what came of it: every error has a name here, none is lost."""

from __future__ import annotations

import threading
from collections import Counter


class S3Statistics:
    """Counters for one store, from all its threads.

    `requests` counts what went over the wire by operation, retries included; `retries` what was tried
    again, and `errors` what was given up on, both by the kind of fault (an S3 error code such as
    `SlowDown`, or the name of a transport fault); bytes are those of compressed bodies.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[str] = Counter()
        self._retries: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        self._sent = 0
        self._received = 0

    def count_request(self, operation: str) -> None:
        with self._lock:
            self._requests[operation] += 1

    def count_retry(self, kind: str) -> None:
        with self._lock:
            self._retries[kind] += 1

    def count_error(self, kind: str) -> None:
        with self._lock:
            self._errors[kind] += 1

    def count_sent(self, size: int) -> None:
        with self._lock:
            self._sent += size

    def count_received(self, size: int) -> None:
        with self._lock:
            self._received += size

    def document(self) -> dict[str, dict[str, int] | int]:
        """A snapshot, ready for JSON."""
        with self._lock:
            return {
                "requests": dict(self._requests),
                "retries": dict(self._retries),
                "errors": dict(self._errors),
                "bytes_sent": self._sent,
                "bytes_received": self._received,
            }
