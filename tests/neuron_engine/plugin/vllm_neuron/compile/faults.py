"""How a start misbehaves: a JSON object of the names below. Graphs are named `decode_b<rows>_w<columns>`
(columns of the block table) and `prefill_s<tokens>`; with speculation `decode_b<rows>_s<query>_w<columns>`,
`draft_b…` and `draft_prefill_s<tokens>` too."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any


class Faults:
    def __init__(self, path: Path | None, orders: dict[str, Any]) -> None:
        self._path = path
        self._orders = orders
        self.other_order = bool(orders.get("other_order"))
        self.extra = bool(orders.get("extra"))
        self.needs_checkpoint = bool(orders.get("needs_checkpoint"))
        self.no_drafts = bool(orders.get("no_drafts"))
        self.load_fails = bool(orders.get("load_fails"))
        self.more_drafts = int(orders.get("more_drafts", 0))

    @classmethod
    def read(cls, control: str | None) -> Faults:
        path = Path(control) if control else None
        return cls(path, json.loads(path.read_text()) if path and path.exists() else {})

    def journal(self, start: dict[str, Any]) -> None:
        """Keep what a start was told, a line each, beside the orders."""
        if self._path is not None:
            with self._path.with_name("starts.jsonl").open("a") as lines:
                lines.write(json.dumps(start) + "\n")

    def at_start(self) -> None:
        time.sleep(self._orders.get("seconds", 0))
        if self._orders.get("hangs"):
            time.sleep(600)
        if self._orders.get("lane_fails"):
            raise RuntimeError("Parallel trace fork failed (rank=1)")

    def at_trace(self, label: str, rank: int) -> None:
        if self._names("trace_fails", label):
            raise RuntimeError(
                "Model graph extraction failed for decode (batch=2, seq=1). Error: unsupported op"
            )

    def at_compile(self, label: str) -> None:
        if self._names("compiles_for_ever", label):
            time.sleep(600)
        if self._names("killed", label):
            os.kill(os.getpid(), signal.SIGKILL)

    def at_wait(self, label: str) -> str | None:
        if self._names("times_out", label):
            return "Shared compilation timeout after 600.0s in /x/neuron/compile_cache"
        return None

    def status(self, label: str) -> int:
        """With which status the compile of a graph fails, 0 where it does not; `once` of all starts."""
        if not self._names("fails", label):
            return 0
        if self._orders.get("once") and self._path is not None:
            mark = self._path.with_name("failed-once")
            if mark.exists():
                return 0
            mark.touch()
        return int(self._orders.get("status", 70))

    def writes_sentinel(self, label: str) -> bool:
        return not self._names("no_sentinel", label)

    def writes_texts(self, label: str) -> bool:
        return not (self._orders.get("no_texts") or self._names("no_shapes", label))

    def states_shapes(self, label: str) -> bool:
        return not self._names("no_shapes", label)

    def key(self, key: str, label: str, rank: int) -> str:
        """Ranks have one key, unless equal graphs are printed differently."""
        if rank and self._names("key_of_each_rank", label):
            return hashlib.md5(f"{key}{rank}".encode()).hexdigest()
        return key

    def _names(self, order: str, label: str) -> bool:
        return label in self._orders.get(order, [])
