"""What `command.txt` says: the command line that neuronx-cc was started with."""

from __future__ import annotations

import shlex
from itertools import pairwise

from neffbuild.cache.layouts.layout import safe_word


def compile_target(data: bytes) -> str | None:
    """The value of `--target` (`trn2`); the last one counts, as for neuronx-cc. None where there is none."""
    text = data.decode(errors="replace")
    try:
        words = shlex.split(text)
    except ValueError:  # a quote that is not closed
        words = text.split()
    target = None
    for word, following in pairwise((*words, "")):
        if word == "--target":
            target = safe_word(following, 32)
        elif word.startswith("--target="):
            target = safe_word(word.removeprefix("--target="), 32)
    return target
