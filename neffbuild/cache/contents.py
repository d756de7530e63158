"""What files hold, by those who know their kind. Digests say that a file is what was built, not that what
was built is any good: an artifact that another tool made, or a builder that did not look, may be half.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from neffbuild.cache.directory import DirectoryStore
from neffbuild.cache.problem import FileCheck, Problem, ProblemKind
from neffbuild.cache.store import Store
from neffbuild.cache.verify import Verified


def check_contents(store: Store, verified: Verified, checks: Mapping[str, FileCheck]) -> Verified:
    """`verified` and, of the entries that are sound by it, what `checks` (ending of a file's name → check)
    say of their files. Each file is asked about once, however many entries share it."""
    found: dict[str, str | None] = {}
    problems: list[Problem] = []
    for key, many in verified.files.items():
        if key in verified.broken:
            continue
        for name, record in (item for files in many for item in files.items()):
            check = next((one for ending, one in checks.items() if name.endswith(ending)), None)
            if check is None:
                continue
            if record.digest not in found:
                with _in_place(store, record.digest, record.size) as path:
                    found[record.digest] = check(path)
            if fault := found[record.digest]:
                problems.append(Problem(ProblemKind.BAD_ENTRY, key, f"{name}: {fault}"))
    return replace(
        verified,
        problems=(*verified.problems, *dict.fromkeys(problems)),
        unusable=frozenset(problem.key for problem in problems),
    )


@contextmanager
def _in_place(store: Store, digest: str, size: int) -> Iterator[Path]:
    if isinstance(store, DirectoryStore):
        yield store.blob_path(digest)
        return
    with tempfile.TemporaryDirectory(prefix="neffbuild-") as folder:
        path = Path(folder) / digest
        store.fetch_blob(digest, size, path)
        yield path
