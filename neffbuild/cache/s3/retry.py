"""How long to wait before a request is tried again, and when to stop."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

FIRST_CEILING = 0.1
HIGHEST_CEILING = 8.0


class Pauses:
    """The pauses between the attempts of one request.

    Full jitter: each is uniform between nothing and a ceiling that doubles, so that a fleet that was
    refused together does not come back together. `clock` gives seconds, `uniform` a random number
    between two others.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._clock = clock
        self._uniform = uniform
        self._first_failure: float | None = None
        self.taken = 0

    def next(self, patience: float) -> float | None:
        """Seconds to wait now that an attempt has failed, or None when it has been failing for
        `patience` seconds."""
        now = self._clock()
        if self._first_failure is None:
            self._first_failure = now
        left = self._first_failure + patience - now
        if left <= 0:
            return None
        ceiling = min(HIGHEST_CEILING, FIRST_CEILING * 2**self.taken)
        self.taken += 1
        # The last attempt is made when patience ends, not before.
        return min(left, self._uniform(0, ceiling))
