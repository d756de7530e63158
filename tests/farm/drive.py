"""A program that runs one farm, `drive.py FOLDER COUNT OPTIONS`: what the tests kill and interrupt.

It has no main guard on purpose: workers must not run their caller's main module again.
"""

import json
import sys
from pathlib import Path

import farmtools


def on_event(event: object) -> None:
    sys.stderr.write(f"{type(event).__name__}\n")


options = json.loads(sys.argv[3])
if "host" in options:
    options["host"] = farmtools.SmallHost(*options["host"])
result = farmtools.run(Path(sys.argv[1]), int(sys.argv[2]), on_event=on_event, **options)
sys.stdout.write(json.dumps(result.document()))
