"""Where the locks of commands lie: never below a store, which may be on a network file system."""

from __future__ import annotations

import contextlib
from pathlib import Path

from cli_samples import Project, order


def locked_files() -> set[Path]:
    """What any process has a lock on, as far as it can be told.

    A descriptor may be closed, and its number given to another file, while it is looked at: one whose
    name was the same before and after is meant.
    """
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        for descriptor in _descriptors(process):
            with contextlib.suppress(OSError):
                name = descriptor.readlink()
                stated = (process / "fdinfo" / descriptor.name).read_text(encoding="utf-8")
                if "lock:" in stated and descriptor.readlink() == name:
                    found.add(name)
    return found


def _descriptors(process: Path) -> list[Path]:
    try:
        return list((process / "fd").iterdir())
    except OSError:
        return []


def test_no_lock_of_a_compile_lies_below_a_store(project: Project) -> None:
    run, remote = project.root / "run", project.root / "remote"
    run.mkdir(mode=0o700)
    project.environment["XDG_RUNTIME_DIR"] = str(run)
    config = project.write(control=order(project.root, seconds=0.2))
    seen: set[Path] = set()
    with project.start("compile", config, "--remote", "remote", "--workers", "2") as process:
        while process.poll() is None:
            seen |= locked_files()
        assert process.returncode == 0
    assert list(remote.rglob("*.json"))
    assert any(path.is_relative_to(run) for path in seen)
    below = [path for path in seen if path.is_relative_to(project.cache)]
    below += [path for path in seen if path.is_relative_to(remote)]
    assert below == []
