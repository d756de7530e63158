"""Starts vLLM up to the end of its warm-up, and ends. A program of its own: the first argument is a file
of vLLM's options as JSON.

It prints what vLLM prints. Its exit status is 0 where the engine came up.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path


def main(path: str) -> None:
    """Start vLLM with the options in the file `path`; its options for a server are left out."""
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs

    options = json.loads(Path(path).read_text(encoding="utf-8"))
    known = {field.name for field in dataclasses.fields(EngineArgs)}
    if unknown := sorted(options.keys() - known):
        sys.stdout.write(f"not options of vLLM's engine, left out: {', '.join(unknown)}\n")
        sys.stdout.flush()
    LLM(**{name: options[name] for name in options.keys() & known})


if __name__ == "__main__":
    main(sys.argv[1])
