"""A store with every unit of the quickstart config, and fresh processes that measure themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs/quickstart.yaml"
_COMMAND = "import sys; from neffbuild.cli.main import main; sys.exit(main())"


@contextmanager
def warm_store(cache: Path | None) -> Iterator[Path]:
    """The cache directory, filled: `cache`, where what is there already is used, or one for this run."""
    with tempfile.TemporaryDirectory(prefix="neffbuild-bench-") as folder:
        place = cache or Path(folder)
        command = [sys.executable, "-c", _COMMAND, "compile", str(CONFIG), "--cache", str(place)]
        subprocess.run(command, check=True, stdout=sys.stderr)
        yield place


def measured_in_a_fresh_process(
    program: str, *arguments: str, environment: Mapping[str, str] | None = None
) -> Any:
    """The JSON document that a Python program prints last. `environment` replaces this process's."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ if environment is None else environment,
    )
    if done.returncode:
        raise SystemExit(f"a measured process ended with status {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])
