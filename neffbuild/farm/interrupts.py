"""Ctrl-C, SIGTERM and a terminal that closes while a farm runs."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self


class Interrupts:
    """While entered: the first SIGINT sets `stopping`; a second one, SIGTERM or SIGHUP sets `cancelling`
    too. A signal that is ignored (`nohup`) stays ignored.

    Handlers can only be set in a program's main thread; elsewhere nothing is ever set and signals do
    what they did.
    """

    def __init__(self) -> None:
        self.stopping = False
        self.cancelling = False
        self._earlier: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._earlier[number] = signal.signal(number, self._interrupt)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)

    def _interrupt(self, number: int, _frame: FrameType | None) -> None:
        self.cancelling = self.cancelling or self.stopping or number != signal.SIGINT
        self.stopping = True
