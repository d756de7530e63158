"""Whoever can write to a store cannot make anybody load what its signer did not sign.

Every byte of everything a release consists of is changed, in turn; so is what it means. Each time the
command fails with exit status 4 and nothing of it is visible in the local cache, let alone loaded.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from cache_samples import ANYONE
from hypothesis import given, settings
from hypothesis import strategies as st
from trust_samples import (
    PROD,
    STAGING,
    Place,
    Signing,
    envelope_of,
    flipped,
    nothing_visible,
    swapped,
)

from neffbuild.cache.attestation import attestation_name, attestation_problem
from neffbuild.cache.catalog import Broken, entry_name, read_entry, read_manifest
from neffbuild.cache.directory import DirectoryStore
from neffbuild.cache.loaded import materialise
from neffbuild.cache.manifest import Manifest
from neffbuild.cache.problem import ProblemKind
from neffbuild.cache.tag import TagStatement, Trust, tag_problem
from neffbuild.cache.transfer import Pushed
from neffbuild.cache.verify import verify_store, verify_tag
from neffbuild.config.errors import IntegrityError

NOW = datetime.now(UTC)
FLIPS = given(position=st.integers(0, 1 << 20), bit=st.integers(0, 7))


class Signed:
    """A signed release of two units, to damage and put right again."""

    def __init__(self, place: Place, signing: Signing) -> None:
        self.place = place
        self.trust = signing.trust
        self.manifest: Manifest = place.manifest()
        self.pushed: Pushed = place.push(self.manifest, PROD, signing)
        entry = min(self.manifest.entries.values(), key=lambda one: one.key)
        self.entry = entry
        self.files = {
            "tag": place.path(PROD.document_name),
            "index": place.path(f"indexes/{self.pushed.index}.json"),
            "manifest": place.path(f"manifests/{self.pushed.manifest}.json"),
            "attestation": place.path(attestation_name(self.pushed.manifest)),
            "blob": place.remote.blob_path(entry.files["model.so"].digest),
            "entry": place.path(entry_name(entry.key)),
        }
        self.whole = {name: path.read_bytes() for name, path in self.files.items()}

    def write(self, name: str, data: bytes) -> None:
        self.files[name].write_bytes(data)

    def put_right(self) -> None:
        for name, data in self.whole.items():
            self.write(name, data)

    def refused(self, trust: Trust | None = None) -> IntegrityError:
        """The error of a pull, after which nothing of it is visible, and which `verify` sees too."""
        local = self.place.fresh()
        with pytest.raises(IntegrityError) as caught:
            self.place.pull(PROD, trust or self.trust, local)
        assert caught.value.exit_status == 4
        assert nothing_visible(local)
        return caught.value


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory, release: Signing) -> Signed:
    root = tmp_path_factory.mktemp("signed")
    return Signed(Place(root, DirectoryStore(root / "remote")), release)


@pytest.fixture(autouse=True)
def _put_right(signed: Signed) -> None:
    signed.put_right()


def test_what_was_signed_is_accepted(signed: Signed) -> None:
    pulled = signed.place.pull(PROD, signed.trust)
    assert pulled.manifest == signed.manifest
    assert verify_store(signed.place.remote, signed.trust).ok
    assert verify_tag(signed.place.remote, PROD, signed.trust).ok


class TestFlippedBytes:
    def test_every_bit_of_a_tag(self, signed: Signed) -> None:
        """Payload, signature, key id, and what holds them together."""
        data = signed.whole["tag"]
        for position, bit in product(range(len(data)), range(8)):
            changed = flipped(data, position, bit)
            problem = tag_problem(PROD, changed, signed.trust, last_seen=0, now=NOW)
            assert problem is not None, (position, bit)
            assert problem.kind in (ProblemKind.BAD_SIGNATURE, ProblemKind.BAD_ENTRY)

    def test_every_byte_of_provenance(self, signed: Signed) -> None:
        data = signed.whole["attestation"]
        for position in range(len(data)):
            changed = flipped(data, position, random.randrange(8))
            problem = attestation_problem(
                signed.pushed.manifest, signed.manifest, changed, signed.trust
            )
            assert problem is not None, position
            assert problem.kind in (ProblemKind.BAD_SIGNATURE, ProblemKind.BAD_ENTRY)

    @pytest.mark.parametrize("name", ["tag", "index", "manifest", "attestation", "blob"])
    def test_of_what_a_pull_reads(self, signed: Signed, name: str) -> None:
        @FLIPS
        @settings(max_examples=25, deadline=None)
        def check(position: int, bit: int) -> None:
            signed.write(name, flipped(signed.whole[name], position, bit))
            signed.refused()

        check()

    @pytest.mark.parametrize("name", ["tag", "index", "manifest", "attestation", "blob", "entry"])
    def test_are_found_by_verify(self, signed: Signed, name: str) -> None:
        @FLIPS
        @settings(max_examples=25, deadline=None)
        def check(position: int, bit: int) -> None:
            signed.write(name, flipped(signed.whole[name], position, bit))
            found = verify_store(signed.place.remote, signed.trust)
            # What a changed tag names may not even be there: that is said beside it.
            assert {one.kind for one in found.problems} & {
                ProblemKind.BAD_SIGNATURE,
                ProblemKind.BAD_DIGEST,
                ProblemKind.BAD_ENTRY,
            }

        check()

    def test_of_a_local_cache_after_the_pull(self, signed: Signed) -> None:
        """Digests are checked before a file is loaded, wherever it came from and whenever."""
        local = signed.place.fresh()
        signed.place.pull(PROD, signed.trust, local)
        entry, digest = signed.entry, signed.pushed.manifest
        paths = {
            name: local.root / path.relative_to(signed.place.remote.root)
            for name, path in signed.files.items()
            if name in ("entry", "manifest", "blob")
        }

        @FLIPS
        @settings(max_examples=25, deadline=None)
        def check(position: int, bit: int) -> None:
            # As the next process finds it: this one remembers what it has read.
            store = DirectoryStore(local.root)
            for name, path in paths.items():
                path.unlink(missing_ok=True)  # it was quarantined when it was met
                whole = signed.whole[name]
                path.write_bytes(whole if name == "blob" else flipped(whole, position, bit))
            found = read_entry(store, entry.key)
            assert isinstance(found, Broken)
            assert found.kind is ProblemKind.BAD_ENTRY
            with pytest.raises(IntegrityError):
                read_manifest(store, digest)
            paths["blob"].write_bytes(flipped(signed.whole["blob"], position, bit))
            with pytest.raises(IntegrityError):
                materialise(store, entry)

        check()


class TestSwappedMapping:
    """A manifest in which two units have exchanged their artifacts: every digest is right."""

    @pytest.fixture
    def planted(self, signed: Signed) -> tuple[str, str]:
        return signed.place.plant(swapped(signed.manifest))

    def statement(self, signed: Signed, index: str) -> TagStatement:
        present = TagStatement.from_envelope(envelope_of(signed.files["tag"]))
        return replace(present, index=index, sequence=present.sequence + 1)

    def test_is_what_an_unsigned_store_cannot_see(
        self, signed: Signed, planted: tuple[str, str]
    ) -> None:
        """So that the others fail for the signature's sake."""
        envelope = envelope_of(signed.files["tag"])
        statement = self.statement(signed, planted[1])
        unsigned = replace(envelope, payload=statement.payload(), signatures=())
        signed.write("tag", unsigned.to_json())
        pulled = signed.place.pull(PROD, ANYONE)
        first, second = pulled.manifest.entries.values()
        assert pulled.manifest.entries != signed.manifest.entries
        assert first.files == signed.manifest.entries[second.key].files

    def test_under_no_signature(self, signed: Signed, planted: tuple[str, str]) -> None:
        envelope = envelope_of(signed.files["tag"])
        statement = self.statement(signed, planted[1])
        unsigned = replace(envelope, payload=statement.payload(), signatures=())
        signed.write("tag", unsigned.to_json())
        message = signed.refused().message
        assert "tag llama:prod" in message
        assert "is not signed" in message

    def test_under_the_old_signature(self, signed: Signed, planted: tuple[str, str]) -> None:
        envelope = envelope_of(signed.files["tag"])
        statement = self.statement(signed, planted[1])
        signed.write("tag", replace(envelope, payload=statement.payload()).to_json())
        message = signed.refused().message
        assert "tag llama:prod" in message
        assert "was changed" in message

    def test_under_somebody_elses_signature(
        self, signed: Signed, planted: tuple[str, str], stranger: Signing
    ) -> None:
        envelope = envelope_of(signed.files["tag"])
        forged = replace(envelope, payload=self.statement(signed, planted[1]).payload())
        forged = forged.with_signatures(stranger.key.sign(forged.signed_bytes))
        signed.write("tag", forged.to_json())
        message = signed.refused().message
        assert stranger.key.keyid in message
        assert "trusted are" in message
        # A key id is a hint that anybody can write.
        [signature] = forged.signatures
        liar = [replace(signature, keyid=envelope.signatures[0].keyid)]
        signed.write("tag", forged.with_signatures(liar).to_json())
        assert "was changed" in signed.refused().message

    @pytest.mark.parametrize("name", ["index", "manifest"])
    def test_under_the_old_digest(
        self, signed: Signed, planted: tuple[str, str], name: str
    ) -> None:
        digest, index = planted
        other = {"index": f"indexes/{index}.json", "manifest": f"manifests/{digest}.json"}[name]
        signed.write(name, signed.place.path(other).read_bytes())
        assert "does not have the digest" in signed.refused(ANYONE).message

    @pytest.mark.parametrize("which", [0, 1], ids=["manifest", "index"])
    def test_by_its_own_digest(self, signed: Signed, planted: tuple[str, str], which: int) -> None:
        """A digest has no tag to be signed; the provenance of the manifest is."""
        local = signed.place.fresh()
        with pytest.raises(IntegrityError, match="provenance is not signed"):
            signed.place.pull(planted[which], signed.trust, local)
        assert nothing_visible(local)
        assert signed.place.pull(planted[which], ANYONE).manifest != signed.manifest

    def test_with_the_provenance_of_the_real_one(
        self, signed: Signed, planted: tuple[str, str]
    ) -> None:
        digest = planted[0]
        signed.place.path(attestation_name(digest)).write_bytes(signed.whole["attestation"])
        with pytest.raises(IntegrityError, match="that of other artifacts"):
            signed.place.pull(digest, signed.trust)
        signed.place.path(attestation_name(digest)).unlink()


class TestSwappedDocuments:
    def test_a_signed_tag_under_another_name(self, signed: Signed) -> None:
        path = signed.place.path(STAGING.document_name)
        path.write_bytes(signed.whole["tag"])
        with pytest.raises(IntegrityError, match="answered with the tag llama:prod"):
            signed.place.pull(STAGING, signed.trust)
        path.unlink()

    def test_provenance_in_the_place_of_a_tag_and_the_other_way_round(self, signed: Signed) -> None:
        """Both are signed by the believed key: what is signed includes what it is."""
        signed.write("tag", signed.whole["attestation"])
        assert "not a tag" in signed.refused().message
        signed.put_right()
        signed.write("attestation", signed.whole["tag"])
        assert "not an in-toto statement" in signed.refused().message

    def test_two_blobs_of_one_size(self, place: Place, release: Signing) -> None:
        manifest = place.manifest()
        place.push(manifest, PROD, release)
        first, second = (
            place.remote.blob_path(entry.files["model.so"].digest)
            for entry in manifest.entries.values()
        )
        contents = first.read_bytes(), second.read_bytes()
        assert len(contents[0]) == len(contents[1])
        first.write_bytes(contents[1])
        second.write_bytes(contents[0])
        local = place.fresh()
        with pytest.raises(IntegrityError, match="bad_digest"):
            place.pull(PROD, release.trust, local)
        assert nothing_visible(local)

    @pytest.mark.parametrize("name", ["tag", "index", "manifest", "attestation", "blob"])
    @pytest.mark.parametrize(
        "damage", [lambda data: data[:-1], lambda data: b"", lambda data: data + b" "]
    )
    def test_cut_off_emptied_and_longer(
        self, signed: Signed, name: str, damage: Callable[[bytes], bytes]
    ) -> None:
        changed = damage(signed.whole[name])
        signed.write(name, changed)
        if name in ("tag", "attestation") and changed.endswith(b" "):
            # Space around a document is not part of what it says.
            assert signed.place.pull(PROD, signed.trust).manifest == signed.manifest
        else:
            signed.refused()


@pytest.mark.parametrize("name", ["tag", "attestation"])
@pytest.mark.parametrize("field", ["payload", "payloadType", "signatures"])
@pytest.mark.parametrize("value", [None, "", [], {}, 0, "AAAA", [None], [{}], [{"sig": "AAAA"}]])
def test_any_value_in_an_envelope_is_refused_and_breaks_nothing(
    signed: Signed, name: str, field: str, value: Any
) -> None:
    document = json.loads(signed.whole[name])
    document[field] = value
    signed.write(name, json.dumps(document).encode())
    signed.refused()


def test_a_tag_that_is_a_link_or_a_folder_is_refused(
    place: Place, release: Signing, tmp_path: Path
) -> None:
    place.push(place.manifest(), PROD, release)
    tag = place.path(PROD.document_name)
    outside = tmp_path / "outside.json"
    tag.rename(outside)
    tag.symlink_to(outside)
    with pytest.raises(IntegrityError):
        place.pull(PROD, release.trust)
    tag.unlink()
    tag.mkdir()
    with pytest.raises(IntegrityError):
        place.pull(PROD, release.trust)
