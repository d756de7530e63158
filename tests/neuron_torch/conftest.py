from __future__ import annotations

import sys
from pathlib import Path

_TESTS = Path(__file__).parents[1]
for folder in ("cli", "neuronx"):
    if str(_TESTS / folder) not in sys.path:
        sys.path.append(str(_TESTS / folder))
