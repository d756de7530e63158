"""Print the graph digests of the grid as JSON: `python grid_digests.py`, last shape first."""

from __future__ import annotations

import json
import os
import sys

from step_samples import grid, quickstart, unit

import neffbuild
from neffbuild.toolchain.neuronx.stablehlo import capture

config = quickstart()
digests = {
    name: capture(unit(config, shape)).graph_digest
    for name, shape in reversed(grid(config).items())
}
said = {"package": neffbuild.__file__, "user": os.getuid(), "digests": digests}
json.dump(said, sys.stdout)
