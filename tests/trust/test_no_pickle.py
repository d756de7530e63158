"""Nothing that comes from a store is unpickled: reading it would be running it."""

from __future__ import annotations

import ast
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
from trust_samples import PROD, Place, Signing

import neffbuild
from neffbuild.cache.attestation import attestation_name
from neffbuild.cache.catalog import entry_name, read_entry
from neffbuild.cache.verify import verify_store
from neffbuild.config.errors import IntegrityError

PACKAGE = Path(neffbuild.__file__).parent
FORBIDDEN = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
CLUSTER_MESSAGES = {"farm/ray_executor.py", "farm/ray_node.py"}
"""What a driver and its own tasks say to one another goes over Ray, which pickles all of it: they do so
themselves to look at the other side's version before anything else. Nothing of it is ever kept."""
# torch's own: they unpickle, all or in part.
FORBIDDEN_CALLS = {"torch.load", "torch.save", "torch.jit.load", "torch.export.load"}


def names_in(tree: ast.Module) -> set[str]:
    """Modules imported anywhere in it, and dotted names called."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found |= {one.name.partition(".")[0] for one in names}
            case ast.ImportFrom(module=str(module)):
                found.add(module.partition(".")[0])
            case ast.Call(func=ast.Attribute() as called):
                found.add(ast.unparse(called))
    return found


def test_no_module_of_ours_knows_a_format_that_runs_code() -> None:
    modules = list(PACKAGE.rglob("*.py"))
    assert len(modules) > 100
    for path in modules:
        if path.relative_to(PACKAGE).as_posix() in CLUSTER_MESSAGES:
            continue
        found = names_in(ast.parse(path.read_text(encoding="utf-8")))
        assert not found & (FORBIDDEN | FORBIDDEN_CALLS), path


def test_the_search_finds_what_it_is_for() -> None:
    tree = ast.parse("def f():\n    import pickle.x\n    from dill import a\n    torch.load('x')")
    assert names_in(tree) >= {"pickle", "dill", "torch.load"}


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("/tmp/neffbuild-was-unpickled",))


@pytest.mark.parametrize("name", ["tag", "index", "manifest", "attestation", "entry", "blob"])
def test_a_pickle_in_any_place_is_refused_unread(place: Place, release: Signing, name: str) -> None:
    manifest = place.manifest()
    pushed = place.push(manifest, PROD, release)
    entry = next(iter(manifest.entries.values()))
    path = {
        "tag": place.path(PROD.document_name),
        "index": place.path(f"indexes/{pushed.index}.json"),
        "manifest": place.path(f"manifests/{pushed.manifest}.json"),
        "attestation": place.path(attestation_name(pushed.manifest)),
        "entry": place.path(entry_name(entry.key)),
        "blob": place.remote.blob_path(entry.files["model.so"].digest),
    }[name]
    path.write_bytes(pickle.dumps(Bomb()))
    unpickled: list[object] = []
    watching = True

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        if watching and event == "pickle.find_class":
            unpickled.append(arguments)

    sys.addaudithook(watch)
    try:
        if name == "entry":
            read_entry(place.remote, entry.key)
        else:
            with pytest.raises(IntegrityError):
                place.pull(PROD, release.trust)
        assert not verify_store(place.remote, release.trust).ok
        assert unpickled == []
        # The watch sees what it is for.
        pickle.loads(pickle.dumps(Path))
        assert len(unpickled) == 1
    finally:
        watching = False
    assert not Path("/tmp/neffbuild-was-unpickled").exists()
