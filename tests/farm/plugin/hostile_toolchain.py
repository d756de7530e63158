"""A toolchain as a third party would add one: found through the entry point, knows nothing of the farm.

It writes files instead of compiling, and misbehaves where the file `serve.control` of a unit's config
says so: `behaviour` maps bucket names to what `compile` does, `seconds` is how long each takes. What
it says can change between two runs, the keys do not. Without the option it behaves.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from neffbuild.cache.canonical import digest_bytes, digest_document
from neffbuild.cache.index import Fit
from neffbuild.cache.recipe import ToolchainIdentity
from neffbuild.config.build import BuildConfig
from neffbuild.config.errors import ToolchainRefusal
from neffbuild.grid.bucketer import QueryLenSupport
from neffbuild.grid.shapes import Shape
from neffbuild.toolchain.base import (
    Artifact,
    Capabilities,
    Captured,
    Executable,
    Expectation,
    Finding,
    KVGroup,
    Unit,
)


class HostileToolchain:
    """See above."""

    name = "hostile"
    capabilities = Capabilities(QueryLenSupport.VARLEN, frozenset(KVGroup))
    preload: tuple[str, ...] = ("leaves_traces",)

    def identity(self, config: BuildConfig) -> ToolchainIdentity:
        return ToolchainIdentity(
            name=self.name,
            route="native",
            target=config.toolchain.target or "any",
            engine="none",
            versions={"hostile": "1.0"},
            flags=config.toolchain.flags,
            source_digest=digest_bytes(b""),
            environment={"HOSTILE_KEYED": "yes"},
        )

    def refusal(self, config: BuildConfig, shape: Shape | None = None) -> str | None:
        return None

    def host_refusal(self, config: BuildConfig) -> str | None:
        return None

    def fit(self, platform: Mapping[str, Any]) -> Fit:
        """`$HOSTILE_RUNS`, where it is set, is the only target that runs here."""
        only = os.environ.get("HOSTILE_RUNS")
        return Fit(None if only in (None, platform["target"]) else f"this host runs {only}")

    def findings(self) -> list[Finding]:
        return []

    def capture(self, unit: Unit) -> Captured:
        return Captured(digest_document(unit.shape.document()), None)

    def compile(
        self, unit: Unit, captured: Captured, scratch: Path, *, shared: Path | None = None
    ) -> Artifact:
        orders: dict[str, Any] = {"seconds": 0, "behaviour": {}}
        control = (unit.config.serve.model_extra or {}).get("control")
        if control is not None:
            self._control = Path(control)
            with self._control.with_name("journal").open("a") as journal:
                journal.write(f"{unit.shape.bucket_name} {os.getpid()}\n")
            orders = json.loads(self._control.read_text())
        behaviour = orders["behaviour"].get(unit.shape.bucket_name)
        if behaviour is not None:
            sys.stdout.write(f"about to {behaviour}\n")
            getattr(self, f"_{behaviour}")(scratch)
        if behaviour == "no_file":
            return Artifact({})
        if orders["seconds"]:
            # As compilers do, in a program of their own.
            subprocess.run(["sleep", str(orders["seconds"])], check=True)
        program = scratch / "program.bin"
        program.write_bytes(unit.key.encode() * 64)
        notes = scratch / "notes.json"
        notes.write_text("{}")
        return Artifact({"program.bin": program, "notes.json": notes}, {"tool": "hostile"})

    def load(self, files: Path, recipe: Mapping[str, Any]) -> Executable:
        raise ToolchainRefusal("what this toolchain builds runs nowhere")

    def _raise(self, scratch: Path) -> None:
        raise ValueError("operand 3 has\nno layout")

    def _no_file(self, scratch: Path) -> None:
        pass

    def _exit_70(self, scratch: Path) -> None:
        os._exit(70)

    def _exit_0(self, scratch: Path) -> None:
        (scratch / "program.bin").write_bytes(b"half")
        os._exit(0)

    def _sys_exit_70(self, scratch: Path) -> None:
        sys.exit(70)

    def _compiler_exits_70(self, scratch: Path) -> None:
        subprocess.run(["sh", "-c", "echo 'error: NCC_EVRF007' >&2; exit 70"], check=True)

    def _compiler_is_killed(self, scratch: Path) -> None:
        subprocess.run(["sh", "-c", "kill -9 $$"], check=True)

    def _segfault(self, scratch: Path) -> None:
        ctypes.string_at(0)

    def _kill_itself(self, scratch: Path) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _kill_itself_once(self, scratch: Path) -> None:
        mark = self._control.with_name("killed")
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def _speak_no_utf8(self, scratch: Path) -> None:
        raise ValueError(b"caf\xe9.cc\x1b[2J: bad".decode(errors="surrogateescape"))

    def _dig_deep(self, scratch: Path) -> None:
        os.chdir(scratch)
        for _ in range(1100):
            os.mkdir("d")  # noqa: PTH102
            os.chdir("d")
        raise ValueError("deep enough")

    def _stop_its_supervisor(self, scratch: Path) -> None:
        os.kill(os.getppid(), signal.SIGSTOP)
        time.sleep(300)

    def _miss_a_compiler(self, scratch: Path) -> None:
        subprocess.run(["no-such-compiler"], check=True)

    def _fill_the_disk(self, scratch: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(scratch / "big"))

    def _eat_memory(self, scratch: Path) -> None:
        script = "import time; x = bytearray(300 << 20); time.sleep(60)"
        subprocess.run([sys.executable, "-c", script], check=True)

    def _hold_memory(self, scratch: Path) -> None:
        script = "import time; x = bytearray(60 << 20); time.sleep(0.6)"
        subprocess.run([sys.executable, "-c", script], check=True)

    def _kill_its_supervisor_once(self, scratch: Path) -> None:
        mark = self._control.with_name("killed")
        if not mark.exists():
            mark.touch()
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)

    def _hang(self, scratch: Path) -> None:
        """With a child, a grandchild, and one that has left the session and lost its parent."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        escape = "setsid sh -c 'trap \"\" TERM; sleep 300 & sleep 300' &"
        subprocess.Popen(["sh", "-c", f"{escape} sleep 300 & exec sleep 300"])
        time.sleep(300)

    def _leave_a_daemon(self, scratch: Path) -> None:
        subprocess.Popen(["setsid", "sleep", "300"])
        threading.Thread(target=time.sleep, args=(300,)).start()

    def _wait_for_a_daemon(self, scratch: Path) -> None:
        """As compilers with a resident helper do; this one has lost its parent when it answers."""
        answer = scratch / "answer"
        subprocess.run(["sh", "-c", f"setsid sh -c 'sleep 1.5; touch {answer}' &"], check=True)
        deadline = time.monotonic() + 10
        while not answer.exists():
            if time.monotonic() > deadline:
                raise ValueError("no answer from the daemon")
            time.sleep(0.05)

    def _flood(self, scratch: Path) -> None:
        subprocess.run(["sh", "-c", "echo first; yes | head -c 200000000; echo last"], check=True)
        raise ValueError("after the flood")

    def _delete_its_folder(self, scratch: Path) -> None:
        shutil.rmtree(Path.cwd())

    def _show_environment(self, scratch: Path) -> None:
        for name, value in sorted(os.environ.items()):
            sys.stdout.write(f"{name}={value}\n")
        score = Path("/proc/self/oom_score_adj").read_text().strip()
        sys.stdout.write(f"OOM_SCORE_ADJ={score}\n")
        sys.stdout.write(f"GETTEMPDIR={tempfile.gettempdir()}\n")
        raise ValueError("shown")


class ModestToolchain(HostileToolchain):
    """Says what its compiles take."""

    name = "modest"

    def prior(self, config: BuildConfig, shape: Shape) -> Expectation:
        return Expectation(seconds=1.0, memory_bytes=80 << 20, scratch_bytes=1 << 20)


class DeadlyToolchain(HostileToolchain):
    """Preloads a module that ends the server workers are forked from."""

    name = "deadly"
    preload = ("kills_its_process",)


class ThreadedToolchain(HostileToolchain):
    """Preloads a module that starts a thread, beside which a worker must not be forked."""

    name = "threaded"
    preload = ("starts_a_thread",)
