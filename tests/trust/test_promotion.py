"""Promotion and rollback: a tag moves after checks, forwards or back, and its sequence only rises."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta

import pytest
from cache_samples import ANYONE, X86_V4, in_children
from trust_samples import (
    PROD,
    STAGING,
    Place,
    Signing,
    envelope_of,
    swapped,
    trust_in,
)

from neffbuild.cache.attestation import attestation_name
from neffbuild.cache.catalog import read_index
from neffbuild.cache.promote import Promoted, promote
from neffbuild.cache.tag import TagRef, TagStatement, Trust, resolve_tag
from neffbuild.cache.verify import verify_tag
from neffbuild.config.errors import ConfigError, IntegrityError, StoreError, UnitsIncomplete


def move(
    place: Place,
    source: TagRef | str = STAGING,
    target: TagRef = PROD,
    signing: Signing | None = None,
    **options: object,
) -> Promoted:
    chosen = {
        "trust": signing.trust if signing else ANYONE,
        "sign": signing.key.sign if signing else None,
        **options,
    }
    return promote(place.remote, place.builder, source, target, **chosen)  # type: ignore[arg-type]


def test_a_tag_comes_to_name_what_another_names(place: Place, release: Signing) -> None:
    pushed = place.push(place.manifest(), STAGING, release)
    moved = move(place, signing=release)
    assert moved.statement.index == pushed.index
    assert (moved.statement.sequence, moved.previous) == (1, None)
    for ref in (STAGING, PROD):
        assert place.pull(ref, release.trust).digest == pushed.manifest
        assert verify_tag(place.remote, ref, release.trust).ok


def test_a_promoted_index_is_not_merged_with_what_was_there(place: Place, release: Signing) -> None:
    place.push(place.manifest(platform=X86_V4), PROD, release)
    pushed = place.push(place.manifest(note="new"), STAGING, release)
    moved = move(place, signing=release)
    assert moved.statement.index == pushed.index
    assert moved.statement.sequence == 2
    index = read_index(place.remote, pushed.index)
    assert index is not None
    assert index.manifest_for(X86_V4) is None


class TestRollback:
    def test_an_older_tag_is_promoted_under_a_higher_sequence(
        self, place: Place, release: Signing
    ) -> None:
        first, second = TagRef("llama", "v1"), TagRef("llama", "v2")
        old = place.push(place.manifest(), first, release)
        new = place.push(place.manifest(note="new"), second, release)
        serving = place.fresh()
        seen = []
        for source in (first, second, first):
            moved = move(place, source, signing=release)
            pulled = place.pull(PROD, release.trust, serving)
            seen.append((pulled.digest, moved.statement.sequence))
        assert seen == [(old.manifest, 1), (new.manifest, 2), (old.manifest, 3)]

    def test_an_older_index_by_its_digest(self, place: Place, release: Signing) -> None:
        old = place.push(place.manifest(), PROD, release)
        place.push(place.manifest(note="new"), PROD, release)
        serving = place.fresh()
        place.pull(PROD, release.trust, serving)
        moved = move(place, old.index, signing=release)
        assert moved.previous is not None
        assert moved.previous.sequence == 2
        assert moved.statement.sequence == 3
        assert place.pull(PROD, release.trust, serving).digest == old.manifest
        # And forwards again, by what the tag named before.
        again = move(place, moved.previous.index, signing=release)
        assert again.statement.sequence == 4

    def test_a_manifest_by_its_digest(self, place: Place, release: Signing) -> None:
        old = place.push(place.manifest(), None, release)
        assert old.statement is None
        assert move(place, old.manifest, signing=release).statement.index == old.index

    def test_the_sequence_is_above_all_that_was_seen_or_is_required(
        self, place: Place, release: Signing
    ) -> None:
        """Also where somebody has removed the tag, or put an old one in its place."""
        pushed = place.push(place.manifest(), PROD, release)
        old = place.path(PROD.document_name).read_bytes()
        move(place, pushed.index, signing=release)
        move(place, pushed.index, signing=release)
        place.path(PROD.document_name).write_bytes(old)
        assert move(place, pushed.index, signing=release).statement.sequence == 4
        place.path(PROD.document_name).unlink()
        assert move(place, pushed.index, signing=release).statement.sequence == 5
        place.path(PROD.document_name).unlink()
        floor = Trust(True, 100, release.trust.check)
        assert (
            move(place, pushed.index, trust=floor, sign=release.key.sign).statement.sequence == 100
        )


class TestChecks:
    def test_no_such_tag_or_digest(self, place: Place) -> None:
        with pytest.raises(StoreError, match="no tag llama:staging"):
            move(place)
        with pytest.raises(StoreError, match="no index and no manifest"):
            move(place, "0" * 64)

    def test_missing_artifacts(self, place: Place, release: Signing) -> None:
        manifest = place.manifest()
        place.push(manifest, STAGING, release)
        gone = min(manifest.blobs)
        place.remote.blob_path(gone).unlink()
        with pytest.raises(IntegrityError, match=f"1 of the 4 blobs.*{gone}"):
            move(place, signing=release)
        assert not place.path(PROD.document_name).exists()

    @pytest.mark.parametrize("what", ["index", "manifest"])
    def test_missing_documents(self, place: Place, release: Signing, what: str) -> None:
        pushed = place.push(place.manifest(), STAGING, release)
        names = {
            "index": f"indexes/{pushed.index}.json",
            "manifest": f"manifests/{pushed.manifest}.json",
        }
        place.path(names[what]).unlink()
        with pytest.raises(IntegrityError, match=names[what]):
            move(place, signing=release)

    def test_missing_units(self, place: Place, release: Signing) -> None:
        place.push(place.manifest(lacking=1), STAGING, release, allow_partial=True)
        with pytest.raises(UnitsIncomplete, match="decode_b3_ctx4096"):
            move(place, signing=release)
        assert move(place, signing=release, allow_partial=True).statement.sequence == 1

    def test_an_expired_source(self, place: Place, release: Signing) -> None:
        past = datetime.now(UTC) - timedelta(seconds=1)
        pushed = place.push(place.manifest(), STAGING, release, expires=past)
        with pytest.raises(IntegrityError, match="expired"):
            move(place, signing=release)
        # What expired is the tag. Its index can be named again, for another while.
        future = datetime.now(UTC) + timedelta(days=1)
        moved = move(place, pushed.index, STAGING, release, expires=future)
        assert moved.statement.expires == future
        assert place.pull(STAGING, release.trust).digest == pushed.manifest

    def test_a_source_that_was_rolled_back(self, place: Place, release: Signing) -> None:
        place.push(place.manifest(), STAGING, release)
        old = place.path(STAGING.document_name).read_bytes()
        place.push(place.manifest(note="new"), STAGING, release)
        place.path(STAGING.document_name).write_bytes(old)
        with pytest.raises(IntegrityError, match="sequence 1; 2"):
            move(place, signing=release)

    def test_the_lowest_sequence_is_of_the_target_alone(
        self, place: Place, release: Signing
    ) -> None:
        place.push(place.manifest(), STAGING, release)
        floor = Trust(True, 7, release.trust.check)
        assert move(place, trust=floor, sign=release.key.sign).statement.sequence == 7


class TestSignatures:
    def test_whoever_signs_promotes_signed_tags_only(self, place: Place, release: Signing) -> None:
        """A tag can be moved by whoever can write to the store: signing it on would be signing theirs."""
        place.push(place.manifest(), STAGING)
        own = Trust(check=release.trust.check)
        with pytest.raises(IntegrityError, match="is not signed"):
            move(place, trust=own, sign=release.key.sign)

    def test_a_tag_signed_by_a_stranger(
        self, place: Place, release: Signing, stranger: Signing
    ) -> None:
        place.push(place.manifest(), STAGING, stranger)
        with pytest.raises(IntegrityError, match=stranger.key.keyid):
            move(place, signing=release)

    def test_what_a_digest_names_can_be_vouched_for(self, place: Place, release: Signing) -> None:
        pushed = place.push(place.manifest(), STAGING)
        own = Trust(check=release.trust.check)
        with pytest.raises(IntegrityError, match="provenance is not signed"):
            move(place, pushed.index, signing=release)  # asked to require signatures, it does
        move(place, pushed.index, trust=own, sign=release.key.sign)
        assert place.pull(PROD, release.trust).digest == pushed.manifest

    def test_another_key_signs_beside_the_first(
        self, place: Place, release: Signing, stranger: Signing
    ) -> None:
        """CI signs what it builds, somebody else what is served: each can be believed alone."""
        pushed = place.push(place.manifest(), STAGING, stranger)
        both = trust_in(release.public, stranger.public)
        move(place, trust=both, sign=release.key.sign)
        assert place.pull(PROD, release.trust).digest == pushed.manifest
        assert place.pull(STAGING, stranger.trust).digest == pushed.manifest
        with pytest.raises(IntegrityError):
            place.pull(PROD, stranger.trust)
        signatures = envelope_of(place.path(attestation_name(pushed.manifest))).signatures
        assert {one.keyid for one in signatures} == {release.key.keyid, stranger.key.keyid}
        # Signing once more replaces one's own.
        move(place, trust=both, sign=release.key.sign)
        again = envelope_of(place.path(attestation_name(pushed.manifest))).signatures
        assert len(again) == 2

    def test_a_required_signature_needs_a_key(self, place: Place, release: Signing) -> None:
        pushed = place.push(place.manifest(), STAGING, release)
        for source in (STAGING, pushed.index):
            with pytest.raises(ConfigError) as caught:
                move(place, source, trust=release.trust)
            assert caught.value.field == "--key"

    def test_a_signed_tag_does_not_become_an_unsigned_one(
        self, place: Place, release: Signing
    ) -> None:
        place.push(place.manifest(), STAGING, release)
        move(place, signing=release)
        with pytest.raises(ConfigError, match="is signed, and there is no key"):
            move(place)
        with pytest.raises(ConfigError, match="is signed, and there is no key"):
            place.push(place.manifest(), PROD)

    def test_a_target_that_cannot_be_believed_is_put_right(
        self, place: Place, release: Signing, stranger: Signing
    ) -> None:
        """Nothing of it is kept, not its sequence either."""
        pushed = place.push(place.manifest(), STAGING, release)
        tag = envelope_of(place.path(STAGING.document_name))
        forged = TagStatement(PROD, pushed.index, (1 << 53) - 1)
        envelope = type(tag)(tag.payload_type, forged.payload())
        for signatures in ((), stranger.key.sign(envelope.signed_bytes)):
            place.path(PROD.document_name).parent.mkdir(parents=True, exist_ok=True)
            place.path(PROD.document_name).write_bytes(
                envelope.with_signatures(signatures).to_json()
            )
            moved = move(place, signing=release)
            assert moved.previous is None
            assert moved.statement.sequence < 10
            assert place.pull(PROD, release.trust).digest == pushed.manifest

    def test_a_push_does_not_merge_with_what_it_cannot_believe(
        self, place: Place, release: Signing, stranger: Signing
    ) -> None:
        """It would sign somebody else's manifest of another platform. And it says so before it copies."""
        place.push(place.manifest(platform=X86_V4), PROD, stranger)
        blobs = sorted(path.name for path in place.path("blobs").rglob("*"))
        for signed in (release, None):
            with pytest.raises((IntegrityError, ConfigError)):
                place.push(place.manifest(note="new"), PROD, signed)
        unsigned = Place(place.root / "unsigned", place.remote)
        staging = unsigned.push(unsigned.manifest(platform=X86_V4), STAGING)
        assert staging.statement is not None
        own = Trust(check=release.trust.check)
        with pytest.raises(IntegrityError, match="is not signed"):
            place.push(place.manifest(note="new"), STAGING, trust=own, sign=release.key.sign)
        after = sorted(path.name for path in place.path("blobs").rglob("*"))
        assert after == blobs

    def test_a_planted_manifest_in_a_signed_index_is_not_promoted(
        self, place: Place, release: Signing
    ) -> None:
        place.push(place.manifest(), STAGING, release)
        digest, index = place.plant(swapped(place.manifest()))
        for source in (digest, index):
            with pytest.raises(IntegrityError, match="provenance is not signed"):
                move(place, source, signing=release)


def test_promotions_at_once_each_have_a_sequence_of_their_own(
    place: Place, release: Signing
) -> None:
    sources = [TagRef("llama", f"v{number}") for number in range(3)]
    for number, source in enumerate(sources):
        place.push(place.manifest(note=str(number)), source, release)

    def one(number: int) -> int:
        other = Place(place.root / f"from{number}", place.remote)
        for _ in range(5):
            statement = move(other, sources[number], signing=release).statement
            os.write(write, b"%d\n" % statement.sequence)
        return 0

    read, write = os.pipe()
    assert in_children(3, one) == [0, 0, 0]
    os.close(write)
    with os.fdopen(read) as pipe:
        assert sorted(map(int, pipe)) == list(range(1, 16))
    assert resolve_tag(place.remote, PROD, release.trust).sequence == 15
