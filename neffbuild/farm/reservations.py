"""What the farms of one host have reserved, so that together they do not take more than it has.

Each farm writes what its units hold into its own folder (`neffbuild.farm.scratch`), which dies with it:
a document whose farm holds no lock any more counts for nothing. Looking at the others' and writing the
own are one step, under a `flock` on the folder they share.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from neffbuild.farm.admission import Holding, Resources

_NAME = "reservations.json"
_WAIT_SECONDS = 1.0
_STALE_SECONDS = 5.0
"""A farm that waits says so at least this often; one that is stopped shall not hold up the others."""


@dataclass(frozen=True, slots=True)
class FarmClaims:
    """What one farm says of itself: the units it runs; or since when it has waited for room for its only
    one, on the host's monotonic clock. One that could start nothing whatever room it had, for want of the
    device, waits since `device_since` instead: to others' units that need none it is no matter."""

    holdings: tuple[Holding, ...] = ()
    starved_since: float | None = None
    device_since: float | None = None


class Reservations:
    """The claims of the farm whose folder is `folder`, beside those of the host's other farms."""

    def __init__(self, folder: Path) -> None:
        self._document = folder / _NAME
        self._root = folder.parent
        self._own = folder.with_suffix(".lock")

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[Sequence[FarmClaims] | None]:
        """The claims of the others, which cannot change until the block ends; None where another farm
        does not let go of the lock (it is stopped, or its disk hangs): ask again later."""
        descriptor = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            yield self.others() if _locked(descriptor) else None
        finally:
            os.close(descriptor)

    def others(self) -> list[FarmClaims]:
        """The claims of the other farms that are alive, whatever they do meanwhile."""
        claims = []
        for lock in self._root.glob("*.lock"):
            if lock != self._own and _is_held(lock):
                claims.append(_read(lock.with_suffix("") / _NAME))
        return claims

    def write(self, claims: FarmClaims) -> None:
        """State this farm's claims. A disk that is full costs the others' view of them, not the run."""
        temporary = self._document.with_suffix(".new")
        document = {
            "starved_since": claims.starved_since,
            "device_since": claims.device_since,
            "units": [_unit(holding) for holding in claims.holdings],
        }
        with contextlib.suppress(OSError):
            temporary.write_text(json.dumps(document))
            temporary.rename(self._document)


def _unit(holding: Holding) -> dict[str, Any]:
    unit = asdict(holding)
    # Farms of versions that know no devices, which may still run, would take nothing of the document.
    if not holding.needs.devices:
        del unit["needs"]["devices"]
    return unit


def _locked(descriptor: int) -> bool:
    give_up = time.monotonic() + _WAIT_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > give_up:
                return False
            time.sleep(0.002)
        else:
            return True


def _is_held(lock: Path) -> bool:
    try:
        descriptor = os.open(lock, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(descriptor)


def _read(path: Path) -> FarmClaims:
    """A farm that has not written anything yet holds nothing; nor, for all that can be told, does one of
    another version that writes something else."""
    try:
        age = time.time() - path.stat().st_mtime
        document: dict[str, Any] = json.loads(path.read_text())
        holdings = tuple(
            Holding(**{**unit, "needs": Resources(**unit["needs"])}) for unit in document["units"]
        )
        starved_since, device_since = document["starved_since"], document.get("device_since")
    except (OSError, ValueError, KeyError, TypeError):
        return FarmClaims()
    if age >= _STALE_SECONDS:
        return FarmClaims(holdings)
    return FarmClaims(holdings, starved_since, device_since)
