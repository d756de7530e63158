"""What reading one config found: everything wrong with it, and what its author should hear about."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from neffbuild.config.errors import ConfigError
from neffbuild.config.values import shown


@dataclass(slots=True)
class Findings:
    """`source` names the file (or the command line) in every message."""

    source: str
    problems: list[ConfigError] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def refuse(self, path: str, value: Any, allowed: str, hint: str | None = None) -> None:
        """Record that the field at dotted `path` has a `value` that is not `allowed`."""
        self.problem(path, value, f"{path} is {shown(value)}; allowed: {allowed}", hint)

    def problem(self, path: str, value: Any, text: str, hint: str | None = None) -> None:
        self.problems.append(ConfigError(text, field=path, value=value, hint=hint))

    def note(self, text: str) -> None:
        self.notes.append(text)

    @contextmanager
    def stage(self) -> Iterator[None]:
        """Collect what is wrong in one stage of reading, then refuse: later stages build on it."""
        try:
            yield
        except ConfigError as error:
            self.problems.append(error)
        self._raise_problems()

    def _raise_problems(self) -> None:
        """Raise one `ConfigError` for all problems: field, value and hint are the first's, the
        message lists every one."""
        if not self.problems:
            return
        first, *others = self.problems
        lines = [f"{self.source}: {first.message}"]
        lines += [
            f"  also: {other.message}" + (f" ({other.hint})" if other.hint else "")
            for other in others
        ]
        raise ConfigError("\n".join(lines), field=first.field, value=first.value, hint=first.hint)


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """The valid name that `name` is most likely a slip of, or None."""
    matches = difflib.get_close_matches(name, sorted(valid), n=1, cutoff=0.75)
    return matches[0] if matches else None
