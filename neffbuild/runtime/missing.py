"""The one error of strict mode: which unit is missing, its key, and the command that builds it."""

from __future__ import annotations

import shlex
from pathlib import Path

from neffbuild.config.errors import MissingUnit

UNNAMED_CONFIG = "CONFIG"


def missing_unit(
    bucket_name: str, key: str | None, where: str, config: str = UNNAMED_CONFIG
) -> MissingUnit:
    """The error for a unit that `where` does not have.

    `config` is the serve config's file as a user would name it; the key is None for a unit that no
    manifest gives one.
    """
    keyed = f"key {key}" if key else "no manifest has a key for it"
    return MissingUnit(
        f"unit {bucket_name} ({keyed}) is not in {where}; build it with "
        f"`{compile_command(config, bucket_name)}`",
        field="unit",
        value=bucket_name,
        hint="or pull a tag that has it",
    )


def compile_command(config: str, bucket_name: str) -> str:
    """The command line that builds one unit."""
    file = shlex.quote(config) if Path(config).is_file() else UNNAMED_CONFIG
    return f"neffbuild compile {file} --only {shlex.quote(bucket_name)}"
