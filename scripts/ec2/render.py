"""Fill the `${NAME}`s of a file in this folder: `render.py FILE NAME=VALUE…` prints the result.

Every name has to be given and every one given has to occur. Values are taken only if they mean themselves
in JSON, YAML and IAM policies, where `*` or `?` in a bucket's name would open other buckets.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from string import Template

_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+=,-]*")
_URL = re.compile(r"[a-z0-9]+://[A-Za-z0-9._:/@+=,?&%-]+")


class Unfit(Exception):
    """A name or value that does not fit the file."""


def render(path: Path, values: Mapping[str, str]) -> str:
    """The text of a file with its names filled in. Raises `Unfit`, saying which."""
    template = Template(path.read_text(encoding="utf-8"))
    names = set(template.get_identifiers())
    if missing := sorted(names - values.keys()):
        raise Unfit(f"{path.name} needs {', '.join(f'{name}=…' for name in missing)}")
    if unknown := sorted(values.keys() - names):
        known = ", ".join(sorted(names))
        raise Unfit(f"{path.name} has no {', '.join(unknown)}; it has {known}")
    for name, value in values.items():
        if not (_PLAIN.fullmatch(value) or _URL.fullmatch(value)):
            raise Unfit(
                f"{name}={value!r}: allowed: letters, digits and . _ : / @ + = , - (URLs too)"
            )
    return template.substitute(values)


def main(words: list[str]) -> int:
    if not words:
        sys.stderr.write(f"{__doc__}\n")
        return 2
    try:
        values = dict(word.split("=", 1) for word in words[1:])
        sys.stdout.write(render(Path(words[0]), values))
    except ValueError:
        sys.stderr.write("render.py: error: give values as NAME=VALUE\n")
    except (Unfit, OSError) as error:
        sys.stderr.write(f"render.py: error: {error}\n")
    else:
        return 0
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
