"""Check the documentation: links lead somewhere, schemas are schemas, named commands exist."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jsonschema

ROOT = Path(__file__).resolve().parent.parent
_LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)")
_COMMAND = re.compile(r"\bneffbuild ([a-z][a-z-]+)\b")
_CODE = re.compile(r"```.*?```|`[^`]+`", re.DOTALL)


def main() -> int:
    problems = [*_broken_links(), *_broken_schemas(), *_unknown_commands()]
    for problem in problems:
        print(problem, file=sys.stderr)  # noqa: T201
    return 1 if problems else 0


def _pages() -> list[Path]:
    tracked = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return [ROOT / name for name in tracked.stdout.split()]


def _broken_links() -> Iterator[str]:
    for page in _pages():
        for target in _LINK.findall(page.read_text()):
            if not (page.parent / target).exists():
                yield f"{page.relative_to(ROOT)}: link to {target}, which does not exist"


def _broken_schemas() -> Iterator[str]:
    for path in sorted((ROOT / "docs" / "schemas").glob("*.json")):
        try:
            jsonschema.Draft202012Validator.check_schema(json.loads(path.read_text()))
        except (ValueError, jsonschema.SchemaError) as error:
            yield f"{path.relative_to(ROOT)}: {error}"


def _unknown_commands() -> Iterator[str]:
    shown = subprocess.run(
        [sys.executable, "-m", "neffbuild.cli.main", "--help"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    known = set(re.findall(r"^  ([a-z][a-z-]+)  ", shown, re.MULTILINE))
    for page in _pages():
        for code in _CODE.findall(page.read_text()):
            for command in _COMMAND.findall(code):
                if command not in known:
                    yield f"{page.relative_to(ROOT)}: `neffbuild {command}` is not a command"


if __name__ == "__main__":
    sys.exit(main())
