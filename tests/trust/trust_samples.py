"""Keys, and a store with releases in it, for the tests of trust."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cache_samples import X86_V3, fill, make_manifest

from neffbuild.cache.catalog import write_index, write_manifest
from neffbuild.cache.directory import DirectoryStore
from neffbuild.cache.envelope import Envelope
from neffbuild.cache.index import Index
from neffbuild.cache.manifest import Manifest
from neffbuild.cache.signing import (
    SigningKey,
    generate_key,
    load_public_key,
    open_signing_key,
    signature_check,
    write_key_pair,
)
from neffbuild.cache.tag import TagRef, Trust
from neffbuild.cache.transfer import Pulled, Pushed, pull, push

PROD = TagRef("llama", "prod")
STAGING = TagRef("llama", "staging")


@dataclass(frozen=True)
class Signing:
    """A key pair in files, opened, and the trust of somebody who believes it alone."""

    private: Path
    public: Path
    key: SigningKey
    trust: Trust


def new_signing(folder: Path, algorithm: str = "ed25519") -> Signing:
    private, public = folder / "it.key", folder / "it.pub"
    write_key_pair(generate_key(algorithm), private, public)
    return Signing(private, public, open_signing_key(str(private)), trust_in(public))


def trust_in(*public: Path) -> Trust:
    keys = [load_public_key(str(path)) for path in public]
    return Trust(require_signature=True, check=signature_check(keys))


class Place:
    """A remote store, who builds for it and who pulls from it."""

    def __init__(self, root: Path, remote: DirectoryStore) -> None:
        self.root = root
        self.remote = remote
        self.builder = DirectoryStore(root / "builder")
        self._fresh = itertools.count()

    def manifest(
        self, units: int = 2, *, note: str = "", platform: Any = X86_V3, lacking: int = 0
    ) -> Manifest:
        """A manifest of units that the builder has; another note gives other units' keys."""
        entries = fill(self.builder, self.root / "scratch", units, note=note)
        return make_manifest(entries, platform=platform, lacking=lacking)

    def push(
        self,
        manifest: Manifest,
        ref: TagRef | None,
        signing: Signing | None = None,
        **options: Any,
    ) -> Pushed:
        trust = signing.trust if signing else Trust()
        sign = signing.key.sign if signing else None
        options = {"trust": trust, "sign": sign, **options}
        return push(self.builder, self.remote, manifest, ref, **options)

    def fresh(self) -> DirectoryStore:
        """The empty cache of a machine that has seen nothing."""
        return DirectoryStore(self.root / f"fresh{next(self._fresh)}")

    def pull(
        self, source: TagRef | str, trust: Trust, local: DirectoryStore | None = None
    ) -> Pulled:
        return pull(self.remote, local or self.fresh(), source, platform=X86_V3, trust=trust)

    def path(self, name: str) -> Path:
        """Where a document of the remote store lies."""
        return self.remote.root / "v1" / name

    def plant(self, manifest: Manifest) -> tuple[str, str]:
        """Write a manifest and an index of it, as whoever can write to the store can; digests."""
        digest = write_manifest(self.remote, manifest)
        return digest, write_index(self.remote, Index().with_manifest(manifest.platform, digest))


def swapped(manifest: Manifest) -> Manifest:
    """The manifest with the artifacts of its first two units exchanged: every digest in it names
    something whole, and the wrong program runs."""
    first, second, *_ = manifest.entries.values()
    entries = {
        **manifest.entries,
        first.key: replace(first, files=second.files),
        second.key: replace(second, files=first.files),
    }
    return replace(manifest, entries=entries)


def envelope_of(path: Path) -> Envelope:
    return Envelope.from_json(path.read_bytes())


def flipped(data: bytes, position: int, bit: int) -> bytes:
    changed = bytearray(data)
    changed[position % len(data)] ^= 1 << bit
    return bytes(changed)


def nothing_visible(local: DirectoryStore, folders: Sequence[str] = ()) -> bool:
    """Whether a refused pull has left nothing that a later command could take for good. That a signed
    sequence was seen is remembered all the same."""
    kinds = folders or ("entries/", "manifests/", "configs/")
    return not any(True for kind in kinds for _ in local.list(kind))
