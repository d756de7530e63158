"""A module to preload that does what imports should not: it must not show in workers."""

import os
import tempfile

os.environ["LEFT_BY_AN_IMPORT"] = "yes"
tempfile.gettempdir()
