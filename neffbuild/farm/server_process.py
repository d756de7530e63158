"""The farm's side of the server that its workers are forked from (`neffbuild.farm.server`)."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from neffbuild.farm.logfile import log_tail
from neffbuild.farm.server import LEAVE, UNIT

_CLOSE_SECONDS = 30.0
_START_SERVER = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from neffbuild.farm.server import main; main(int(sys.argv[1]), *sys.argv[3:])"
)
_TRACEBACK = "Traceback (most recent call last)"


class ServerProcess:
    """One server at a time, for `toolchain`, with `modules` imported beside its own. `environment` is
    what it and its workers see, `folder` the farm's own."""

    def __init__(
        self,
        toolchain: str,
        environment: Mapping[str, str],
        folder: Path,
        modules: Sequence[str],
    ) -> None:
        self._toolchain = toolchain
        self._modules = modules
        self._folder = folder
        self._environment = {**environment, "TMPDIR": str(folder)}
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self.started = 0
        """How many servers have been started; for its owner to set back."""

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def lives(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def refused(self) -> bool:
        """Whether the server found that it cannot work, rather than being killed."""
        if self._process is None or self._control is None:
            return False
        # Its end of the socket closes before it can be waited for.
        ended, _, _ = select.select([self._control], [], [], 0)
        return bool(ended) and self._process.wait(_CLOSE_SECONDS) > 0

    @property
    def last_words(self) -> str:
        """What the server said before it ended, if anything."""
        said = log_tail(self._log).strip()
        # What kept Python itself from starting ends in the exception, below its traceback.
        return said.splitlines()[-1] if _TRACEBACK in said else said

    def ensure(self) -> None:
        """Start a server where none lives. Raises `OSError` where this host lets none be started."""
        if self._control is not None and self.lives:
            return
        self.stop()
        self.started += 1
        self._control, theirs = socket.socketpair()
        # Workers import what this process would: a relative entry means this process's folder.
        path = json.dumps([entry or str(Path.cwd()) for entry in sys.path])
        farms = str(self._folder.parent)
        arguments = [str(theirs.fileno()), path, self._toolchain, farms, *self._modules]
        with theirs, self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-u", "-c", _START_SERVER, *arguments],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                # Out of the terminal's reach: Ctrl-C is for this process to decide about.
                start_new_session=True,
            )

    def hand_over(self, descriptor: int) -> None:
        """Have a supervisor forked that finds its unit at this end of a connection. Raises `OSError` where
        the server is gone."""
        if self._control is None:
            raise ConnectionError
        socket.send_fds(self._control, [UNIT], [descriptor])

    def stop(self) -> None:
        if self._control is not None:
            with contextlib.suppress(OSError):  # it is dead
                self._control.send(LEAVE)
            self._control.close()
        if self._process is not None:
            try:
                self._process.wait(_CLOSE_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._control = self._process = None

    @property
    def _log(self) -> Path:
        return self._folder / "server.log"
